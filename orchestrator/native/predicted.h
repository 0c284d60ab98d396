// The place of a text in its prediction, as PredictionCandidates of orchestrator/proposers/candidates.py finds it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ngrams.h"

namespace drafts {

constexpr int kPredictedNgram = 6, kMaxAgreement = 16;

// Where a prediction goes on after the text (-1: nowhere), and how many tokens before that place agree with the text.
struct Place {
  int at, agreement;
};

// Follows an output through the prediction that the client sent.
class Prediction {
 public:
  // Read a part of the prediction, before any output.
  void extend(const int32_t* tokens, size_t count) {
    tokens_.insert(tokens_.end(), tokens, tokens + count);
    for (size_t i = 0; i < count; ++i) index_.append(tokens[i]);
  }

  // Read one token of the output.
  void append(int token) {
    agrees_ = agrees_ && expected_ < size() && tokens_[expected_] == token;
    expected_ = std::min(expected_ + 1, size());
  }

  // The place after the text, whose last `count` tokens are given, the newest first. Where the text has left the
  // prediction, the place is that of the longest known suffix; of several, the one nearest to the expected place.
  template <size_t capacity>
  Place start(const std::array<int, capacity>& backwards, int count) {
    static_assert(capacity >= kMaxAgreement && capacity >= kPredictedNgram);
    if (tokens_.empty()) return {-1, 0};
    if (!agrees_) find(backwards.data(), count);
    if (expected_ == size()) return {-1, 0};
    int agreement = 0, most = std::min({expected_, count, kMaxAgreement});
    while (agreement < most && tokens_[expected_ - 1 - agreement] == backwards[agreement]) ++agreement;
    return {expected_, agreement};
  }

  // The place after one more token.
  Place after(Place place, int token) const {
    bool goes_on = place.at >= 0 && tokens_[place.at] == token && place.at + 1 < size();
    return goes_on ? Place{place.at + 1, place.agreement + 1} : Place{-1, 0};
  }

  // The token at a place.
  int operator[](Place place) const { return tokens_[place.at]; }

 private:
  int size() const { return int(tokens_.size()); }

  // Without any known suffix the prediction is followed as if one of its tokens had been replaced.
  void find(const int* backwards, int count) {
    agrees_ = true;
    for (int length = std::min(kPredictedNgram, count); length > 0; --length) {
      const int place = index_.nearest(index_.find(backwards, length), expected_);
      if (place < 0) continue;
      expected_ = place;
      return;
    }
  }

  std::vector<int> tokens_;
  NgramIndex index_{kPredictedNgram};
  int expected_ = 0;  // the index of the next token; the size once the prediction has ended
  bool agrees_ = true;
};

}  // namespace drafts
