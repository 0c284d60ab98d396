// A suffix automaton of a text that grows: what followed each of its substrings, and how often.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace drafts {

constexpr int kMaxFollowers = 256;

// A string that occurs in the text: its state and its length; state 0 is the empty string.
struct Match {
  int state = 0, length = 0;
};

// Appending costs O(1) amortised and at most max_match + 1 increments. max_match: length of the longest match.
class Automaton {
 public:
  explicit Automaton(int max_match) : max_match_(max_match) { new_state(0), states_[0].link = -1; }

  size_t num_tokens() const { return num_tokens_; }

  // Begin another sequence; no string runs across two.
  void begin() {
    for (int state = recent_.state; state; state = states_[state].link) ++states_[state].ended;
    whole_ = 0, recent_ = {};
  }

  void append(int token) {
    ++num_tokens_;
    int last = whole_;
    if (next(last, token)) {  // another sequence began with the same tokens
      whole_ = split(last, token);
    } else {
      whole_ = new_state(states_[last].length + 1);
      for (; last >= 0 && !next(last, token); last = states_[last].link) set_next(last, token, whole_);
      int link = last >= 0 ? split(last, token) : 0;
      states_[whole_].link = link;
    }
    count_up(token);
  }

  // The longest suffix of these tokens, of at most max_match, that occurs with a token after it; the newest first.
  Match find(const int* backwards, int count) const {
    Match match;
    for (int i = std::min(count, max_match_); i-- > 0;) match = matched(match, backwards[i]);
    return continuing(match);
  }

  // The longest suffix of a single sequence, of at most max_match tokens, that occurred before.
  Match repeated() const {
    if (!whole_) return {};
    int earlier = states_[whole_].link;
    return states_[earlier].length < max_match_ ? Match{earlier, states_[earlier].length} : recent_;
  }

  // The longest suffix of the match plus `token`, of at most max_match tokens, that has a follower.
  Match after(Match match, int token) const { return continuing(cut(matched(match, token))); }

  Match shorter(Match match) const {
    int link = states_[match.state].link;
    return {link, states_[link].length};
  }

  // The token that followed the match most recently.
  int latest(Match match) const { return states_[match.state].latest; }

  // How often that token followed the match.
  int times(Match match) const { return states_[next(match.state, latest(match))].count; }

  // Call use(token, times, end) for the first kMaxFollowers different tokens that followed the match: how often each
  // did, and where it was last seen.
  template <typename Use>
  void each_follower(Match match, Use&& use) const {
    for (const Edge& edge : states_[match.state].next) {
      if (edge.order < kMaxFollowers) use(edge.token, states_[edge.state].count, states_[edge.state].end);
    }
  }

  // How often any token followed the match.
  int continued(Match match) const {
    const State& state = states_[match.state];
    return state.count - state.ended - (whole_ != 0 && state.end == num_tokens_);
  }

 private:
  // order: the number of tokens that were seen after the state before this one.
  struct Edge {
    int token, state, order;
    bool operator<(int other) const { return token < other; }
  };

  struct State {
    int length = 0, link = 0, count = 0, latest = -1;
    int ended = 0;  // how many sequences end with its strings
    size_t end = 0;
    std::vector<Edge> next;  // by token
  };

  int new_state(int length) {
    states_.emplace_back().length = length;
    return int(states_.size()) - 1;
  }

  // The state that the token leads to; 0 = there is none, since no token leads to the empty string.
  int next(int state, int token) const {
    const auto& edges = states_[state].next;
    auto found = std::lower_bound(edges.begin(), edges.end(), token);
    return found != edges.end() && found->token == token ? found->state : 0;
  }

  void set_next(int state, int token, int to) {
    auto& edges = states_[state].next;
    auto found = std::lower_bound(edges.begin(), edges.end(), token);
    if (found != edges.end() && found->token == token) {
      found->state = to;
    } else {
      edges.insert(found, Edge{token, to, int(edges.size())});
    }
  }

  int split(int state, int token) {
    int longer = next(state, token), length = states_[state].length + 1;
    if (states_[longer].length == length) return longer;
    State copy = states_[longer];
    copy.length = length;
    states_.push_back(std::move(copy));
    int clone = int(states_.size()) - 1;
    states_[longer].link = clone;
    for (; state >= 0 && next(state, token) == longer; state = states_[state].link) set_next(state, token, clone);
    return clone;
  }

  void count_up(int token) {
    for (int before = recent_.state; before; before = states_[before].link) states_[before].latest = token;
    int state = next(recent_.state, token);
    recent_ = cut({state, recent_.length + 1});
    for (; state; state = states_[state].link) {
      ++states_[state].count;
      states_[state].end = num_tokens_;
    }
  }

  // The longest suffix of the match plus `token` that occurs.
  Match matched(Match match, int token) const {
    int state = next(match.state, token);
    while (!state && match.state) match = shorter(match), state = next(match.state, token);
    return state ? Match{state, match.length + 1} : Match{};
  }

  // The longest suffix of the match that has a follower.
  Match continuing(Match match) const {
    while (match.state && states_[match.state].next.empty()) match = shorter(match);
    return match;
  }

  Match cut(Match match) const {
    if (match.length <= max_match_) return match;
    int shorter = states_[match.state].link;
    return {states_[shorter].length >= max_match_ ? shorter : match.state, max_match_};
  }

  int max_match_;
  std::vector<State> states_;
  size_t num_tokens_ = 0;
  int whole_ = 0;
  Match recent_;
};

}  // namespace drafts
