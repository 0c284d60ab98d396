// The likeliest tokens by a head's own distribution q; runtime/heads/engines/ranking.py is the reference.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "trees.h"

namespace native {

// How the target samples, as far as the ranking depends on it. takes_argmax: of its logits, or of log p + noise.
// draws: tokens are sampled from q without replacement, with the drafter's noise of the step `epoch`.
struct Ranking {
  double temperature, top_p, min_p, typical_p;  // temperature 0: greedy
  uint64_t seed;
  int32_t top_k, takes_argmax, draws, epoch;
};

// What tokens are sampled from: at most kMaxSampled of them, their weights not normalised.
constexpr int kMaxSampled = 64;
struct Weights {
  std::vector<int32_t> tokens;
  std::vector<float> weights;
};

class Ranker {
 public:
  // Write the k best guesses for the token at `position` to `found`, the best first; return how many there are, for
  // tokens without probability are left out. Equal scores stand in the order of their columns. logits: (size).
  // ids: (size), the target's id of each column; null: the column itself.
  int rank(const float* logits, int size, const int32_t* ids, const Ranking& ranking, int64_t position, int k,
           Guess* found);

  // Of the last ranking that draws.
  const Weights& weights() const { return weights_; }

 private:
  struct Column {
    int32_t index;
    float logit;
    double score;
  };

  static bool is_likelier(const Column& a, const Column& b);
  void choose_columns(const float* logits, int size, int count);
  void truncate(const Ranking& ranking);
  void keep(size_t count);
  void normalise();
  void sharpen();
  void add_noise(const int32_t* ids, uint64_t seed, int64_t position, uint32_t stream, uint32_t epoch);
  void draw(const int32_t* ids, const Ranking& ranking, int64_t position);

  std::vector<Column> columns_;
  Weights weights_;
};

}  // namespace native
