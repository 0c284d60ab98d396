// The C interface that native/sampling.py calls. The caller owns all arrays; no state but memory is kept.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include "guarded.h"
#include "sampling/rules.h"

using namespace sampling;

namespace {

// The calling thread keeps its memory for the next call: clearing it takes longer than a greedy decision.
template <typename Worker>
Worker& own_worker(size_t vocab_size) {
  static thread_local std::unique_ptr<Worker> own;
  static thread_local size_t own_size = 0;
  if (!own || own_size != vocab_size) own = std::make_unique<Worker>(vocab_size), own_size = vocab_size;
  return *own;
}

// Call work(worker, i) once for every i below count; each thread has a worker of its own. An exception is thrown on when
// all threads have ended.
template <typename Worker, typename Work>
void share(size_t count, size_t vocab_size, int num_threads, Work work) {
  std::atomic<size_t> next{0};
  const auto run = [&](Worker& worker) {
    for (size_t i; (i = next.fetch_add(1)) < count;) work(worker, i);
  };
  std::mutex mutex;
  std::exception_ptr thrown;
  const auto attempt = [&](auto body) {
    try {
      body();
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      thrown = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  const auto work_beside = [&] {
    Worker worker(vocab_size);
    run(worker);
  };
  const size_t wanted = std::min(count, size_t(std::max(num_threads, 1)));
  try {
    others.reserve(wanted);
    for (size_t i = 1; i < wanted; ++i) others.emplace_back([&] { attempt(work_beside); });
  } catch (const std::exception&) {  // the process may have no more threads: fewer of them do the work
  }
  attempt([&] { run(own_worker<Worker>(vocab_size)); });
  for (std::thread& other : others) other.join();
  if (thrown) std::rethrow_exception(thrown);
}

const char* first_error(const Request* requests, size_t count, size_t vocab_size) {
  if (vocab_size == 0) return "the vocabulary is empty";
  for (size_t i = 0; i < count; ++i)
    if (const char* wrong = check(requests[i], vocab_size)) return wrong;
  return nullptr;
}

}  // namespace

extern "C" {

const char* sampling_verify(Request* requests, size_t count, size_t vocab_size, int num_threads) {
  return native::guarded([&]() -> const char* {
    if (const char* wrong = first_error(requests, count, vocab_size)) return wrong;
    share<Verifier>(count, vocab_size, num_threads, [&](Verifier& verifier, size_t i) { verifier.verify(requests[i]); });
    return nullptr;
  });
}

// Write log p of every request's first row, (count, V).
const char* sampling_log_p(const Request* requests, size_t count, size_t vocab_size, int num_threads, double* target) {
  return native::guarded([&]() -> const char* {
    if (const char* wrong = first_error(requests, count, vocab_size)) return wrong;
    share<Distribution>(count, vocab_size, num_threads, [&](Distribution& found, size_t i) {
      const Request& request = requests[i];
      double* const row = target + i * vocab_size;
      if (request.temperature > 0.0) {
        const bool exists = found.compute(request.logits, request.type, request.temperature, request.truncation());
        if (exists) return found.write_log_probs(row);
        return std::fill(row, row + vocab_size, std::numeric_limits<double>::quiet_NaN());
      }
      std::fill(row, row + vocab_size, -kInfinity);
      row[argmax(request.logits, request.type, vocab_size)] = 0.0;
    });
    return nullptr;
  });
}

// Write, by each request's raw logits, the log-probability of its token and its num_top most probable tokens, the largest
// logit first and the lowest id first among equals. Unequal logits may have equal log-probabilities by rounding, so
// sorting by these might not put the argmax first. tokens, log_probs: (count). top_ids, top_log_probs: (count, num_top).
const char* sampling_log_probs(const Request* requests, size_t count, size_t vocab_size, const int32_t* tokens,
                               double* log_probs, size_t num_top, int32_t* top_ids, double* top_log_probs) {
  return native::guarded([&]() -> const char* {
    if (const char* wrong = first_error(requests, count, vocab_size)) return wrong;
    if (num_top > vocab_size) return "more top tokens than the vocabulary has";
    Distribution found(vocab_size);
    std::vector<double> row(vocab_size);
    for (size_t i = 0; i < count; ++i) {
      if (tokens[i] < 0 || size_t(tokens[i]) >= vocab_size) return "a token is outside the vocabulary";
      if (found.compute(requests[i].logits, requests[i].type, 1.0, {1.0, 0.0, 1.0, 0}))
        found.write_log_probs(row.data());
      else
        std::fill(row.begin(), row.end(), std::numeric_limits<double>::quiet_NaN());
      log_probs[i] = row[size_t(tokens[i])];
      int32_t* const best = top_ids + i * num_top;
      largest_ids(requests[i].logits, requests[i].type, vocab_size, num_top, best);
      for (size_t k = 0; k < num_top; ++k) top_log_probs[i * num_top + k] = row[size_t(best[k])];
    }
    return nullptr;
  });
}

// Write the num_top most probable tokens of every request's first row by its raw logits, (count, num_top).
const char* sampling_top_ids(const Request* requests, size_t count, size_t vocab_size, size_t num_top, int32_t* ids) {
  return native::guarded([&]() -> const char* {
    if (const char* wrong = first_error(requests, count, vocab_size)) return wrong;
    if (num_top > vocab_size) return "more top tokens than the vocabulary has";
    for (size_t i = 0; i < count; ++i)
      largest_ids(requests[i].logits, requests[i].type, vocab_size, num_top, ids + i * num_top);
    return nullptr;
  });
}

// Write the indices of the num_drawn <= count largest log q + noise, the largest first and the first among equals, where q
// is the weights divided by their sum: num_drawn draws without replacement. ids: the tokens of the weights.
const char* sampling_draw(const int32_t* ids, const float* weights, size_t count, uint64_t seed, uint64_t position,
                          uint64_t stream, uint64_t epoch, size_t num_drawn, int32_t* drawn) {
  return native::guarded([&]() -> const char* {
    if (num_drawn > count) return "more draws than tokens";
    std::vector<double> scores(weights, weights + count), scratch(count);
    const double mass = total(scores.data(), count, scratch.data());
    const Key key{seed, position, stream, epoch};
    for (size_t i = 0; i < count; ++i) scores[i] = sampling::log(scores[i] / mass) + gumbel(key, uint64_t(ids[i]));
    std::vector<int32_t> order(count);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return scores[a] > scores[b]; });
    std::copy_n(order.begin(), num_drawn, drawn);
    return nullptr;
  });
}

// Write the noise g of every token of every row, (num_rows, width): stream TARGET, epoch 0. seeds, positions: (num_rows).
void sampling_noise(const uint64_t* seeds, const uint64_t* positions, const uint64_t* tokens, size_t num_rows,
                    size_t width, double* target) {
  for (size_t row = 0; row < num_rows; ++row) {
    const Key key{seeds[row], positions[row], kTarget, 0};
    const uint64_t* own = tokens + row * width;
    for (size_t start = 0; start < width; start += kLanes) {
      const size_t length = std::min(width - start, size_t(kLanes));
      u64x8 asked = splat(uint64_t{0});
      for (size_t lane = 0; lane < length; ++lane) asked[lane] = own[start + lane];
      const f64x8 found = gumbel(bits_of(key, asked));
      for (size_t lane = 0; lane < length; ++lane) target[row * width + start + lane] = found[lane];
    }
  }
}

void sampling_log(const double* x, size_t count, double* target) {
  for (size_t i = 0; i < count; ++i) target[i] = sampling::log(x[i]);
}

void sampling_exp(const double* x, size_t count, double* target) {
  for (size_t i = 0; i < count; ++i) target[i] = sampling::exp(x[i]);
}

}  // extern "C"
