// The n-grams of a text that grows, and where each occurs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <utility>
#include <vector>

namespace drafts {

// The places of all n-grams of 1…max_ngram tokens that have a continuation; a place is the position of the token after
// it. N-grams are numbered; 0 is the empty one.
// A text of 100,000 tokens has half a million n-grams. All of them are in three arrays, because an allocation for each
// would take most of the time of reading a text, and of freeing the index.
class NgramIndex {
 public:
  explicit NgramIndex(int max_ngram)
      : max_ngram_(max_ngram), ends_(max_ngram + 1), slots_(kFirstSlots), ngrams_(1), places_(1) {}

  void append(int token) {
    for (int size = 1; size <= longest(); ++size) add_place(ngrams_[ends_[size]], num_tokens_);
    ++num_tokens_;
    for (int size = longest(); size > 0; --size) ends_[size] = longer(ends_[size - 1], token);
  }

  // The length of the longest suffix that is looked up.
  int longest() const { return std::min(max_ngram_, num_tokens_); }

  // The n-gram of `size` tokens with which the text ends.
  int at_end(int size) const { return ends_[size]; }

  // The n-gram of these tokens, the newest first; 0 if the text does not contain it.
  int find(const int* backwards, int size) const {
    int ngram = 0;
    while (size-- > 0) {
      ngram = slots_[slot_of(key(ngram, backwards[size]))].ngram;
      if (!ngram) return 0;
    }
    return ngram;
  }

  // At most `most` places of an n-gram: the last ones, the last first.
  std::vector<int> newest(int ngram, size_t most) const {
    std::vector<int> found;
    for (auto [first, last] : chunks(ngram))
      while (last != first && found.size() < most) found.push_back(*--last);
    return found;
  }

  // At most `most` places of an n-gram: the first ones, ascending.
  std::vector<int> oldest(int ngram, size_t most) const {
    std::vector<int> found;
    const auto all = chunks(ngram);
    for (auto chunk = all.rbegin(); chunk != all.rend(); ++chunk)
      for (const int* place = chunk->first; place != chunk->second && found.size() < most; ++place)
        found.push_back(*place);
    return found;
  }

  // The place of an n-gram that is nearest to `to`, the later of two equally near ones; -1 if it has none.
  int nearest(int ngram, int to) const {
    int best = -1;
    const auto consider = [&](int place) {
      if (best < 0 || std::abs(place - to) < std::abs(best - to)) best = place;
    };
    for (auto [first, last] : chunks(ngram)) {  // the later places first, so that they win where two are equally near
      const int* later = std::lower_bound(first, *first < to ? last : first, to);
      if (later != last) consider(*later);
      if (later == first) continue;
      consider(later[-1]);
      break;  // the places of older chunks are farther away
    }
    return best;
  }

 private:
  static constexpr size_t kFirstSlots = 64;  // a power of two

  // An entry of the hash table: the n-gram that an n-gram and one more token form; 0: the entry is empty.
  struct Slot {
    uint64_t key;
    int ngram;
  };

  // count: of its places. chunk: where the newest of its chunks begins in places_. Its chunks have room for 1, 2, 4, …
  // places; before each is the beginning of the one before it.
  struct Ngram {
    int count, chunk;
  };

  static uint64_t key(int ngram, int token) { return uint64_t(ngram) << 32 | uint32_t(token); }

  // The slot that has the key, or the empty one in which it belongs.
  size_t slot_of(uint64_t key) const {
    uint64_t hash = (key ^ key >> 31) * 0x9E3779B97F4A7C15;
    hash = (hash ^ hash >> 29) * 0xBF58476D1CE4E5B9;
    size_t at = size_t(hash >> 32);
    while (slots_[at &= slots_.size() - 1].ngram && slots_[at].key != key) ++at;
    return at;
  }

  // The n-gram with one more token.
  int longer(int ngram, int token) {
    const uint64_t wanted = key(ngram, token);
    if (Slot& slot = slots_[slot_of(wanted)]; slot.ngram) return slot.ngram;
    ngrams_.push_back({});
    if (2 * ngrams_.size() > slots_.size()) grow();
    slots_[slot_of(wanted)] = {wanted, int(ngrams_.size()) - 1};
    return int(ngrams_.size()) - 1;
  }

  void grow() {
    std::vector<Slot> former(2 * slots_.size());
    former.swap(slots_);
    for (const Slot& slot : former)
      if (slot.ngram) slots_[slot_of(slot.key)] = slot;
  }

  void add_place(Ngram& ngram, int place) {
    const int room = ngram.count + 1;
    if (!(ngram.count & room)) {  // all chunks are full: the next one has room for one more place than all of them
      places_.push_back(ngram.chunk);
      ngram.chunk = int(places_.size());
      places_.resize(places_.size() + room);
    }
    ++ngram.count;
    places_[ngram.chunk + ngram.count - newest_room(ngram.count)] = place;
  }

  // How many places the newest chunk of so many places has room for: the largest power of two up to their number.
  static int newest_room(int count) {
    int room = 1;
    while (room <= count / 2) room *= 2;
    return room;
  }

  // The chunks of an n-gram, the newest first, each with the end of its places.
  std::vector<std::pair<const int*, const int*>> chunks(int number) const {
    std::vector<std::pair<const int*, const int*>> found;
    const Ngram& ngram = ngrams_[number];
    if (!ngram.count) return found;
    int room = newest_room(ngram.count), size = ngram.count - (room - 1);
    for (int chunk = ngram.chunk; chunk; chunk = places_[chunk - 1], size = room /= 2)
      found.emplace_back(places_.data() + chunk, places_.data() + chunk + size);
    return found;
  }

  int max_ngram_, num_tokens_ = 0;
  std::vector<int> ends_;  // the n-grams with which the text ends, by size
  std::vector<Slot> slots_;
  std::vector<Ngram> ngrams_;
  std::vector<int> places_;  // the chunks; no chunk begins at 0
};

}  // namespace drafts
