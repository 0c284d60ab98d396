// Chains of a draft model: one call computes a pass and then, token by token, the passes of the drafted tokens.
#pragma once

#include <cstdint>

#include "model.h"
#include "ranking.h"
#include "segments.h"

namespace native {

// The chain after one segment of a pass, which has no nodes: `length` tokens, each the best by the ranking (trees.h).
// It ends early, after a token whose path scores below min_score.
struct Chain {
  Ranking ranking;
  double min_score;
  int32_t segment, length;
};

// tokens: (num_chains, max_length), the drafts. lengths: (num_chains), how many there are of each chain.
struct Chains {
  int32_t num_chains, max_length;
  const Chain* chains;
  int32_t *tokens, *lengths;
};

}  // namespace native

extern "C" {

// Run the pass, then draft every chain; the keys and values of all drafts but the last of a chain are computed. Returns
// null, or what is wrong with the arguments; then nothing was drafted.
const char* native_draft_chains(native::Model* model, const native::SegmentPass* first, const native::Chains* chains);

}  // extern "C"
