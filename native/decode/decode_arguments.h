// What may be wrong with the arguments of a burst.
#pragma once

#include <algorithm>
#include <cstdint>

#include "drafts/united.h"
#include "decode/decode.h"

namespace native {

constexpr int kMaxMembers = 32 / drafts::kNameBits;

// Return what is wrong, or null.
inline const char* refusal(const Model& model, const SegmentPass& pass, const Decoding& decoding) {
  if (decoding.num_steps < 1) return "num_steps: below 1";
  if (pass.num_rows != pass.num_segments + pass.num_nodes) return "segments: not one row each before their trees";
  int64_t num_rows = pass.num_segments;
  for (int i = 0; i < pass.num_segments; ++i) {
    const Continuation& each = decoding.continuations[i];
    if (each.max_tokens < 1) return "max_tokens: below 1";
    if (each.num_stop_ids < 0) return "num_stop_ids: below 0";
    if (each.num_members < 0 || each.num_members > kMaxMembers) return "num_members: not in 0..4";
    const auto is_drafter = [](const Member& member) { return !member.proposer; };
    if (std::count_if(each.members, each.members + each.num_members, is_drafter) != (each.use.drafter >= 0))
      return "members: not one without a proposer for each drafter";
    if (each.max_nodes < 0 || each.max_depth < 0) return "max_nodes, max_depth: below 0";
    num_rows += each.max_nodes;
  }
  num_rows = std::max<int64_t>(num_rows, pass.num_rows);
  if (num_rows > kMaxPassRows) return "max_nodes: more rows than a pass may have";
  if (num_rows > decoding.max_logits) return "max_logits: fewer than the rows of a pass";
  return model.shape.vocab_size < 1 ? "the model has no vocabulary" : nullptr;
}

}  // namespace native
