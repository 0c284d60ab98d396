// Drafting heads: one call drafts the trees of several requests, level by level, without returning to its caller.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "pool.h"
#include "product.h"
#include "ranking.h"
#include "trees.h"

namespace native {

// y = W x + b; an empty bias is 0.
struct Affine {
  Linear weight;
  std::vector<float> bias;
};

// One request. Its context rows are first_row … first_row + num_rows of the drafting's arrays; the last of them is the
// newest. root: the last committed token. position: of the tokens below the root. max_s: no level is begun that would
// end later than so many seconds after the drafting began, if it took as long as the longest so far. min_score: as of
// TreeShape.
// The blocks of its cache are first_block … of the drafting's blocks; the first row stands in slot first_slot of them,
// and the slots of gap_start … gap_stop − 1 hold no row.
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
  const int32_t *tokens, *choice_parents, *choice_ranks, *blocks;  // tokens: of the context rows
  const float* features;                     // (num_rows, feature_width), of the target, one row for each context row
  const float *cosines, *sines;              // (num_positions, head_dim / 2), for a head with positions
  float *cache, *states;                     // (2, kv_heads, num_slots, head_dim) and (num_slots, hidden_size)
  int32_t num_positions, num_slots, block_tokens;
  int32_t *tree_sizes, *tree_tokens, *tree_parents;  // (num_calls) and (num_calls, max_tree): the drafts
  // (num_calls, max_tree + 1) and (num_calls, max_tree + 1, kMaxSampled): what the children of each node of the tree,
  // the root first, were sampled from; null if no call draws
  int32_t *q_sizes, *q_tokens;
  float* q_weights;
  double* selection_s;                               // seconds of the drafting that went into ranking and trees
};

// A request's growing tree. number: of the call. states[i]: where the head keeps what it has read of candidate i.
struct Draft {
  Draft(int number, const DraftCall& call, const TreeShape& shape)
      : number(number), call(call), tree(shape), states(1, -1) {}

  int number;
  const DraftCall& call;
  GrowingTree tree;
  std::vector<int> states;
  int num_read = 0;  // candidates that the head has read
  std::vector<Weights> q;  // of each candidate that has been expanded, if the call draws
};

using Drafts = std::vector<Draft*>;

// What the heads share: the levels. A head says how a context is read, how candidates are, and what may follow them.
class Head {
 public:
  Head(int hidden_size, int feature_width, int vocab_size, int max_threads)
      : hidden_size(hidden_size), feature_width(feature_width), vocab_size(vocab_size),
        pool_(std::make_shared<Pool>(max_threads)) {}
  virtual ~Head() = default;

  // Return what is wrong with a drafting, or null. No index of one that has no refusal leaves its array.
  virtual const char* refusal(const Drafting& drafting) const;

  void draft(const Drafting& drafting);

  const int hidden_size, feature_width, vocab_size;  // vocab_size: of the tokens that it reads
  std::vector<float> embedding;                      // (vocab_size, hidden_size)
  std::vector<Affine> linears;                       // in the order that the head names

 protected:
  // Read the contexts: give every root its state.
  virtual void begin(const Drafting& drafting, const Drafts& drafts) = 0;

  // Return the logits after the candidates of all frontiers, draft by draft, (n, num_logits).
  virtual const float* logits(const Drafts& drafts) = 0;

  // Give the candidates of all frontiers, which have just been added, their states.
  virtual void advance(const Drafting& drafting, const Drafts& drafts) = 0;

  virtual int num_logits() const = 0;
  virtual const int32_t* draft_ids() const { return nullptr; }
  virtual bool is_beam_search() const { return false; }
  virtual bool shares_row() const { return false; }  // all candidates of a level have the same logits

  const float* embedding_of(int token) const { return embedding.data() + size_t(token) * hidden_size; }

  // target (num_rows, outputs) = x (num_rows, inputs) · Wᵀ + b.
  void multiply_rows(const Affine& affine, int num_rows, const float* x, float* target);

  // x += silu(W x + b), a residual block of Medusa or ReDrafter, in place.
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
