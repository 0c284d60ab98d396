#include "heads/heads.h"

#include <algorithm>

namespace native {

namespace {


double seconds_since(std::chrono::steady_clock::time_point began) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

}  // namespace

const char* Head::refusal(const Drafting& d) const {
  if (d.num_calls < 1 || d.num_rows < 1) return "a drafting needs calls and rows";
  if (d.num_threads < 1 || d.num_threads > pool_->size()) return "num_threads is above the pool's";
  for (int row = 0; row < d.num_rows; ++row)
    if (d.tokens[row] < 0 || d.tokens[row] >= vocab_size) return "tokens: a token outside the vocabulary";
  for (int call = 0; call < d.num_calls; ++call)
    if (const char* wrong = refusal_of(d, d.calls[call])) return wrong;
  return nullptr;
}

const char* Head::refusal_of(const Drafting& d, const DraftCall& c) const {
  if (c.root < 0 || c.root >= vocab_size) return "root: a token outside the vocabulary";
  if (c.max_nodes < 1 || c.max_nodes > d.max_tree) return "max_nodes: beyond the arrays of the trees";
  if (c.ranking.draws && (!d.q_sizes || c.ranking.takes_argmax || c.ranking.temperature <= 0.0))
    return "draws: for trees of sampled tokens, with room for q";
  if (!(c.ranking.sharpness > 0.0 && c.ranking.sharpness <= 1.0)) return "sharpness: outside 0 … 1";
  if (c.max_depth < 1 || (c.num_choices ? c.num_choices > c.max_nodes : c.width < 1 || c.width > d.max_tree))
    return "the tree has no shape";
  if (c.num_rows < 1 || !is_within(c.first_row, c.num_rows, d.num_rows)) return "first_row: beyond the rows";
  if (!is_within(c.first_choice, c.num_choices, d.num_choices)) return "first_choice: beyond the choices";
  for (int i = 0; i < c.num_choices; ++i) {
    if (d.choice_parents[c.first_choice + i] < 0 || d.choice_parents[c.first_choice + i] > i)
      return "choice_parents: a parent must come before its child";
    if (d.choice_ranks[c.first_choice + i] < 0 || d.choice_ranks[c.first_choice + i] >= vocab_size)
      return "choice_ranks: outside the vocabulary";
  }
  return nullptr;
}

void Head::draft(const Drafting& drafting) {
  const auto began = Clock::now();
  num_threads_ = drafting.num_threads;
  const Pool::Awake awake(*pool_, num_threads_);
  std::vector<Draft> all;
  all.reserve(drafting.num_calls);
  for (int i = 0; i < drafting.num_calls; ++i) {
    const DraftCall& c = drafting.calls[i];
    all.emplace_back(i, c, TreeShape{c.max_nodes, c.max_depth, c.width, is_beam_search() && !c.ranking.draws, c.num_choices,
                                  drafting.choice_parents + c.first_choice, drafting.choice_ranks + c.first_choice,
                                  c.min_score, c.ranking.draws});
  }
  Drafts live;
  for (Draft& draft : all) live.push_back(&draft);
  begin(drafting, live);
  double longest_s = 0.0, level_began_s = seconds_since(began);
  *drafting.selection_s = 0.0;
  while (!live.empty()) {
    add_level(live, *drafting.selection_s);
    const double now_s = seconds_since(began);
    longest_s = std::max(longest_s, now_s - level_began_s);
    level_began_s = now_s;
    live.erase(std::remove_if(live.begin(), live.end(), [&](const Draft* draft) {
      return draft->tree.frontier.empty() || now_s + longest_s > draft->call.max_s;
    }), live.end());
    if (!live.empty()) advance(drafting, live);
  }
  write(drafting, all);
}

// Add the children of all frontiers; a child of a candidate at depth t has the position call.position + t.
void Head::add_level(const Drafts& drafts, double& selection_s) {
  const float* rows = logits(drafts);
  const auto began = Clock::now();
  for (Draft* draft : drafts) {
    GrowingTree& tree = draft->tree;
    const int count = shares_row() ? 1 : int(tree.frontier.size()), k = std::min(tree.fan_out, num_logits());
    const int64_t position = draft->call.position + tree.candidates[tree.frontier[0]].depth;
    guesses_.resize(tree.frontier.size() * k);
    counts_.resize(tree.frontier.size());
    if (draft->call.ranking.draws) {
      sample_children(*draft, rows, position, k);
    } else {
      for (int i = 0; i < count; ++i)
        counts_[i] = ranker_.rank(rows + size_t(i) * num_logits(), num_logits(), draft_ids(), draft->call.ranking,
                                  position, k, guesses_.data() + size_t(i) * k);
    }
    tree.add_children({guesses_.data(), counts_.data(), k}, shares_row() && !draft->call.ranking.draws);
    draft->states.resize(tree.candidates.size(), -1);
    rows += size_t(count) * num_logits();
  }
  selection_s += seconds_since(began);
}

// Sample the children of every candidate of the frontier, each with its own noise, even if they share a row.
void Head::sample_children(Draft& draft, const float* rows, int64_t position, int k) {
  const std::vector<int>& frontier = draft.tree.frontier;
  const Ranking& ranking = draft.call.ranking;
  draft.q.resize(draft.tree.candidates.size());
  for (size_t i = 0; i < frontier.size(); ++i) {
    if (i == 0 || !shares_row())
      draft.q[frontier[i]] = ranker_.find_q(rows + i * num_logits(), num_logits(), draft_ids(), ranking);
    else
      draft.q[frontier[i]] = draft.q[frontier[0]];
    counts_[i] = ranker_.sample(ranking, position, frontier[i], k, guesses_.data() + i * k);
  }
}

void Head::write(const Drafting& drafting, const std::vector<Draft>& drafts) const {
  for (size_t call = 0; call < drafts.size(); ++call) {
    const GrowingTree& tree = drafts[call].tree;
    const std::vector<int> nodes = tree.drafted();
    std::vector<int32_t> number(tree.candidates.size(), 0);
    for (size_t i = 0; i < nodes.size(); ++i) {
      number[nodes[i]] = int32_t(i) + 1;
      const size_t place = call * drafting.max_tree + i;
      drafting.tree_tokens[place] = tree.candidates[nodes[i]].token;
      drafting.tree_parents[place] = number[tree.candidates[nodes[i]].parent];
    }
    drafting.tree_sizes[call] = int32_t(nodes.size());
    if (drafting.q_sizes) write_q(drafting, call, drafts[call], number);
  }
}

// number: each candidate's node in the tree, 0 for the root and for candidates that are not in the tree.
void Head::write_q(const Drafting& drafting, size_t call, const Draft& draft,
                   const std::vector<int32_t>& number) const {
  for (size_t node = 0; node < draft.q.size(); ++node) {
    if (node && !number[node]) continue;
    const size_t place = call * (size_t(drafting.max_tree) + 1) + number[node];
    const Weights& q = draft.q[node];
    drafting.q_sizes[place] = int32_t(q.tokens.size());
    std::copy(q.tokens.begin(), q.tokens.end(), drafting.q_tokens + place * kMaxSampled);
    std::copy(q.weights.begin(), q.weights.end(), drafting.q_weights + place * kMaxSampled);
  }
}

void Head::multiply_rows(const Affine& affine, int num_rows, const float* x, float* target) {
  const Linear& w = affine.weight;
  const Tiles tiles(num_rows);
  grow(packed_, size_t(num_rows) * w.num_inputs);
  for (int row = 0; row < num_rows; ++row)
    pack(x + size_t(row) * w.num_inputs, 0, w.num_inputs, packed_row(packed_.data(), tiles, row, w));
  const Split split(w.num_blocks, 1, num_threads_);
  pool_->run(num_threads_, split.num_pieces, [&](int piece, int) {
    multiply(w, split.range(piece), tiles, packed_.data(),
             [&](int row, int first, int count, const float* sums) {
               float* outputs = target + size_t(row) * w.num_outputs + first;
               const float* bias = affine.bias.empty() ? nullptr : affine.bias.data() + first;
               for (int i = 0; i < count; ++i) outputs[i] = bias ? sums[i] + bias[i] : sums[i];
             });
  });
}

void Head::apply_block(const Affine& affine, int num_rows, float* x) {
  const size_t size = size_t(num_rows) * affine.weight.num_outputs;
  grow(block_, size);
  multiply_rows(affine, num_rows, x, block_.data());
  for (size_t i = 0; i < size; i += kLanes) store16(x + i, load16(x + i) + silu16(load16(block_.data() + i)));
}

}  // namespace native
