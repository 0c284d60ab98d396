// Predicted outputs: the prediction is followed as long as it fits; after k > 1 rejected drafts in a row, the last k − 1
// tokens must agree with it, and if that is more than max_ngram, it is no longer used.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "drafts/drafts.h"
#include "drafts/prediction.h"
#include "drafts/recent.h"

namespace drafts {

struct PredictedOptions {
  int32_t max_ngram, draft_len;
};

class Predicted : public PredictionProposer {
 public:
  explicit Predicted(const PredictedOptions& options) : draft_len_(options.draft_len), prediction_(options.max_ngram) {}

  void read_prediction(const int32_t* tokens, size_t count) override { prediction_.extend(tokens, count); }

  void read_prompt(const int32_t* tokens, size_t count) override {
    for (size_t i = 0; i < count; ++i) recent_.add(tokens[i]);
  }

  int next(const int32_t* committed, size_t count, int max_nodes, int max_depth, const Tree& tree) override {
    for (size_t i = 0; i < count; ++i) read(committed[i]);
    const int longest = std::min({draft_len_, max_nodes, max_depth});
    const bool fits = longest > 0 && prediction_.follow(recent_, std::max(num_rejected_ - 1, 0));
    const int num_nodes = fits ? prediction_.write_next(longest, tree.tokens) : 0;
    for (int i = 0; i < num_nodes; ++i) tree.parents[i] = i, tree.names[i] = 0;
    has_drafted_ = num_nodes > 0;
    return num_nodes;
  }

 private:
  void read(int token) {
    const bool agrees = prediction_.append(token);
    recent_.add(token);
    if (has_drafted_) num_rejected_ = agrees ? 0 : num_rejected_ + 1;
    has_drafted_ = false;
  }

  int draft_len_;
  Prediction prediction_;
  Recent recent_{};
  bool has_drafted_ = false;  // since the last token
  int num_rejected_ = 0;      // drafts in a row whose first token is not that of the text
};

}  // namespace drafts
