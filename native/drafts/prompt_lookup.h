// Prompt lookup: the continuations of earlier occurrences of the longest matching suffix.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "drafts/drafts.h"
#include "drafts/ngrams.h"

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

class PromptLookup : public Proposer {
 public:
  explicit PromptLookup(const PromptLookupOptions& options) : options_(options), index_(options.max_ngram) {}

  int next(const int32_t* committed, size_t count, int max_nodes, int max_depth, const Tree& tree) override {
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
      for (int place : ordered(index_.at_end(size))) {
        if (int(found.size()) >= most) return found;
        // As first published, the whole draft is in the text, and it begins before the n-gram at the end does.
        const int num_tokens = int(text_.size());
        const bool is_skipped =
            options_.clip == kSkip && (place + options_.draft_len > num_tokens || place >= num_tokens - size);
        if (!is_skipped && is_new(place)) found.push_back(place);
      }
    }
    return found;
  }

  // At most kMaxPlaces places of an n-gram in the order in which they are tried; the most recent first among equally frequent ones.
  std::vector<int> ordered(int ngram) const {
    if (options_.order == kLeftmost) return index_.oldest(ngram, kMaxPlaces);
    std::vector<int> recent = index_.newest(ngram, kMaxPlaces);
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
