// Suffix decoding: what followed the longest suffix that occurred before, from the text, the memory or the corpus,
// whichever promises the most accepted tokens.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

#include "drafts/automaton.h"
#include "drafts/corpus.h"
#include "drafts/drafts.h"
#include "drafts/response_memory.h"

namespace drafts {

struct SuffixOptions {
  int32_t max_depth, draft_len, is_chain;
  double factor, min_prob;
};

class Suffix : public Proposer {
 public:
  Suffix(const SuffixOptions& options, const Recollection* memory, const Corpus* corpus)
      : options_(options), text_(options.max_depth), memory_(memory), corpus_(corpus) {}

  int next(const int32_t* committed, size_t count, int max_nodes, int max_depth, const Tree& tree) override {
    read(committed, count);
    budget_nodes_ = max_nodes, budget_depth_ = max_depth;
    best_ = {};
    keep(draft_from(kText, text_, text_.repeated()));
    with_texts(memory_, [&](const Texts& texts) {
      if (auto [text, match] = longest(texts, recent_.data(), int(recent_.size())); text)
        keep(draft_from(kMemory, *text, match));
    });
    if (corpus_) keep(draft_from_corpus());
    for (size_t i = 0; i < best_.nodes.size(); ++i) {
      tree.tokens[i] = best_.nodes[i].first;
      tree.parents[i] = best_.nodes[i].second;
      tree.names[i] = best_.source;
    }
    return int(best_.nodes.size());
  }

 private:
  // The sources, by the names of their nodes.
  enum Source { kText, kMemory, kCorpus };

  // nodes: token and parent of each. score: the expected number of accepted tokens.
  struct Draft {
    Source source = kText;
    std::vector<std::pair<int, int>> nodes;
    double score = 0.0;
  };

  // A node that may be added: the most probable one first, the one found first among equals. at: an index of the states
  // from which the nodes below it are found.
  struct PendingNode {
    double minus_prob;
    int parent, rank, depth, token;
    size_t at;
    bool operator>(const PendingNode& other) const {
      return std::tie(minus_prob, parent, rank) > std::tie(other.minus_prob, other.parent, other.rank);
    }
  };

  struct Follower {
    int token, times;
    size_t end;
    double prob;  // of the path that ends with it
  };

  void read(const int32_t* committed, size_t count) {
    for (size_t i = 0; i < count; ++i) text_.append(committed[i]);
    const size_t num_new = std::min(count, size_t(options_.max_depth));
    recent_.insert(recent_.begin(), num_new, 0);
    std::reverse_copy(committed + count - num_new, committed + count, recent_.begin());
    recent_.resize(std::min(recent_.size(), size_t(options_.max_depth)));
  }

  // Of equal drafts, the first one stays.
  void keep(Draft draft) {
    if (draft.score > best_.score) best_ = std::move(draft);
  }

  int size_after(int match_length) const { return std::min(int(options_.factor * match_length), options_.draft_len); }

  // Draft from what followed a match in a text.
  Draft draft_from(Source source, const Automaton& text, Match match) {
    std::vector<Match> matches{match};  // by node, the root first
    return grow(source, match.length, budget_depth_, [&](const PendingNode& node, int number) {
      if (number) matches.push_back(text.after(matches[node.at], node.token));
      add_below(text, matches.back(), matches.size() - 1, node, number);
    });
  }

  // Draft from what followed the places of a match in the corpus.
  Draft draft_from_corpus() {
    const Found found = corpus_->longest(recent_.data(), int(recent_.size()));
    const int depth = std::min({size_after(found.length), budget_nodes_, budget_depth_});
    if (depth <= 0) return {};
    std::vector<std::vector<Continuation>> rows{corpus_->continuations(found)};
    return grow(kCorpus, found.length, depth, [&](const PendingNode& node, int number) {
      if (number) rows.push_back(with(rows[node.at], node.depth - 1, node.token));
      add_shares(rows.back(), rows.size() - 1, node, number);
    });
  }

  // Add the most probable nodes, as many as the length of the match allows. expand(node, number): adds those below one.
  template <typename Expand>
  Draft grow(Source source, int match_length, int max_depth, Expand&& expand) {
    Draft draft{source, {}, 0.0};
    const size_t size = size_t(std::max(std::min(size_after(match_length), budget_nodes_), 0));
    waiting_ = {};
    PendingNode node{-1.0, 0, 0, 0, 0, 0};
    while (true) {
      if (node.depth < max_depth && draft.nodes.size() < size) expand(node, int(draft.nodes.size()));
      if (waiting_.empty() || draft.nodes.size() >= size) return draft;
      node = waiting_.top();
      waiting_.pop();
      draft.nodes.emplace_back(node.token, node.parent);
      draft.score -= node.minus_prob;
    }
  }

  // Add the probable nodes below a match: the more frequent first, then the more recent.
  void add_below(const Automaton& text, Match match, size_t at, const PendingNode& node, int number) {
    if (!match.state) return;
    const double scale = -node.minus_prob / text.continued(match);
    likely_.clear();
    text.each_follower(match, [&](int token, int times, size_t end) {
      if (times * scale >= options_.min_prob) likely_.push_back({token, times, end, times * scale});
    });
    std::sort(likely_.begin(), likely_.end(),
              [](const Follower& a, const Follower& b) { return std::tie(a.times, a.end) > std::tie(b.times, b.end); });
    add(at, node, number);
  }

  // Add the probable tokens at the node's depth of continuations: the more frequent first, then the lower ids.
  void add_shares(const std::vector<Continuation>& rows, size_t at, const PendingNode& node, int number) {
    std::vector<int> tokens;
    for (const Continuation& row : rows) {
      if (row.size > node.depth && row.tokens[node.depth] != corpus_->separator) tokens.push_back(row.tokens[node.depth]);
    }
    std::sort(tokens.begin(), tokens.end());
    likely_.clear();
    for (auto first = tokens.begin(); first != tokens.end();) {
      auto last = std::upper_bound(first, tokens.end(), *first);
      const int times = int(last - first);
      likely_.push_back({*first, times, 0, -node.minus_prob * times / double(rows.size())});
      first = last;
    }
    std::stable_sort(likely_.begin(), likely_.end(),
                     [](const Follower& a, const Follower& b) { return a.times > b.times; });
    while (!likely_.empty() && likely_.back().prob < options_.min_prob) likely_.pop_back();
    add(at, node, number);
  }

  void add(size_t at, const PendingNode& node, int number) {
    if (options_.is_chain && likely_.size() > 1) likely_.resize(1);
    int rank = 0;
    for (const Follower& each : likely_) waiting_.push({-each.prob, number, rank++, node.depth + 1, each.token, at});
  }

  // The continuations that have the token at this depth.
  static std::vector<Continuation> with(const std::vector<Continuation>& rows, int depth, int token) {
    std::vector<Continuation> found;
    std::copy_if(rows.begin(), rows.end(), std::back_inserter(found), [&](const Continuation& row) {
      return row.size > depth && row.tokens[depth] == token;
    });
    return found;
  }

  const SuffixOptions options_;
  Automaton text_;
  const Recollection* const memory_;
  const Corpus* const corpus_;
  std::vector<int> recent_;  // the last tokens of the text, the newest first
  int budget_nodes_ = 0, budget_depth_ = 0;
  Draft best_;
  std::vector<Follower> likely_;
  std::priority_queue<PendingNode, std::vector<PendingNode>, std::greater<>> waiting_;
};

}  // namespace drafts
