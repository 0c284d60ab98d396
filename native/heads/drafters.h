// Drafters in a burst (decode.h): after each step, one call of a head or draft model drafts for all of its sequences.
#pragma once

#include <cstdint>
#include <vector>

#include "heads/heads.h"
#include "forward/model.h"
#include "forward/segments.h"

namespace native {

// A head or a draft model (the other pointer is null), and its cache; every array belongs to the caller.
// cache: null for a head that keeps nothing between calls. blocks, choice_parents, choice_ranks: the arrays that the
// sequences' calls refer to. first_column: the first column that a head reads in a row of the target's features.
// max_positions: the longest context and draft.
struct Drafter {
  Head* head;
  Model* model;
  float *cache, *states;
  const float *cosines, *sines;
  const int32_t *blocks, *choice_parents, *choice_ranks;
  int32_t num_blocks, num_choices, num_positions, num_slots, block_tokens, max_positions, first_column, num_threads;
};

// How a sequence is drafted for. drafter: the drafter's index; −1: the sequence has none. call: the fields that do not
// change from draft to draft; for a draft model, only ranking, min_score, max_depth and the blocks are used. num_read:
// how many tokens the drafter has read, at least all up to the root; a draft model may also have read drafts of the
// first tree.
struct DrafterUse {
  int32_t drafter, num_read;
  DraftCall call;
};

// Drafts the trees of all sequences of a burst.
class Drafters {
 public:
  // pass: the target's first pass, of which only what all passes share is read. uses: (num_segments).
  Drafters(const Drafter* drafters, int num_drafters, std::vector<const DrafterUse*> uses, const SegmentPass& pass);

  // Return what is wrong with the drafters and their uses, or null.
  const char* refusal() const;

  bool has_use(int sequence) const { return sequences_[sequence].use->drafter >= 0; }

  // Note the tokens that a step has committed: those of the accepted path, and the next token.
  void commit(int sequence, const std::vector<int32_t>& tokens);

  // Return whether the drafter's cache has slots for a sequence's next draft.
  bool has_room(int sequence) const;

  // Ask for a sequence's next tree, within these limits.
  void ask(int sequence, int max_nodes, int max_depth);

  // Draft the trees that were asked for; features: the target's, by slot. Return what is wrong with the arguments, or
  // null.
  const char* draft(const float* features);

  // The last tree drafted for a sequence; empty unless it was asked for.
  const std::vector<int32_t>& tokens(int sequence) const { return sequences_[sequence].tokens; }
  const std::vector<int32_t>& parents(int sequence) const { return sequences_[sequence].parents; }

  int num_read(int sequence) const { return sequences_[sequence].num_read; }

 private:
  struct Sequence {
    const DrafterUse* use;
    const int32_t* target_blocks;
    int num_tokens;                          // committed tokens; the last one is the root
    int num_read;
    std::vector<int32_t> unread;             // the committed tokens that the drafter has not read
    int max_nodes = 0, max_depth = 0;        // limits of the tree that was asked for; 0: none was
    std::vector<int32_t> tokens, parents;
  };

  const Drafter& drafter_of(const Sequence& sequence) const { return drafters_[sequence.use->drafter]; }
  const char* draft_trees(const Drafter& drafter, const std::vector<Sequence*>& asking, const float* features);
  const char* draft_chains(const Drafter& drafter, const std::vector<Sequence*>& asking);
  void add_call(const Drafter& drafter, const Sequence& sequence, const float* features);
  int add_choices(const Drafter& drafter, const Sequence& sequence);

  const Drafter* const drafters_;
  const int num_drafters_, block_tokens_, feature_width_;
  std::vector<Sequence> sequences_;
  std::vector<DraftCall> calls_;
  std::vector<int32_t> tokens_, choice_parents_, choice_ranks_;
  std::vector<float> features_;
};

}  // namespace native
