// From logits to the distribution p, one row at a time (docs/sampling.md; bit for bit that of auditor/reference).
#pragma once

#include <vector>

#include "sampling/elementary.h"

namespace sampling {

// The dtype of the logits.
enum Type : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat64 = 2 };

struct Truncation {
  double top_p, min_p, typical_p;
  int32_t top_k;

  // True if it may remove tokens from a vocabulary of this size.
  bool applies(size_t vocab_size) const {
    return cuts_top_k(vocab_size) || top_p < 1.0 || min_p > 0.0 || typical_p < 1.0;
  }
  bool cuts_top_k(size_t vocab_size) const { return 0 < top_k && size_t(top_k) < vocab_size; }
};

// The id of the first largest logit; of the first nan, if there is one.
size_t argmax(const void* logits, Type type, size_t vocab_size);

// Write the ids of the `count` <= vocab_size largest logits, the best first and the lowest id first among equals.
void largest_ids(const void* logits, Type type, size_t vocab_size, size_t count, int32_t* ids);

// One row's distribution and the memory to compute it, reused for every row.
//
// After `compute`: either is_dense, and log p of token i is values[i] - log_total; or the support is ids with log_probs.
// weights: (V) if is_dense, else as long as ids: p / scale.
class Distribution {
 public:
  explicit Distribution(size_t vocab_size);

  // False if the logits have no largest number (nan, infinite): then there is no distribution.
  bool compute(const void* logits, Type type, double temperature, const Truncation& truncation);

  double log_prob(size_t i) const { return is_dense ? (values[i] - largest) - log_total : log_probs[i]; }
  // Write log p, or p, of every token.
  void write_log_probs(double* target) const;
  void write_probs(double* target) const;

  const size_t vocab_size;
  bool is_dense = true;
  double largest = 0.0, log_total = 0.0, scale = 1.0;
  std::vector<double> values, weights, log_probs;
  std::vector<int32_t> ids;

 private:
  void to_support();
  template <typename IsKept>
  void keep_if(IsKept is_kept);
  void keep_at_least(double floor);
  void cut_top_k(size_t k);
  void cut_nucleus(const std::vector<double>& ranks, double mass);
  void cut_typical(double mass);
  size_t nucleus_size(const std::vector<double>& ranks, double mass, std::vector<int32_t>& order);
  void renormalise();

  std::vector<double> scratch_, dense_;
};

}  // namespace sampling
