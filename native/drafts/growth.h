// The trees of `auto`: grown from all sources of candidates, the likeliest node first, as long as a node pays.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <mutex>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

#include "drafts/automaton.h"
#include "drafts/candidates.h"
#include "drafts/corpus.h"
#include "drafts/drafts.h"
#include "drafts/estimates.h"
#include "drafts/prediction.h"
#include "drafts/recent.h"
#include "drafts/response_memory.h"

namespace drafts {

// kMaxProbability: the highest that an estimate gives a candidate. kAgreement: the factor by which each additional source
// that names a token raises its prior odds. kMargin: a tree is sent only if it promises this fraction more tokens per
// second than plain steps.
constexpr double kMaxProbability = 0.99, kAgreement = 3.0, kMargin = 0.02;
// Candidates are distinguished by the highest probability that the sources before theirs give, in this many grades.
constexpr int kGrades = 5;
constexpr int kPredictedNgram = 6;  // the default of `predicted`

class Growth : public PredictionProposer {
 public:
  Growth(Estimates* estimates, const Tables* tables, const Corpus* corpus, const Recollection* memory, bool is_chain)
      : estimates_(estimates), tables_(tables), corpus_(corpus), memory_(memory), is_chain_(is_chain) {}

  void read_prediction(const int32_t* tokens, size_t count) override { prediction_.extend(tokens, count); }

  void read_prompt(const int32_t* tokens, size_t count) override {
    for (size_t i = 0; i < count; ++i) append(tokens[i]);
  }

  // Read new output. That of steps without a tree is compared with the candidates that would have been proposed, except
  // what precedes the first tree.
  void read(const int32_t* tokens, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      if (i >= num_judged_ && has_grown_) judge(tokens[i]);
      append(tokens[i]);
      prediction_.append(tokens[i]);
    }
    num_judged_ = 0;
  }

  // Set what the next trees are sized by. seconds: of a pass in which the request has 1, 2, … rows. others_tokens: those
  // that the other requests are expected to get from it. rate_to_beat: tokens per second without drafts. range: of the
  // request's temperature.
  void size_by(const double* seconds, size_t count, double others_tokens, double rate_to_beat, int range) {
    seconds_.assign(seconds, seconds + count);
    row_s_ = least_slopes(seconds_);
    others_tokens_ = others_tokens, rate_to_beat_ = rate_to_beat, range_ = range;
  }

  int next(const int32_t* committed, size_t count, int max_nodes, int max_depth, const Tree& tree) override {
    learn(committed, count);
    read(committed, count);
    options_.clear();
    return max_nodes > 0 && max_depth > 0 && !seconds_.empty() ? grow(max_nodes, max_depth, tree) : 0;
  }

 private:
  // Keeps the counts and the earlier responses, which the growths of a process share, from changing while a tree grows.
  class Locks {
   public:
    explicit Locks(const Growth& growth) : estimates_(growth.estimates_->mutex) {
      if (growth.memory_) memory_ = std::unique_lock(growth.memory_->memory->mutex);
    }

   private:
    std::unique_lock<std::mutex> estimates_, memory_;
  };

  // For each number of rows, the least mean price of a row beyond them; infinite for the last.
  static std::vector<double> least_slopes(const std::vector<double>& seconds) {
    std::vector<double> slopes(seconds.size(), std::numeric_limits<double>::infinity());
    for (size_t from = 0; from < seconds.size(); ++from)
      for (size_t to = from + 1; to < seconds.size(); ++to)
        slopes[from] = std::min(slopes[from], (seconds[to] - seconds[from]) / double(to - from));
    return slopes;
  }

  // Write the tree after the text; return how many of its nodes are worth sending, which are its first ones.
  // The probability of a node is the product of those on its path, so no node is likelier than its parent, and the best
  // n nodes are the n likeliest. If no node is worth more than the highest rate so far × the least price of another row,
  // neither it nor any later one can raise the rate.
  int grow(int max_nodes, int max_depth, const Tree& tree) {
    const Locks locks(*this);
    begin_tree(max_depth);
    double rate = (1.0 + kMargin) * rate_to_beat_, tokens = 1.0 + others_tokens_;
    int num_best = 0;
    while (num_nodes_ < max_nodes && !waiting_.empty() && -waiting_.top().minus_probability > rate * row_s_[num_nodes_]) {
      tokens -= waiting_.top().minus_probability;
      add(tree);
      if (tokens > rate * seconds_[num_nodes_]) rate = tokens / seconds_[num_nodes_], num_best = num_nodes_;
    }
    return num_best;
  }

