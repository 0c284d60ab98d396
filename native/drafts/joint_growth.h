// The joint growth of orchestrator/drafting/joint_growth.py: one cut through the nodes of all requests of a pass.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <mutex>
#include <queue>
#include <utility>
#include <vector>

#include "drafts/drafts.h"
#include "drafts/growth.h"

namespace drafts {

constexpr double kMargin = 0.02;

inline Growth& growth_of(const JointTree& joint) { return *static_cast<Growth*>(static_cast<Proposer*>(joint.growth)); }

// Let trees grow, and write how many nodes of each are worth sending.
inline void grow_jointly(JointTree* joint_trees, size_t count, const Costs& costs, int max_nodes) {
  const double plain_rate = (1.0 + kMargin) * costs.rate_to_beat;
  double rate = plain_rate, tokens = 1.0 + costs.others_tokens, contexts_s = 0.0;
  std::vector<size_t> added;
  size_t num_best = 0;
  const auto minus_worth = [&](size_t number) {
    return plain_rate * joint_trees[number].context_row_s - growth_of(joint_trees[number]).likeliest();
  };
  std::priority_queue<std::pair<double, size_t>, std::vector<std::pair<double, size_t>>, std::greater<>> waiting;
  for (size_t number = 0; number < count; ++number) waiting.emplace(minus_worth(number), number);
  while (int(added.size()) < max_nodes && -waiting.top().first > rate * costs.row_s[added.size()]) {
    const size_t number = waiting.top().second;
    waiting.pop();
    tokens += growth_of(joint_trees[number]).likeliest();
    contexts_s += joint_trees[number].context_row_s;
    growth_of(joint_trees[number]).add(joint_trees[number].tree);
    added.push_back(number);
    const double pass_s = costs.seconds[added.size()] + contexts_s;
    if (tokens > rate * pass_s) rate = tokens / pass_s, num_best = added.size();
    waiting.emplace(minus_worth(number), number);
  }
  for (size_t number = 0; number < count; ++number) joint_trees[number].num_nodes = 0;
  for (size_t i = 0; i < num_best; ++i) ++joint_trees[added[i]].num_nodes;
}

// `Curve.at` of orchestrator/core/cost_model.py for one number of rows.
inline double seconds_at(const Curve& curve, double rows) {
  const double *begin = curve.rows, *end = begin + curve.num_points;
  const ptrdiff_t next = std::upper_bound(begin, end, rows) - begin, last = curve.num_points - 1;
  if (next == 0) return curve.seconds[0];
  if (next > last) return curve.seconds[last] + curve.row_s * (rows - curve.rows[last]);
  const double slope = (curve.seconds[next] - curve.seconds[next - 1]) / (curve.rows[next] - curve.rows[next - 1]);
  return slope * (rows - curve.rows[next - 1]) + curve.seconds[next - 1];
}

// `least_slopes` of orchestrator/core/cost_model.py.
inline std::vector<double> least_slopes(const std::vector<double>& seconds) {
  const auto slope = [&](size_t from, size_t to) { return (seconds[to] - seconds[from]) / double(to - from); };
  std::vector<double> slopes(seconds.size(), std::numeric_limits<double>::infinity());
  std::vector<size_t> hull{seconds.size() - 1};
  for (size_t at = seconds.size() - 1; at-- > 0;) {
    while (hull.size() > 1 && slope(at, hull[hull.size() - 2]) <= slope(at, hull.back())) hull.pop_back();
    slopes[at] = slope(at, hull.back());
    hull.push_back(at);
  }
  return slopes;
}

// Learn from what each request has committed, and let the trees after it grow together.
inline void grow_jointly(JointTree* joint_trees, size_t count, const SharedPass& pass) {
  std::vector<Growth*> growths;
  int max_nodes = 0;
  for (size_t i = 0; i < count; ++i) {
    growths.push_back(&growth_of(joint_trees[i]));
    growths[i]->follow(joint_trees[i].committed, joint_trees[i].num_committed);
    max_nodes += joint_trees[i].max_nodes;
  }
  std::vector<double> seconds(size_t(max_nodes) + 1);
  for (int i = 0; i <= max_nodes; ++i) seconds[i] = seconds_at(pass.curve, pass.num_rows + i) + pass.contexts_s;
  const std::vector<double> row_s = least_slopes(seconds);
  const double plain_s = seconds_at(pass.curve, pass.num_requests) + pass.contexts_s;
  const double rate_to_beat = std::max(pass.num_requests / plain_s, pass.tokens / seconds[0]);
  const Growth::Locks locks(growths);
  for (size_t i = 0; i < count; ++i) growths[i]->begin_tree(joint_trees[i].max_nodes, joint_trees[i].max_depth);
  grow_jointly(joint_trees, count, Costs{seconds.data(), row_s.data(), pass.tokens - 1.0, rate_to_beat}, max_nodes);
}

}  // namespace drafts
