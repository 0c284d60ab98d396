#include "heads/trees.h"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace native {

GrowingTree::GrowingTree(const TreeShape& shape)
    : candidates{{-1, -1, 0, 0.0, 0.0}}, frontier{0}, fan_out(shape.width), shape_(shape), levels_left_(shape.max_depth) {
  if (!shape.num_choices) return;
  choice_children_.resize(shape.num_choices + 1);
  candidate_of_choice_.assign(shape.num_choices + 1, 0);
  choices_to_expand_ = {0};
  fan_out = 0;
  for (int i = 0; i < shape.num_choices; ++i) {
    choice_children_[shape.choice_parents[i]].push_back(i + 1);
    fan_out = std::max(fan_out, shape.choice_ranks[i] + 1);
  }
}

void GrowingTree::add_children(const GuessRows& rows, bool shares_row) {
  if (shape_.num_choices) grow_static(rows, shares_row);
  else grow_dynamic(rows, shares_row);
}

bool GrowingTree::is_likely(int parent, const Guess& guess) const {
  const bool stands_anyway = shape_.draws && shape_.num_choices;
  return candidates[parent].score + (stands_anyway ? 0.0 : guess.bound) >= shape_.min_score;
}

int GrowingTree::add(int parent, const Guess& guess) {
  const Candidate& above = candidates[parent];
  candidates.push_back({guess.token, parent, above.depth + 1, above.score + guess.score, above.score + guess.bound});
  return int(candidates.size()) - 1;
}

void GrowingTree::grow_dynamic(const GuessRows& rows, bool shares_row) {
  std::vector<int> level;
  for (size_t i = 0; i < frontier.size(); ++i) {
    const size_t row = shares_row ? 0 : i;
    const int count = std::min(rows.counts[row], fan_out);
    for (int rank = 0; rank < count; ++rank) {
      const Guess& guess = rows.guesses[row * rows.stride + rank];
      if (!is_likely(frontier[i], guess)) break;  // nor are the later ones
      level.push_back(add(frontier[i], guess));
    }
  }
  if (level.empty()) return frontier.clear();  // the beams of the level before remain the last
  last_level_ = best(std::move(level), fan_out, &Candidate::score);
  if (!shape_.beam_search) {
    // A candidate that is not among the best now never will be, and nor will its descendants.
    std::vector<int> all(candidates.size() - 1);
    std::iota(all.begin(), all.end(), 1);
    const std::vector<int> kept = best(std::move(all), shape_.max_nodes, &Candidate::bound);
    const auto is_dropped = [&](int node) { return std::find(kept.begin(), kept.end(), node) == kept.end(); };
    last_level_.erase(std::remove_if(last_level_.begin(), last_level_.end(), is_dropped), last_level_.end());
  }
  frontier = --levels_left_ > 0 ? last_level_ : std::vector<int>{};
}

void GrowingTree::grow_static(const GuessRows& rows, bool shares_row) {
  std::vector<int> next_frontier, next_choices;
  for (size_t i = 0; i < frontier.size(); ++i) {
    const size_t row = shares_row ? 0 : i;
    for (const int choice : choice_children_[choices_to_expand_[i]]) {
      const int rank = shape_.choice_ranks[choice - 1];
      if (rank >= rows.counts[row]) continue;
      const Guess& guess = rows.guesses[row * rows.stride + rank];
      if (!is_likely(frontier[i], guess)) continue;
      candidate_of_choice_[choice] = add(frontier[i], guess);
      if (choice_children_[choice].empty()) continue;
      next_frontier.push_back(candidate_of_choice_[choice]);
      next_choices.push_back(choice);
    }
  }
  frontier = std::move(next_frontier);
  choices_to_expand_ = std::move(next_choices);
}

std::vector<int> GrowingTree::drafted() const {
  std::vector<int> nodes;
  if (shape_.num_choices) {
    for (const int candidate : candidate_of_choice_)
      if (candidate) nodes.push_back(candidate);
    return nodes;
  }
  if (shape_.beam_search) {
    for (int leaf : last_level_)
      for (; leaf; leaf = candidates[leaf].parent) nodes.push_back(leaf);
    std::sort(nodes.begin(), nodes.end());
    nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());
  } else {
    nodes.resize(candidates.size() - 1);
    std::iota(nodes.begin(), nodes.end(), 1);
  }
  return best(std::move(nodes), shape_.max_nodes, &Candidate::bound);
}

// Among equal scores, the smaller depth comes first, then the smaller number: no ancestor ranks below its descendant.
std::vector<int> GrowingTree::best(std::vector<int> nodes, int count, double Candidate::*value) const {
  const auto key = [&](int node) {
    return std::make_tuple(-(candidates[node].*value), candidates[node].depth, node);
  };
  const auto middle = nodes.begin() + std::min<size_t>(size_t(count), nodes.size());
  std::partial_sort(nodes.begin(), middle, nodes.end(), [&](int a, int b) { return key(a) < key(b); });
  nodes.erase(middle, nodes.end());
  return nodes;
}

}  // namespace native
