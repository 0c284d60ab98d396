// Drafting heads: one call drafts the trees of several requests, level by level, without returning to its caller.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "forward/pool.h"
#include "forward/product.h"
#include "heads/ranking.h"
#include "heads/trees.h"

namespace native {

// Return whether `count` items from `first` on lie within `size` items.
inline bool is_within(int64_t first, int64_t count, int64_t size) {
  return first >= 0 && count >= 0 && first + count <= size;
}

// y = W x + b; an empty bias is 0.
struct Affine {
  Linear weight;
  std::vector<float> bias;
};

// One request. Its context rows are num_rows rows of the drafting's arrays from first_row on, the newest last. root:
// the last committed token. position: the position of the tokens below the root. max_s: time budget; the draft stops
// before a level that would exceed it if it took as long as the slowest so far. min_score: as in TreeShape.
// The blocks of its cache are num_blocks of the drafting's blocks from first_block on. Its first row is in slot
// first_slot of these blocks, and the slots gap_start … gap_stop − 1 hold no row.
struct DraftCall {
  Ranking ranking;
  double max_s, min_score;
  int64_t position;
  int32_t root, max_nodes, max_depth, width, first_choice, num_choices;
  int32_t first_row, num_rows, first_block, num_blocks, first_slot, gap_start, gap_stop;
};

// All requests of a pass; every array belongs to the caller.
struct Drafting {
  int32_t num_calls, num_threads, num_rows, num_choices, num_blocks, max_tree;
  const DraftCall* calls;
  const int32_t *tokens, *choice_parents, *choice_ranks, *blocks;  // tokens: (num_rows), those of the context rows
  const float* features;                     // (num_rows, feature_width), the target's, one row for each context row
  const float *cosines, *sines;              // (num_positions, head_dim / 2), for a head with positions
  float *cache, *states;                     // (2, kv_heads, num_slots, head_dim) and (num_slots, hidden_size)
  int32_t num_positions, num_slots, block_tokens;
  int32_t *tree_sizes, *tree_tokens, *tree_parents;  // (num_calls) and (num_calls, max_tree): the drafts
  // (num_calls, max_tree + 1) and (num_calls, max_tree + 1, kMaxSampled): the q from which the children of each node of
  // the tree, the root first, were sampled; null if no call draws.
  int32_t *q_sizes, *q_tokens;
  float* q_weights;
  double* selection_s;                               // written: seconds spent on ranking tokens and growing trees
};

// A request's growing tree. number: the call's index. states[i]: where the head keeps the state of candidate i.
struct Draft {
  Draft(int number, const DraftCall& call, const TreeShape& shape)
      : number(number), call(call), tree(shape), states(1, -1) {}

  int number;
  const DraftCall& call;
  GrowingTree tree;
  std::vector<int> states;
  int num_read = 0;        // candidates that the head has read
  std::vector<Weights> q;  // by candidate, for those that have been expanded, if the call draws
};

using Drafts = std::vector<Draft*>;

// What the heads share: growing trees level by level. A subclass reads the contexts and the candidates, and computes
// the logits after them.
class Head {
 public:
  Head(int hidden_size, int feature_width, int vocab_size, int max_threads)
      : hidden_size(hidden_size), feature_width(feature_width), vocab_size(vocab_size),
        pool_(std::make_shared<Pool>(max_threads)) {}
  virtual ~Head() = default;

  // Return what is wrong with a drafting, or null; if null, no index is outside its array.
  virtual const char* refusal(const Drafting& drafting) const;

  void draft(const Drafting& drafting);

  const int hidden_size, feature_width, vocab_size;  // vocab_size: of the tokens that the head reads
  std::vector<float> embedding;                      // (vocab_size, hidden_size)
  std::vector<Affine> linears;                       // in the order that the subclass documents

 protected:
  // Read the contexts, and give every root its state.
  virtual void begin(const Drafting& drafting, const Drafts& drafts) = 0;

  // Return the logits after the candidates of all frontiers, draft by draft: (n, num_logits).
  virtual const float* logits(const Drafts& drafts) = 0;

  // Give their states to the candidates of all frontiers, which have just been added.
  virtual void advance(const Drafting& drafting, const Drafts& drafts) = 0;

  virtual int num_logits() const = 0;
  virtual const int32_t* draft_ids() const { return nullptr; }
  virtual bool is_beam_search() const { return false; }
  virtual bool shares_row() const { return false; }  // all candidates of a level have the same logits

  const float* embedding_of(int token) const { return embedding.data() + size_t(token) * hidden_size; }

  // target (num_rows, outputs) = x (num_rows, inputs) · Wᵀ + b.
  void multiply_rows(const Affine& affine, int num_rows, const float* x, float* target);

  // x += silu(W x + b) in place: a residual block of Medusa or ReDrafter.
  void apply_block(const Affine& affine, int num_rows, float* x);

  const std::shared_ptr<Pool> pool_;
  int num_threads_ = 1;

 private:
  using Clock = std::chrono::steady_clock;

  const char* refusal_of(const Drafting& drafting, const DraftCall& call) const;
  void add_level(const Drafts& drafts, double& selection_s);
  void sample_children(Draft& draft, const float* rows, int64_t position, int k);
  void write(const Drafting& drafting, const std::vector<Draft>& drafts) const;
  void write_q(const Drafting& drafting, size_t call, const Draft& draft, const std::vector<int32_t>& number) const;

  Ranker ranker_;
  std::vector<Guess> guesses_;
  std::vector<int32_t> counts_;
  std::vector<float> packed_, block_;
};

}  // namespace native