  void begin_tree(int max_depth) {
    has_grown_ = true, num_nodes_ = 0, max_depth_ = max_depth;
    refresh_ratios();
    recall();
    children_.clear(), states_.clear();
    waiting_ = {};
    expand(0, 0, 1.0, start());
  }

  // Add the likeliest node that is waiting.
  void add(const Tree& tree) {
    const PendingNode next = waiting_.top();
    waiting_.pop();
    tree.tokens[num_nodes_] = next.token;
    tree.parents[num_nodes_] = next.parent;
    tree.names[num_nodes_] = next.option.kind.names;
    const int node = ++num_nodes_;
    children_[next.parent].emplace_back(next.token, node);
    expand(node, next.depth, -next.minus_probability, after(states_[next.parent], next.token));
  }

  // Compare the candidates of the last tree with the text that followed, whether or not they were sent.
  void learn(const int32_t* tokens, size_t count) {
    const std::lock_guard lock(estimates_->mutex);
    size_t node = 0;
    if (!options_.empty()) num_judged_ = count;
    for (size_t i = 0; i < count && node < options_.size(); ++i) {
      compare(options_[node], tokens[i]);
      size_t child = options_.size();
      for (auto [token, below] : children_[node]) {
        if (token == tokens[i]) child = size_t(below);
      }
      node = child;
    }
    options_.clear();
  }

  // Find the texts of the memory that may be drafted from, under Locks.
  void recall() { texts_ = memory_ ? memory_->memory->texts(memory_->salt) : Texts{}; }

  void append(int token) {
    text_.append(token);
    recent_.add(token);
  }

  void refresh_ratios() {
    for (int source = 0; source < kNumSources; ++source) ratios_[source] = odds_[source].ratio();
  }

  void judge(int token) {
    const Locks locks(*this);
    refresh_ratios();
    recall();
    compare(options_behind(start()), token);
  }

  // The states after the text.
  States start() {
    States states{prediction_.start(recent_), text_.repeated(), {}, recent_};
    for (size_t i = 0; i < texts_.size(); ++i)
      states.remembered[i] = texts_[i]->find(recent_.backwards.data(), recent_.count);
    return states;
  }

  void compare(const std::vector<Option>& options, int token) {
    for (const Option& option : options) {
      odds_[option.place].observe(option.expected, option.token == token);
      estimates_->observe(option.kind, option.token == token);
    }
  }

  States after(States states, int token) const {
    states.place = prediction_.after(states.place, token);
    states.match = text_.after(states.match, token);
    for (size_t i = 0; i < texts_.size(); ++i)
      states.remembered[i] = texts_[i]->after(states.remembered[i], token);
    states.recent.add(token);
    return states;
  }

  void expand(int node, int depth, double probability, const States& states) {
    states_.push_back(states);
    children_.emplace_back();
    options_.push_back(options_behind(states));
    if (depth == max_depth_) return;
    const std::vector<Option>& options = options_.back();
    if (is_chain_ && !options.empty()) {
      push(*std::max_element(options.begin(), options.end(),
                             [](const Option& a, const Option& b) { return a.probability < b.probability; }),
           node, depth, probability);
      return;
    }
    for (const Option& option : options) push(option, node, depth, probability);
  }

  void push(const Option& option, int node, int depth, double probability) {
    waiting_.push(PendingNode{-probability * option.probability, depth + 1, node, option.token, option});
  }

