// Chains of a draft model: one call computes a pass over contexts, then drafts token by token, with a pass for each.
#pragma once

#include <cstdint>

#include "forward/model.h"
#include "heads/ranking.h"
#include "forward/segments.h"

namespace native {

// The chain after one segment of a pass, a segment without nodes: `length` tokens, each the best by the ranking
// (ranking.h). It ends early, after a token whose path scores below min_score.
struct Chain {
  Ranking ranking;
  double min_score;
  int32_t segment, length;
};

// tokens: (num_chains, max_length), the drafts. lengths: (num_chains), how many tokens each chain has.
struct Chains {
  int32_t num_chains, max_length;
  const Chain* chains;
  int32_t *tokens, *lengths;
};

}  // namespace native

extern "C" {

// Run the pass, then draft every chain; keys and values are computed for all drafts of a chain but the last. Returns
// null, or what is wrong with the arguments; nothing was drafted then.
const char* native_draft_chains(native::Model* model, const native::SegmentPass* first, const native::Chains* chains);

}  // extern "C"
