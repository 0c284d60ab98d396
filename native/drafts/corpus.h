// Look-ups in a preloaded corpus, whose files orchestrator/drafting/corpus.py maps.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace drafts {

constexpr int64_t kFewPlaces = 32, kManyPlaces = 256;

// What most often followed a text of `length` tokens, how often it did, and how many places of the text were examined;
// the length is 0 if the last token does not occur.
struct LikeliestFollower {
  int length, token, times, num_places;
};

// Places of a shard.
struct Places {
  const uint32_t* first;
  int64_t size;

  // One of `count` places, evenly spread over all of them.
  uint32_t spread(int64_t i, int64_t count) const { return first[i * size / count]; }
};

// tokens: (num_tokens), documents one after the other, each ended by the separator. ends: (num_ends), the places of
// tokens that follow another token of their document, sorted by the text before them, read backwards.
struct Shard {
  const int32_t* tokens;
  const uint32_t* ends;
  int64_t num_ends, num_tokens;

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

  // The places after these tokens.
  Places places(const int* backwards, int count) const {
    const uint32_t* first = first_not_before(backwards, count);
    const uint32_t* last = std::partition_point(first, ends + num_ends,
                                                [&](uint32_t end) { return compared(end, backwards, count) == 0; });
    return {first, last - first};
  }
};

// The longest suffix of a text that the corpus has, and the shards that have it; length 0 if its last token does not
// occur.
struct Found {
  int length = 0;
  std::vector<std::pair<const Shard*, Places>> places;
};

// The tokens from a place on.
struct Continuation {
  const int32_t* tokens;
  int64_t size;
};

struct Corpus {
  const Shard* shards;
  int64_t num_shards, separator;

  // backwards: the last `count` tokens of the text, the newest first.
  Found longest(const int* backwards, int count) const {
    std::vector<int> lengths(num_shards);
    for (int64_t i = 0; i < num_shards; ++i) lengths[i] = shards[i].longest(backwards, count);
    Found found{num_shards ? *std::max_element(lengths.begin(), lengths.end()) : 0, {}};
    for (int64_t i = 0; i < num_shards && found.length; ++i) {
      if (lengths[i] == found.length) found.places.emplace_back(shards + i, shards[i].places(backwards, found.length));
    }
    return found;
  }

  // Of equally frequent followers, the lowest id.
  LikeliestFollower likeliest(const int* backwards, int count) const {
    const Found found = longest(backwards, count);
    LikeliestFollower best{found.length, 0, 0, 0};
    std::vector<int> followers;
    for (const auto& [shard, places] : found.places) {
      const int64_t most = std::min(places.size, kFewPlaces);
      for (int64_t i = 0; i < most; ++i) followers.push_back(shard->tokens[places.spread(i, most)]);
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

  // What follows at up to kManyPlaces of these places, each up to the end of its shard.
  std::vector<Continuation> continuations(const Found& found) const {
    int64_t total = 0;
    for (const auto& each : found.places) total += each.second.size;
    std::vector<Continuation> rows;
    for (const auto& [shard, places] : found.places) {
      const int64_t most = std::min(places.size, std::max<int64_t>(kManyPlaces * places.size / total, 1));
      for (int64_t i = 0; i < most; ++i) {
        const uint32_t place = places.spread(i, most);
        rows.push_back({shard->tokens + place, shard->num_tokens - place});
      }
    }
    return rows;
  }
};

}  // namespace drafts
