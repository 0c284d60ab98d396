// The likeliest tokens by a head's own distribution q; runtime/models/heads/engines/ranking.py is the reference.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "heads/trees.h"

namespace native {

// How the target samples, as far as the ranking depends on it. takes_argmax: the target takes the argmax of its logits,
// or of log p + noise. draws: tokens are sampled from q without replacement, with the drafter's noise of the step
// `epoch`.
// sharpness: how much surer guesses are than their q says, as in runtime/models/heads/sharpness.py; 1: no surer.
struct Ranking {
  double temperature, top_p, min_p, typical_p, sharpness;  // temperature 0: greedy
  uint64_t seed;
  int32_t top_k, takes_argmax, draws, epoch;
};

// A distribution from which tokens are sampled: at most kMaxSampled tokens, with weights that are not normalised.
constexpr int kMaxSampled = 64;
struct Weights {
  std::vector<int32_t> tokens;
  std::vector<float> weights;
};

class Ranker {
 public:
  // Write the k best guesses for the token at `position` to `found`, the best first, equal scores in the order of their
  // columns; return how many there are, since tokens without probability are left out. logits: (size).
  // ids: (size), the target's id of each column; null: the column itself.
  int rank(const float* logits, int size, const int32_t* ids, const Ranking& ranking, int64_t position, int k,
           Guess* found);

  // Find the q from which the tokens after a row are sampled; arguments as for `rank`.
  const Weights& find_q(const float* logits, int size, const int32_t* ids, const Ranking& ranking);

  // Write up to k tokens, sampled with the noise of `node` and without replacement from the q found last, in the order
  // of sampling; return how many there are. For their scores and bounds see runtime/models/heads/engines/sampled.py.
  int sample(const Ranking& ranking, int64_t position, int node, int k, Guess* found);

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
  void sharpen(double sharpness);
  void add_noise(const int32_t* ids, uint64_t seed, int64_t position);

  struct Key {
    double value;
    int place;  // in q
  };

  std::vector<Column> columns_;
  Weights q_;  // the likeliest first
  std::vector<Key> keys_;
  std::vector<char> is_sampled_;  // by place in q
};

}  // namespace native
