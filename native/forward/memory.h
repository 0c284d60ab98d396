// Memory on huge pages, for what every pass reads from end to end: with 4 KB pages, a pass of a small model spends much
// of its time on page table look-ups.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace native {

// Ask for huge pages where the system gives them on demand; a hint that may be ignored.
inline void advise_huge_pages(void* memory, size_t size) {
#if defined(__linux__)
  constexpr size_t kPage = 4096;
  const size_t first = (reinterpret_cast<size_t>(memory) + kPage - 1) / kPage * kPage;
  const size_t end = (reinterpret_cast<size_t>(memory) + size) / kPage * kPage;
  if (end > first) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#else
  (void)memory, (void)size;
#endif
}

// Packs the matrices of all models side by side, since most are smaller than a huge page. A chunk is freed with its
// last matrix.
class HugePages {
 public:
  static void* take(size_t size) {
    std::lock_guard<std::mutex> lock(mutex());
    const size_t needed = (size + kHeader + kHeader - 1) / kHeader * kHeader;
    if (!current() || current()->used + needed > current()->size) renew(needed);
    Chunk* chunk = current();
    char* place = chunk->memory + chunk->used;
    chunk->used += needed;
    ++chunk->num_live;
    *reinterpret_cast<Chunk**>(place) = chunk;
    return place + kHeader;
  }

  static void give(void* memory) {
    std::lock_guard<std::mutex> lock(mutex());
    Chunk* chunk = *reinterpret_cast<Chunk**>(static_cast<char*>(memory) - kHeader);
    --chunk->num_live;
    if (chunk != current()) free_unless_used(chunk);
  }

 private:
  static constexpr size_t kHugePage = size_t(2) << 20, kChunk = 4 * kHugePage, kHeader = 64;

  struct Chunk {
    char* memory;
    size_t size, used;
    int num_live;
  };

  static std::mutex& mutex() {
    static std::mutex own;
    return own;
  }

  static Chunk*& current() {
    static Chunk* own = nullptr;
    return own;
  }

  static void renew(size_t needed) {
    const size_t size = std::max(kChunk, (needed + kHugePage - 1) / kHugePage * kHugePage);
    auto next = std::make_unique<Chunk>(Chunk{static_cast<char*>(std::aligned_alloc(kHugePage, size)), size, 0, 0});
    if (!next->memory) throw std::bad_alloc();
    advise_huge_pages(next->memory, size);
    if (current()) free_unless_used(current());
    current() = next.release();
  }

  static void free_unless_used(Chunk* chunk) {
    if (chunk->num_live) return;
    std::free(chunk->memory);
    delete chunk;
  }
};

template <class T>
struct HugeAllocator {
  using value_type = T;

  HugeAllocator() = default;
  template <class Other>
  HugeAllocator(const HugeAllocator<Other>&) {}

  T* allocate(size_t count) { return static_cast<T*>(HugePages::take(count * sizeof(T))); }
  void deallocate(T* memory, size_t) { HugePages::give(memory); }

  friend bool operator==(const HugeAllocator&, const HugeAllocator&) { return true; }
  friend bool operator!=(const HugeAllocator&, const HugeAllocator&) { return false; }
};

}  // namespace native
