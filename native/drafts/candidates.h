// The candidates of `auto`: what may come next, by source, and how likely it seems.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <tuple>

#include "drafts/automaton.h"
#include "drafts/estimates.h"
#include "drafts/prediction.h"
#include "drafts/recent.h"
#include "drafts/response_memory.h"

namespace drafts {

constexpr int kMaxLength = 8, kShorter = 1000;

// The sources, in the order in which they are asked; each is a bit of a candidate's names.
enum Source { kPredicted, kSuffix, kMemory, kCorpus, kNgram, kNumSources };

// The likeliest follower of every context of one length. keys: the packed contexts, ascending.
struct Level {
  const int64_t* keys;
  const int32_t *tokens, *evidence;
  int64_t size;
};

struct Tables {
  const Level* levels;  // for contexts of 1, 2, … tokens
  int64_t num_levels, vocab_size;
};

struct Option {
  int token;
  Kind kind;
  Source place;
  double prior, expected, probability;
};

// The state of each source after a continuation. place: in the prediction. remembered: by text.
struct States {
  Place place;
  Match match;
  std::array<Match, kMostTexts> remembered;
  Recent recent;
};

struct PendingNode {
  double minus_probability;
  int depth, parent, token;
  Option option;
  bool operator>(const PendingNode& other) const {
    return std::tie(minus_probability, depth, parent, token) >
           std::tie(other.minus_probability, other.depth, other.parent, other.token);
  }
};

inline int length_of(int length) { return length < kMaxLength * 3 / 2 ? std::min(length, kMaxLength) : kMaxLength + 1; }

inline double text_prior(int evidence) {
  double length = evidence / 20;
  return length / (length + 1.5);
}

inline int text_evidence(int length, double share, int times) {
  return 20 * length_of(length) + 4 * int(4 * share) + std::min(times, 4) - 1;
}

}  // namespace drafts
