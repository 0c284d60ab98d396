// The drafts of orchestrator/proposers/suffix.py from the request's own text.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <queue>
#include <tuple>
#include <vector>

#include "automaton.h"
#include "drafts.h"

namespace drafts {

struct SuffixOptions {
  int32_t max_depth, draft_len, is_chain;
  double factor, min_prob;
};

class Suffix : public Proposer {
 public:
  explicit Suffix(const SuffixOptions& options) : options_(options), text_(options.max_depth) {}

  int next(const int32_t* committed, size_t count, int max_nodes, int max_depth, const Costs*, const Tree& tree) override {
    for (size_t i = 0; i < count; ++i) text_.append(committed[i]);
    const Match match = text_.repeated();
    const int size = std::min({int(options_.factor * match.length), options_.draft_len, max_nodes});
    waiting_ = {};
    if (max_depth > 0) add_below(match, 0, 0, 1.0);
    int num_nodes = 0;
    while (!waiting_.empty() && num_nodes < size) {
      const Waiting node = waiting_.top();
      waiting_.pop();
      tree.tokens[num_nodes] = node.token;
      tree.parents[num_nodes] = node.parent;
      tree.names[num_nodes] = 0;
      ++num_nodes;
      if (node.depth < max_depth && num_nodes < size)
        add_below(text_.after(node.above, node.token), num_nodes, node.depth, -node.minus_prob);
    }
    return num_nodes;
  }

 private:
  // A node that may be added: the most probable one first, the one found first among equals.
  struct Waiting {
    double minus_prob;
    int parent, rank, depth, token;
    Match above;
    bool operator>(const Waiting& other) const {
      return std::tie(minus_prob, parent, rank) > std::tie(other.minus_prob, other.parent, other.rank);
    }
  };

  struct Follower {
    int token, times;
    size_t end;
  };

  // Add the probable nodes below a match: the more frequent first, then the more recent.
  void add_below(Match match, int parent, int depth, double prob) {
    if (!match.state) return;
    const double scale = prob / text_.continued(match);
    likely_.clear();
    text_.each_follower(match, [&](int token, int times, size_t end) {
      if (times * scale >= options_.min_prob) likely_.push_back({token, times, end});
    });
    std::sort(likely_.begin(), likely_.end(),
              [](const Follower& a, const Follower& b) { return std::tie(a.times, a.end) > std::tie(b.times, b.end); });
    if (options_.is_chain && likely_.size() > 1) likely_.resize(1);
    int rank = 0;
    for (const Follower& each : likely_)
      waiting_.push({-each.times * scale, parent, rank++, depth + 1, each.token, match});
  }

  SuffixOptions options_;
  Automaton text_;
  std::vector<Follower> likely_;
  std::priority_queue<Waiting, std::vector<Waiting>, std::greater<>> waiting_;
};

}  // namespace drafts
