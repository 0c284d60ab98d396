// Decoding without returning to the caller: a pass over the trees of all sequences, its decision, the next trees.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../orchestrator/native/drafts.h"
#include "../../orchestrator/native/rules.h"
#include "drafters.h"
#include "model.h"
#include "segments.h"

namespace native {

// Decides `count` steps over a vocabulary; returns what is wrong, or null. The function of orchestrator/native/sampling.cpp.
using Verify = const char* (*)(sampling::Request*, size_t count, size_t vocab_size, int num_threads);

// How a sequence goes on. Its trees, each of at most max_nodes nodes and max_depth levels, come from `proposer` or, if
// that is null, from the drafter that `use` names, if any.
// costs: of a proposer that sizes its trees by them.
// It ends with max_tokens tokens, or with one of stop_ids after the first min_tokens of them.
struct Continuation {
  void* proposer;
  drafts::Costs costs;
  DrafterUse use;
  const int32_t* stop_ids;
  int32_t num_stop_ids, min_tokens, max_tokens, max_nodes, max_depth;
};

// Up to num_steps steps for every segment of a pass. No other pass begins after limit_us, once `interrupt` is set, once
// a sequence has ended, or once it has no slots left for its next tree or draft.
// The trees of the first pass are the caller's. The trees after each step are written to node_…, one after another,
// including those after the last one, for a call that goes on there; the paths of all steps to `paths`. Both have room
// for num_steps times all max_nodes, `paths` for the first trees too.
struct Decoding {
  int32_t num_steps, limit_us, max_logits;  // max_logits: rows of the pass's logits
  const volatile int32_t* interrupt;
  sampling::Request* requests;  // (num_segments), how each sequence is sampled; all about its rows is filled in here
  Verify verify;
  drafts::Next next;
  const Continuation* continuations;  // (num_segments)
  const Drafter* drafters;            // (num_drafters)
  const int32_t *num_threads, *first_threads;  // (14), of a pass by the bits of its number of rows; of the first one
  int32_t *path_lens, *next_tokens, *num_nodes;  // (num_steps, num_segments), written; num_nodes: of the trees after each
  int32_t* is_over;   // (num_segments), written: whether no step can follow, for one of the reasons above
  int32_t* num_read;  // (num_segments), written: the tokens of a sequence that its drafter has read
  int32_t *node_tokens, *node_parents, *node_names, *paths;  // written
  int32_t* figures;   // (num_steps, 4), written: µs of the pass, of its decision, of the drafts after it; its threads
  int32_t num_drafters;
  int32_t num_made;   // written: how many steps were made
};

}  // namespace native

extern "C" {

// Make the steps; the pass has one row of each segment before its tree. Returns null, or what is wrong with the
// arguments; then the steps before num_made are sound.
const char* native_decode(native::Model* model, const native::SegmentPass* first, native::Decoding* decoding);

}  // extern "C"
