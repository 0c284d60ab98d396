// The matrix products of a pass alone, and the arithmetic peak of a thread: what a forward pass is measured against.

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <vector>

#include "forward/pool.h"
#include "forward/product.h"

namespace {

using native::f32x16;

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Matrices of one pass, in order, with a barrier after each as in the pass.
struct Products : native::Job {
  explicit Products(int max_threads) : pool(max_threads) {}

  int begin() override {
    ++at;
    if (at == int(matrices.size())) return 0;
    return num_pieces();
  }

  void work(int piece, int) override {
    const native::Linear& w = matrices[at];
    multiply(w, native::share(w.num_blocks, piece, num_pieces()), tiles, input.data(),
             [&](int row, int first, int count, const float* sums) {
               std::copy(sums, sums + count, output.data() + size_t(row) * w.num_outputs + first);
             });
  }

  int num_pieces() const { return num_threads == 1 ? 1 : std::min(2 * num_threads, matrices[at].num_blocks); }

  native::Pool pool;
  std::vector<native::Linear> matrices;
  native::Tiles tiles;
  std::vector<float> input, output;
  int at = 0, num_threads = 1;
};

template <bool is_pairs>
double peak() {
  f32x16 sums[16] = {};
  const f32x16 a = native::splat(0.5f), b = native::splat(1.0f);
  constexpr int rounds = 4000;
  const double began_s = now_s();
  for (int round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      sums[i] = is_pairs ? native::dot_pairs16(a, b, sums[i]) : native::fma16(sums[i], a, b);
#if defined(__AVX512F__)
      asm volatile("" : "+v"(sums[i]));  // otherwise the compiler would compute the sums itself
#endif
    }
  }
  volatile float kept = 0;
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) kept = kept + native::sum_lanes(sums[i]);  // unrolled, so that the sums stay in registers
  return 2.0 * (is_pairs ? 2 : 1) * native::kLanes * 16 * rounds / (now_s() - began_s);
}

}  // namespace

extern "C" {

Products* products_new(int max_threads) { return new (std::nothrow) Products(max_threads); }

// Add a matrix of numbers between 1 and 2 that bfloat16 holds, or only float32 does. rounds_inputs: as of Linear.
void products_add(Products* products, int num_outputs, int num_inputs, int is_bfloat16, int rounds_inputs) {
  std::vector<float> weight(size_t(num_outputs) * num_inputs);
  for (size_t i = 0; i < weight.size(); ++i) {
    const uint32_t bits = uint32_t(i) * 2654435761u, word = 0x3f800000u | (bits & (is_bfloat16 ? 0x7f0000u : 0x7fffffu));
    std::memcpy(&weight[i], &word, sizeof word);
  }
  products->matrices.emplace_back(weight.data(), num_outputs, num_inputs, rounds_inputs);
}

// Return the seconds of all products of `rows` rows.
double products_run(Products* products, int rows, int num_threads) {
  size_t inputs = 0, outputs = 0;
  for (const native::Linear& w : products->matrices) {
    inputs = std::max(inputs, size_t(w.num_inputs)), outputs = std::max(outputs, size_t(w.num_outputs));
  }
  products->tiles = native::Tiles(rows);
  const uint32_t halves = 0x3f003f00u;  // two numbers 0.5 in bfloat16, or about 0.5 in float32
  float input;
  std::memcpy(&input, &halves, sizeof input);
  products->input.assign(rows * inputs, input);
  products->output.resize(rows * outputs);
  products->at = -1;
  products->num_threads = num_threads;
  const double began_s = now_s();
  products->pool.run(num_threads, *products);
  return now_s() - began_s;
}

// Return the multiplications and additions per second of one thread that does nothing else, measured for about a
// millisecond. rounds_inputs: products in bfloat16, two per word.
double products_peak(int rounds_inputs) { return rounds_inputs ? peak<true>() : peak<false>(); }

}  // extern "C"
