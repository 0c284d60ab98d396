// A job whose piece throws, on whatever thread: the caller of `run` gets the exception, and the next job is whole.
// Exits with 1 if not.

#include <cstdio>
#include <stdexcept>

#include "forward/pool.h"

namespace {

constexpr int kPieces = 64, kPhases = 3;

struct Work : native::Job {
  explicit Work(int bad_piece) : bad_piece(bad_piece) {}
  int begin() override { return phase++ < kPhases ? kPieces : 0; }
  void work(int piece, int) override {
    if (piece == bad_piece) throw std::runtime_error("bad");
    ++num_done;
  }
  const int bad_piece;
  int phase = 0;
  std::atomic<int> num_done{0};
};

bool throws(native::Pool& pool, int num_threads, Work& work) {
  try {
    pool.run(num_threads, work);
  } catch (const std::runtime_error&) {
    return true;
  }
  return false;
}

}  // namespace

int main() {
  native::Pool pool(3);
  for (int round = 0; round < 2000; ++round)
    for (const int num_threads : {1, 3}) {
      Work bad(round % kPieces), sound(-1);
      if (!throws(pool, num_threads, bad) || bad.phase != 1) return std::puts("the exception was lost"), 1;
      if (throws(pool, num_threads, sound) || sound.num_done != kPhases * kPieces) return std::puts("work was lost"), 1;
    }
  return 0;
}
