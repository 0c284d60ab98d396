// A burst: steps that run without returning to the caller. Each is a pass over the trees of all sequences, its
// verification, and the next trees.
#pragma once

#include <cstddef>
#include <cstdint>

#include "drafts/drafts.h"
#include "sampling/rules.h"
#include "heads/drafters.h"
#include "forward/model.h"
#include "forward/segments.h"

namespace native {

// A method that drafts for a sequence: `proposer` or, if that is null, the drafter that the sequence's `use` names.
// max_nodes: of its own tree.
struct Member {
  drafts::Proposer* proposer;
  int32_t max_nodes;
};

// How a sequence continues. Its trees, each of at most max_nodes nodes and max_depth levels, come from its members, at
// most one of them a drafter: from one method, or merged from those of a union, at most four.
// The sequence ends after max_tokens tokens, or with one of stop_ids after the first min_tokens tokens.
struct Continuation {
  const Member* members;
  DrafterUse use;
  const int32_t* stop_ids;
  int32_t num_members, num_stop_ids, min_tokens, max_tokens, max_nodes, max_depth;
};

// Up to num_steps steps for every segment of a pass. No more passes begin after limit_us, or once `interrupt` is not 0,
// a sequence has ended, or a sequence has no slots left for its next tree or draft.
// The caller gives the trees of the first pass. The trees after each step are written to node_…, one after another,
// including those after the last step, with which a later call may continue; the paths of all steps are written to
// `paths`. Both have room for num_steps times the sum of all max_nodes, `paths` also for the first trees.
struct Decoding {
  int32_t num_steps, limit_us, max_logits;  // max_logits: rows of the array of logits
  const volatile int32_t* interrupt;
  sampling::Request* requests;  // (num_segments), how each sequence is sampled; its rows are filled in for each pass
  const Continuation* continuations;  // (num_segments)
  const Drafter* drafters;            // (num_drafters)
  // (14) each: threads of a pass, by the bit length of its number of rows; first_threads: for the first pass of that
  // length.
  const int32_t *num_threads, *first_threads;
  // From here on, everything but num_drafters is written.
  int32_t *path_lens, *next_tokens, *num_nodes;  // (num_steps, num_segments); num_nodes: of the tree after the step
  int32_t* is_over;   // (num_segments): whether the sequence has ended, or has no slots left
  int32_t* num_read;  // (num_segments): how many of a sequence's tokens its drafter has read
  int32_t *node_tokens, *node_parents, *node_names, *paths;
  int32_t* figures;   // (num_steps, 4): µs of the pass, of its verification, and of the drafts after it; its threads
  int32_t num_drafters;
  int32_t num_made;   // how many steps have run
};

}  // namespace native

extern "C" {

// Run the steps; in the first pass, each segment has one row before its tree. Returns null, or what is wrong with the
// arguments; the first num_made steps are then valid.
const char* native_decode(native::Model* model, const native::SegmentPass* first, native::Decoding* decoding);

}  // extern "C"
