// The place of a text in the prediction that the client sent.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "drafts/ngrams.h"
#include "drafts/recent.h"

namespace drafts {

constexpr int kMaxAgreement = 16;

// Where a prediction goes on after the text (-1: nowhere), and how many tokens before that place agree with the text.
struct Place {
  int at, agreement;
};

// Follows an output through the prediction.
class Prediction {
 public:
  // max_ngram: most tokens that must agree before the prediction is followed again; at most kMaxMatch.
  explicit Prediction(int max_ngram) : max_ngram_(max_ngram), index_(max_ngram) {}

  // Read a part of the prediction, before any output.
  void extend(const int32_t* tokens, size_t count) {
    tokens_.insert(tokens_.end(), tokens, tokens + count);
    for (size_t i = 0; i < count; ++i) index_.append(tokens[i]);
  }

  // Read one token of the output; return whether it is the one that was expected.
  bool append(int token) {
    agrees_ = agrees_ && expected_ < size() && tokens_[expected_] == token;
    expected_ = std::min(expected_ + 1, size());
    return agrees_;
  }

  // Move to the expected place after the text, and return whether the prediction fits there. Where the text has left
  // the prediction, the place is that of the longest known suffix of at least `needed` tokens; of several, the one
  // nearest to the expected place. If none is needed and none is known, the prediction is followed as if one of its
  // tokens had been replaced.
  bool follow(const Recent& recent, int needed = 0) {
    for (int length = std::min(max_ngram_, recent.count); !agrees_ && length >= std::max(needed, 1); --length) {
      const int place = index_.nearest(index_.find(recent.backwards.data(), length), expected_);
      if (place >= 0) expected_ = place, agrees_ = true;
    }
    return agrees_ = agrees_ || needed == 0;
  }

  // The place after the text; nowhere once the prediction has ended.
  Place start(const Recent& recent) {
    static_assert(kMaxMatch >= kMaxAgreement);
    if (tokens_.empty()) return {-1, 0};
    follow(recent);
    if (expected_ == size()) return {-1, 0};
    int agreement = 0, most = std::min({expected_, recent.count, kMaxAgreement});
    while (agreement < most && tokens_[expected_ - 1 - agreement] == recent.backwards[agreement]) ++agreement;
    return {expected_, agreement};
  }

  // The place after one more token.
  Place after(Place place, int token) const {
    bool goes_on = place.at >= 0 && tokens_[place.at] == token && place.at + 1 < size();
    return goes_on ? Place{place.at + 1, place.agreement + 1} : Place{-1, 0};
  }

  // The token at a place.
  int operator[](Place place) const { return tokens_[place.at]; }

  // The tokens from the expected place on, at most `most`; return how many are written.
  int write_next(int most, int32_t* tokens) const {
    const int count = std::min(most, size() - expected_);
    std::copy_n(tokens_.begin() + expected_, count, tokens);
    return count;
  }

 private:
  int size() const { return int(tokens_.size()); }

  std::vector<int> tokens_;
  int max_ngram_;
  NgramIndex index_;
  int expected_ = 0;  // the index of the next token; the size once the prediction has ended
  bool agrees_ = true;
};

}  // namespace drafts
