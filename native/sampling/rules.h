// The acceptance rules (docs/losslessness.md) for one request's token tree, on as few rows as possible.
#pragma once

#include <vector>

#include "sampling/distribution.h"
#include "sampling/noise.h"

namespace sampling {

enum Rule : int32_t { kCoupled = 0, kRejection = 1, kBlock = 2, kTypical = 3 };

// One request's step; native/sampling.py has the same layout. Every array outlives the call.
//
// logits: (num_nodes + 1, V), of the root and of nodes 1..m. parents, tokens: (m). q_starts: (m + 1), where each node's
// q begins in q_ids and q_weights; null for deterministic drafts. prefix_len: the position of the token that the root's
// row decides. Written: path: (m), path_len of it; next_token; target_tokens: (m + 1), null if nobody wants them.
struct Request {
  const void* logits;
  const int32_t* parents;
  const int32_t* tokens;
  const int64_t* q_starts;
  const int32_t* q_ids;
  const float* q_weights;
  int32_t* target_tokens;
  int32_t* path;
  uint64_t seed;
  int64_t prefix_len;
  double temperature;
  double top_p;
  double min_p;
  double typical_p;
  double epsilon;
  double delta;
  int32_t top_k;
  Type type;
  Rule rule;
  int32_t num_nodes;
  int32_t path_len;
  int32_t next_token;

  Truncation truncation() const { return {top_p, min_p, typical_p, top_k}; }
};

// What is wrong with a request's tree or q, or null.
const char* check(const Request& request, size_t vocab_size);

// Decides requests one after another; owns the memory for one row and its residuals.
class Verifier {
 public:
  explicit Verifier(size_t vocab_size);

  // Write target_tokens, path, path_len and next_token.
  void verify(Request& request);

 private:
  int32_t target_token(const Request& request, int32_t row, int64_t position);
  void accept_coupled(Request& request);
  void accept_rejection(Request& request);
  void accept_block(Request& request);
  void accept_typical(Request& request);

  int32_t try_deterministic(const Request& request, const std::vector<int32_t>& children, int64_t position);
  int32_t try_sampled(const Request& request, const std::vector<int32_t>& children, int64_t position);
  void load_p(const Request& request, int32_t row, std::vector<double>& p);
  void load_q(const Request& request, int32_t node);
  double sum(const std::vector<double>& x) { return total(x.data(), x.size(), scratch_.data()); }
  void normalise(std::vector<double>& x);
  int32_t recover(const Request& request, const std::vector<double>& p, int64_t position);

  const size_t vocab_size_;
  Distribution distribution_;
  std::vector<double> p_, q_, residual_, scratch_;
};

}  // namespace sampling

extern "C" {

// Decide every request; return what is wrong with one of them, or null.
const char* sampling_verify(sampling::Request* requests, size_t count, size_t vocab_size, int num_threads);

}  // extern "C"