  std::vector<Option> options_behind(const States& states) const {
    std::vector<Option> options;
    int grade = 0;
    auto name = [&](Source source, int token, int evidence, double prior) {
      for (Option& known : options) {
        if (known.token != token) continue;
        Kind kind{known.kind.names | 1 << source, known.kind.evidence, known.kind.grade, range_};
        known = option(token, kind, known.place, corrected(known.prior, kAgreement));
        return;
      }
      Kind kind{1 << source, evidence, grade, range_};
      options.push_back(option(token, kind, source, prior * (1.0 - double(grade) / kGrades)));
    };
    auto close = [&] {
      double most = 0.0;
      for (const Option& known : options) most = std::max(most, known.probability);
      grade = int(kGrades * most);
    };
    if (states.place.at >= 0) {
      int evidence = length_of(states.place.agreement);
      name(kPredicted, prediction_[states.place], evidence, double(evidence + 1) / (evidence + 2));
    }
    close();
    auto name_follower = [&](Source source, const Automaton& text, Match match, int base, double factor) {
      int times = text.times(match);
      int evidence = text_evidence(match.length, double(times) / text.continued(match), times);
      name(source, text.latest(match), base + evidence, text_prior(evidence) * factor);
    };
    if (states.match.state) {
      name_follower(kSuffix, text_, states.match, 0, 1.0);
      Match shorter = text_.shorter(states.match);
      bool is_new = shorter.state && text_.latest(shorter) != text_.latest(states.match);
      if (is_new) name_follower(kSuffix, text_, shorter, kShorter, 0.5);
    }
    close();
    if (!texts_.empty()) {
      auto longest = std::max_element(states.remembered.begin(), states.remembered.begin() + texts_.size(),
                                      [](Match a, Match b) { return a.length < b.length; });
      if (longest->state) name_follower(kMemory, *texts_[longest - states.remembered.begin()], *longest, 0, 1.0);
      close();
    }
    if (corpus_) {
      auto [length, token, times, num_places] = corpus_->likeliest(states.recent.backwards.data(), states.recent.count);
      if (length) {
        int evidence = text_evidence(length, double(times) / num_places, times);
        name(kCorpus, token, evidence, text_prior(evidence));
      }
      close();
    }
    if (tables_) {
      if (auto [level, row] = likeliest(states); level) {
        int evidence = level->evidence[row];
        name(kNgram, level->tokens[row], evidence, 0.1 * (evidence % 10 / 2));
      }
    }
    return options;
  }

  // The level and the row of the longest known context that ends here; null if there is none.
  std::pair<const Level*, int64_t> likeliest(const States& states) const {
    for (int64_t length = std::min<int64_t>(states.recent.count, tables_->num_levels); length > 0; --length) {
      const Level& level = tables_->levels[length - 1];
      int64_t key = 0;
      for (int64_t i = length - 1; i >= 0; --i) key = key * tables_->vocab_size + states.recent.backwards[i];
      const int64_t* found = std::lower_bound(level.keys, level.keys + level.size, key);
      if (found != level.keys + level.size && *found == key) return {&level, found - level.keys};
    }
    return {nullptr, 0};
  }

  Option option(int token, Kind kind, Source place, double prior) const {
    double expected = estimates_->probability(kind, prior);
    return {token, kind, place, prior, expected, std::min(corrected(expected, ratios_[place]), kMaxProbability)};
  }

  Estimates* estimates_;
  const Tables* tables_;
  const Corpus* corpus_;
  const Recollection* memory_;
  Texts texts_;  // of the memory, valid while it is locked
  Prediction prediction_{kPredictedNgram};
  bool is_chain_;
  Automaton text_{kMaxMatch};
  Recent recent_{};
  std::vector<double> seconds_, row_s_;
  double others_tokens_ = 0.0, rate_to_beat_ = 0.0;
  int num_nodes_ = 0, max_depth_ = 0, range_ = 0;
  bool has_grown_ = false;
  size_t num_judged_ = 0;  // how many of the tokens that will be read next
  std::array<RequestOdds, kNumSources> odds_;
  std::array<double, kNumSources> ratios_{};
  // By node of the last tree, the root first.
  std::vector<std::vector<Option>> options_;
  std::vector<std::vector<std::pair<int, int>>> children_;
  std::vector<States> states_;
  std::priority_queue<PendingNode, std::vector<PendingNode>, std::greater<>> waiting_;
};

}  // namespace drafts
