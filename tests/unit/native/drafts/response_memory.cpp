// Threads learn responses and draft from them at once, in a memory so small that texts are forgotten all the time.
#include "drafts/response_memory.h"

#include <atomic>
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

#include "drafts/growth.h"
#include "drafts/suffix.h"

using namespace drafts;

int main() {
  Memory memory(500);
  Estimates estimates;
  std::atomic<long> num_nodes{0};
  auto run = [&](unsigned seed) {
    std::mt19937 random(seed);
    const Recollection recollection{&memory, std::string(1, "ab"[seed % 2])};
    Suffix suffix({24, 20, 0, 4.0, 0.1}, &recollection, nullptr);
    Growth growth(&estimates, nullptr, nullptr, &recollection, false);
    std::vector<double> seconds(128, 1.0);
    growth.size_by(seconds.data(), seconds.size(), 0.0, 1.0, 0);
    std::vector<int32_t> tokens(128), parents(128), names(128);
    const Tree tree{tokens.data(), parents.data(), names.data()};
    for (int round = 0; round < 300; ++round) {
      std::vector<int32_t> response(random() % 90);
      for (int32_t& token : response) token = int32_t(random() % 5);
      recollection.learn(response.data(), response.size());
      const size_t count = std::min<size_t>(response.size(), 3);
      num_nodes += suffix.next(response.data(), count, 20, 20, tree);
      num_nodes += growth.next(response.data(), count, 20, 8, tree);
    }
  };
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) threads.emplace_back(run, seed);
  for (std::thread& thread : threads) thread.join();
  std::printf("%ld\n", num_nodes.load());
}
