// The drafts of orchestrator/proposers/prompt_lookup.py.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "drafts.h"

namespace drafts {

constexpr int kMaxPlaces = 256;

// The values of `match` and of `clip`, in this order.
enum Order : int32_t { kRecent, kFrequent, kLeftmost };
enum Clip : int32_t { kRepeat, kEnd, kSkip };

struct PromptLookupOptions {
  int32_t max_ngram, draft_len, branches, is_grown;
  Order order;
  Clip clip;
};

// The places of all n-grams of a growing text that have a continuation; a place is the position of the token after it.
class NgramIndex {
 public:
  explicit NgramIndex(int max_ngram) : max_ngram_(max_ngram), ends_(max_ngram + 1) { ends_[0] = new_ngram(); }

  void append(int token) {
    for (int size = 1; size <= longest(); ++size) places_[ends_[size]].push_back(num_tokens_);
    ++num_tokens_;
    for (int size = longest(); size > 0; --size) ends_[size] = longer(ends_[size - 1], token);
  }

  // The length of the longest suffix that is looked up.
  int longest() const { return std::min(max_ngram_, num_tokens_); }

  // The places of the text's suffix of `size` tokens, ascending.
  const std::vector<int>& places(int size) const { return places_[ends_[size]]; }

  // The places of these tokens, the newest first, ascending; null if the text does not contain them.
  const std::vector<int>* places_after(const int* backwards, int size) const {
    int ngram = ends_[0];
    for (int i = size; i-- > 0;) {
      auto found = longer_.find(key(ngram, backwards[i]));
      if (found == longer_.end()) return nullptr;
      ngram = found->second;
    }
    return &places_[ngram];
  }

 private:
  static uint64_t key(int ngram, int token) { return uint64_t(ngram) << 32 | uint32_t(token); }

  int new_ngram() {
    places_.emplace_back();
    return int(places_.size()) - 1;
  }

  // The n-gram with one more token.
  int longer(int ngram, int token) {
    auto [found, is_new] = longer_.try_emplace(key(ngram, token), 0);
    if (is_new) found->second = new_ngram();
    return found->second;
  }

  int max_ngram_, num_tokens_ = 0;
  std::vector<int> ends_;  // the n-grams with which the text ends, by size
  std::vector<std::vector<int>> places_;
  std::unordered_map<uint64_t, int> longer_;  // by an n-gram and the token after it
};

class PromptLookup : public Proposer {
 public:
  explicit PromptLookup(const PromptLookupOptions& options) : options_(options), index_(options.max_ngram) {}

  int next(const int32_t* committed, size_t count, int max_nodes, int max_depth, const Costs*, const Tree& tree) override {
    for (size_t i = 0; i < count; ++i) index_.append(committed[i]), text_.push_back(committed[i]);
    const int longest = std::min({options_.draft_len, max_nodes, max_depth}), num_tokens = int(text_.size());
    int num_nodes = 0;
    for (int start : starts(longest > 0 ? options_.branches : 0)) {
      const int length = std::min(length_from(start, longest), max_nodes - num_nodes);
      for (int i = 0, parent = 0; i < length; ++i) {
        tree.tokens[num_nodes] = text_[start + i % (num_tokens - start)];
        tree.parents[num_nodes] = parent;
        tree.names[num_nodes] = 0;
        parent = ++num_nodes;
      }
    }
    return num_nodes;
  }

 private:
  // Where continuations start, the best first, each with a different first token.
  std::vector<int> starts(int most) const {
    std::vector<int> found;
    const auto is_new = [&](int place) {
      return std::none_of(found.begin(), found.end(), [&](int start) { return text_[start] == text_[place]; });
    };
    for (int size = index_.longest(); size > 0; --size) {
      for (int place : ordered(index_.places(size))) {
        if (int(found.size()) >= most) return found;
        const bool is_skipped = options_.clip == kSkip && place + options_.draft_len > int(text_.size());
        if (!is_skipped && is_new(place)) found.push_back(place);
      }
    }
    return found;
  }

  // At most kMaxPlaces places in the order in which they are tried; the most recent first among equally frequent ones.
  std::vector<int> ordered(const std::vector<int>& places) const {
    const size_t size = std::min<size_t>(places.size(), kMaxPlaces);
    if (options_.order == kLeftmost) return {places.begin(), places.begin() + size};
    std::vector<int> recent(places.rbegin(), places.rbegin() + size);
    if (options_.order == kRecent) return recent;
    std::unordered_map<int, int> counts;
    for (int place : recent) ++counts[text_[place]];
    std::stable_sort(recent.begin(), recent.end(),
                     [&](int a, int b) { return counts[text_[a]] > counts[text_[b]]; });
    return recent;
  }

  int length_from(int start, int longest) const {
    const int num_tokens = int(text_.size());
    if (options_.is_grown) longest = std::min(longest, 2 * agreement(start, longest));
    return options_.clip == kEnd ? std::min(longest, num_tokens - start) : longest;
  }

  // How many tokens before `start` equal those at the end of the text, up to `most`.
  int agreement(int start, int most) const {
    const int num_tokens = int(text_.size());
    int count = 0;
    while (count < std::min(most, start) && text_[start - 1 - count] == text_[num_tokens - 1 - count]) ++count;
    return count;
  }

  PromptLookupOptions options_;
  NgramIndex index_;
  std::vector<int> text_;
};

}  // namespace drafts
