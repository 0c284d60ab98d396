// The index of n-grams against a search of the text; prints how many places were compared. Exits with 1 at a difference,
// or if the index makes an allocation for more than one n-gram in a hundred.
#include "drafts/ngrams.h"

#include <cstdio>
#include <cstdlib>
#include <new>
#include <random>

using namespace drafts;

namespace {

long num_allocations = 0;

constexpr int kMaxNgram = 4;

// The ascending places after these tokens, the newest first, in a text.
std::vector<int> places_in(const std::vector<int>& text, const std::vector<int>& backwards) {
  std::vector<int> places;
  for (int place = int(backwards.size()); place < int(text.size()); ++place)
    if (std::equal(backwards.begin(), backwards.end(), text.rend() - place)) places.push_back(place);
  return places;
}

int nearest_in(const std::vector<int>& places, int to) {
  int best = -1;
  for (int place : places)
    if (best < 0 || std::abs(place - to) <= std::abs(best - to)) best = place;  // the later one of two
  return best;
}

void require(bool is_true, const char* what) {
  if (is_true) return;
  std::fprintf(stderr, "differs: %s\n", what);
  std::exit(1);
}

long compare(const NgramIndex& index, const std::vector<int>& text, const std::vector<int>& backwards, std::mt19937& rng) {
  const int ngram = index.find(backwards.data(), int(backwards.size()));
  std::vector<int> places = places_in(text, backwards);
  const size_t most = rng() % 2 ? 256 : 1 + rng() % 8, size = std::min(most, places.size());
  const int to = int(rng() % (text.size() + 1));
  require(index.oldest(ngram, most) == std::vector<int>(places.begin(), places.begin() + long(size)), "oldest");
  require(index.newest(ngram, most) == std::vector<int>(places.rbegin(), places.rbegin() + long(size)), "newest");
  require(index.nearest(ngram, to) == nearest_in(places, to), "nearest");
  return long(places.size());
}

long compare_one_text(unsigned seed) {
  std::mt19937 rng(seed);
  const int num_tokens = 1 + int(rng() % 400), num_ids = 1 + int(rng() % 20);
  NgramIndex index(kMaxNgram);
  std::vector<int> text;
  long num_compared = 0;
  for (int i = 0; i < num_tokens; ++i) {
    text.push_back(int(rng() % unsigned(num_ids)) + (rng() % 50 ? 0 : 2000000000));
    index.append(text.back());
    std::vector<int> backwards(text.rbegin(), text.rbegin() + std::min(i + 1, 1 + int(rng() % kMaxNgram)));
    require(index.at_end(int(backwards.size())) == index.find(backwards.data(), int(backwards.size())), "at_end");
    num_compared += compare(index, text, backwards, rng);
    backwards.back() = int(rng() % unsigned(num_ids + 1));  // the text may not have it
    num_compared += compare(index, text, backwards, rng);
  }
  return num_compared;
}

}  // namespace

void* operator new(size_t size) {
  ++num_allocations;
  if (void* made = std::malloc(size)) return made;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

int main() {
  long num_compared = 0;
  for (unsigned seed = 0; seed < 60; ++seed) num_compared += compare_one_text(seed);
  std::mt19937 rng(1);
  const long before = num_allocations;
  NgramIndex index(kMaxNgram);
  for (int i = 0; i < 10000; ++i) index.append(int(rng() % 50000));
  require(num_allocations - before < kMaxNgram * 10000 / 100, "the number of allocations");
  std::printf("%ld\n", num_compared);
}
