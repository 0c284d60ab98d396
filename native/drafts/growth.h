// The growth of orchestrator/drafting/growth.py over the sources of orchestrator/drafting/candidates.py.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
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

constexpr double kMaxProbability = 0.99, kAgreement = 3.0;
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

  // Its trees grow together with others' (joint_growth.h), so it writes none.
  int next(const int32_t* committed, size_t count, int, int, const Tree&) override { return follow(committed, count), 0; }

  // Learn from the tokens that a step has committed, and read them.
  void follow(const int32_t* committed, size_t count) {
    learn(committed, count);
    read(committed, count);
  }

  // Keeps the counts and the earlier responses, which the growths of a process share, from changing while trees grow.
  class Locks {
   public:
    explicit Locks(const std::vector<Growth*>& growths) {
      const auto remembers = std::find_if(growths.begin(), growths.end(), [](const Growth* each) { return each->memory_; });
      if (!growths.empty()) estimates_ = std::unique_lock(growths[0]->estimates_->mutex);
      if (remembers != growths.end()) memory_ = std::unique_lock((*remembers)->memory_->memory->mutex);
    }

   private:
    std::unique_lock<std::mutex> estimates_, memory_;
  };

  void set_range(int range) { range_ = range; }

  // Begin a tree after the text, under Locks.
  void begin_tree(int max_nodes, int max_depth) {
    has_grown_ = true, num_nodes_ = 0, max_nodes_ = max_nodes, max_depth_ = max_depth;
    refresh_ratios();
    recall();
    options_.clear(), children_.clear(), states_.clear();
    waiting_ = {};
    expand(0, 0, 1.0, start());
  }

  // The probability of the likeliest node that may be added; 0 if there is none, or no room for it.
  double likeliest() const {
    return waiting_.empty() || num_nodes_ == max_nodes_ ? 0.0 : -waiting_.top().minus_probability;
  }

  // Add that node, under Locks.
  void add(const Tree& tree) {
    const PendingNode next = waiting_.top();
    waiting_.pop();
    tree.tokens[num_nodes_] = next.token;
    tree.parents[num_nodes_] = next.parent;
    tree.names[num_nodes_] = next.option.kind.names;
    tree.probabilities[num_nodes_] = -next.minus_probability;
    const int node = ++num_nodes_;
    children_[next.parent].emplace_back(next.token, node);
    expand(node, next.depth, -next.minus_probability, after(states_[next.parent], next.token));
  }

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

 private:
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
    const Locks locks({this});
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
  int num_nodes_ = 0, max_nodes_ = 0, max_depth_ = 0, range_ = 0;
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
