// Look-ups in a preloaded corpus: `Corpus.likeliest` of orchestrator/proposers/corpus.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace drafts {

constexpr int64_t kFewPlaces = 32;

// What most often followed a text of `length` tokens, how often it did, and how many places of the text were examined;
// the length is 0 if the last token does not occur.
struct LikeliestFollower {
  int length, token, times, num_places;
};

// tokens: documents one after the other, each ended by a token that is not in the vocabulary. ends: (num_ends), the
// places of tokens that follow another token of their document, sorted by the text before them, read backwards.
struct Shard {
  const int32_t* tokens;
  const uint32_t* ends;
  int64_t num_ends;

  // How many of these tokens, the nearest first, precede a place.
  int agreement(uint32_t end, const int* backwards, int count) const {
    int length = 0;
    while (length < count && length < int64_t(end) && tokens[end - 1 - length] == backwards[length]) ++length;
    return length;
  }

  // Compare the text before a place with these tokens: negative, 0 or positive; a text that ends earlier is less.
  int compared(uint32_t end, const int* backwards, int count) const {
    int length = agreement(end, backwards, count);
    if (length == count) return 0;
    return length == int64_t(end) || tokens[end - 1 - length] < backwards[length] ? -1 : 1;
  }

  const uint32_t* first_not_before(const int* backwards, int count) const {
    return std::partition_point(ends, ends + num_ends,
                                [&](uint32_t end) { return compared(end, backwards, count) < 0; });
  }

  // How many of these tokens precede the place that agrees best.
  int longest(const int* backwards, int count) const {
    const uint32_t* place = first_not_before(backwards, count);
    int length = place < ends + num_ends ? agreement(*place, backwards, count) : 0;
    return place > ends ? std::max(length, agreement(place[-1], backwards, count)) : length;
  }

  // Add what follows at up to kFewPlaces places after these tokens, evenly spread over all such places.
  void add_followers(const int* backwards, int count, std::vector<int>& followers) const {
    const uint32_t* first = first_not_before(backwards, count);
    const uint32_t* last = std::partition_point(first, ends + num_ends,
                                                [&](uint32_t end) { return compared(end, backwards, count) == 0; });
    int64_t num_places = last - first, most = std::min(num_places, kFewPlaces);
    for (int64_t i = 0; i < most; ++i) followers.push_back(tokens[first[i * num_places / most]]);
  }
};

struct Corpus {
  const Shard* shards;
  int64_t num_shards;

  // backwards: the last `count` tokens of the text, the newest first. Of equally frequent followers, the lowest id.
  LikeliestFollower likeliest(const int* backwards, int count) const {
    std::vector<int> lengths(num_shards), followers;
    for (int64_t i = 0; i < num_shards; ++i) lengths[i] = shards[i].longest(backwards, count);
    LikeliestFollower best{num_shards ? *std::max_element(lengths.begin(), lengths.end()) : 0, 0, 0, 0};
    if (!best.length) return best;
    for (int64_t i = 0; i < num_shards; ++i) {
      if (lengths[i] == best.length) shards[i].add_followers(backwards, best.length, followers);
    }
    std::sort(followers.begin(), followers.end());
    best.num_places = int(followers.size());
    for (auto first = followers.begin(); first != followers.end();) {
      auto last = std::upper_bound(first, followers.end(), *first);
      if (last - first > best.times) best.token = *first, best.times = int(last - first);
      first = last;
    }
    return best;
  }
};

}  // namespace drafts
