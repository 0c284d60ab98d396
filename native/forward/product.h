// Products with packed weights: each output accumulates over k in order, whatever the number of rows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "forward/kernels.h"
#include "forward/memory.h"
#include "forward/pool.h"

namespace native {

constexpr int kBlock = 32;  // outputs of a packed block of weights

// Pieces of a product for each thread: enough that no thread waits long for the last one.
constexpr int kPiecesOfThread = 4;

// Make room for `size` numbers in a buffer that is kept between calls.
inline void grow(std::vector<float>& buffer, size_t size) {
  if (buffer.size() < size) buffer.resize(size);
}

// How many sums of 16 lanes fit into the registers along with their inputs.
#if defined(__AVX512F__)
constexpr int kMaxSums = 24;
#else
constexpr int kMaxSums = 6;
#endif
constexpr int kMaxRows = kMaxSums / 2;  // rows of a tile

// How the weights of a product are laid out in memory, and to what its inputs are rounded.
enum class Form {
  float32,   // [block][k][32] float32
  bfloat16,  // [block][k][16] words: outputs j and j + 16 of a block as bfloat16, without loss; inputs in float32
  pairs,     // [block][k / 2][32] words: weights k and k + 1 of an output as bfloat16; inputs are rounded to bfloat16
};

// y = x Wᵀ for W (num_outputs, num_inputs). rounds_inputs: weights and inputs are rounded to bfloat16 (Form::pairs), for
// processors with dot products of bfloat16 pairs.
class Linear {
 public:
  Linear() = default;

  Linear(const float* weight, int num_outputs, int num_inputs, bool rounds_inputs)
      : num_outputs(num_outputs), num_inputs(num_inputs), num_blocks((num_outputs + kBlock - 1) / kBlock) {
    const size_t size = size_t(num_outputs) * num_inputs;
    const bool is_bfloat16 = std::all_of(weight, weight + size, [](float value) { return !(bits(value) & 0xffff); });
    form = rounds_inputs ? Form::pairs : is_bfloat16 ? Form::bfloat16 : Form::float32;
    words_.assign(num_blocks * words_of_block(), 0);
    for (int output = 0; output < num_outputs; ++output)
      for (int k = 0; k < num_inputs; ++k) put(output, k, weight[size_t(output) * num_inputs + k]);
  }

  const uint32_t* block(int index) const { return words_.data() + index * words_of_block(); }

  // Words of a packed row of inputs.
  int words_of_input() const { return form == Form::pairs ? (num_inputs + 1) / 2 : num_inputs; }

  int num_outputs = 0, num_inputs = 0, num_blocks = 0;
  Form form = Form::float32;

 private:
  static uint32_t bits(float value) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    return word;
  }

  size_t words_of_block() const { return size_t(words_of_input()) * (form == Form::bfloat16 ? kLanes : kBlock); }

  void put(int output, int k, float weight) {
    uint32_t* block = words_.data() + output / kBlock * words_of_block();
    const int lane = output % kBlock;
    if (form == Form::float32) block[size_t(k) * kBlock + lane] = bits(weight);
    else if (form == Form::pairs) block[size_t(k / 2) * kBlock + lane] |= bfloat16_bits(weight) << 16 * (k % 2);
    else block[size_t(k) * kLanes + lane % kLanes] |= lane < kLanes ? bits(weight) >> 16 : bits(weight);
  }

  std::vector<uint32_t, HugeAllocator<uint32_t>> words_;
};

// sums[row][32] of one block of outputs for a tile of rows. x: [k][rows], or [k / 2][rows] words of pairs.
//
// One block at a time, so that its weights are a single stream of memory. For a single row, whose time is that of
// reading the weights, several blocks at once were slower, although more independent sums hide the latency of an
// addition.
template <int Rows, Form form>
void block_product(const Linear& w, int block, const float* x, float* sums) {
  f32x16 sum[Rows][2] = {};
  const int num_words = w.words_of_input();
  const uint32_t* words = w.block(block);
  for (int k = 0; k < num_words; ++k) {
    f32x16 first, second;
    if constexpr (form == Form::bfloat16) {
      u32x16 both;
      std::memcpy(&both, words + size_t(k) * kLanes, sizeof both);
      first = (f32x16)(both << 16);
      second = (f32x16)(both & 0xffff0000u);
    } else {
      std::memcpy(&first, words + size_t(k) * kBlock, sizeof first);
      std::memcpy(&second, words + size_t(k) * kBlock + kLanes, sizeof second);
    }
#pragma GCC unroll 12
    for (int row = 0; row < Rows; ++row) {
      const f32x16 value = splat(x[size_t(k) * Rows + row]);
      if constexpr (form == Form::pairs) {
        sum[row][0] = dot_pairs16(value, first, sum[row][0]);
        sum[row][1] = dot_pairs16(value, second, sum[row][1]);
      } else {
        sum[row][0] = fma16(value, first, sum[row][0]);
        sum[row][1] = fma16(value, second, sum[row][1]);
      }
    }
  }
  // Not a single copy of the whole array: for that the compiler would keep the sums in memory during the loop.
#pragma GCC unroll 12
  for (int row = 0; row < Rows; ++row) {
    store16(sums + row * kBlock, sum[row][0]);
    store16(sums + row * kBlock + kLanes, sum[row][1]);
  }
}

using BlockProduct = void (*)(const Linear&, int, const float*, float*);

template <Form form, int... Row>
BlockProduct choose_product(int rows, std::integer_sequence<int, Row...>) {
  static constexpr BlockProduct table[] = {block_product<Row + 1, form>...};
  return table[rows - 1];
}

inline BlockProduct product_for(const Linear& w, int rows) {
  constexpr auto all = std::make_integer_sequence<int, kMaxRows>{};
  if (w.form == Form::pairs) return choose_product<Form::pairs>(rows, all);
  return w.form == Form::bfloat16 ? choose_product<Form::bfloat16>(rows, all) : choose_product<Form::float32>(rows, all);
}

// The rows of a pass in tiles of at most kMaxRows, as equal as possible, the larger ones first. The inputs of a product
// are packed as [tile][word][row of the tile].
class Tiles {
 public:
  explicit Tiles(int num_rows = 0) : num_rows(num_rows), count((num_rows + kMaxRows - 1) / kMaxRows) {
    if (count) least_ = num_rows / count, num_larger_ = num_rows % count;
  }

  int first(int tile) const { return tile * least_ + std::min(tile, num_larger_); }
  int rows(int tile) const { return least_ + (tile < num_larger_); }
  int tile_of(int row) const {
    const int in_larger = num_larger_ * (least_ + 1);
    return row < in_larger ? row / (least_ + 1) : num_larger_ + (row - in_larger) / least_;
  }

  int num_rows, count;

 private:
  int least_ = 0, num_larger_ = 0;
};

// Where one row of a product's packed inputs is: word i is at base[i * stride].
struct PackedRow {
  float* base;
  int stride;
  Form form;
};

inline PackedRow packed_row(float* packed, const Tiles& tiles, int row, const Linear& w) {
  const int tile = tiles.tile_of(row), first = tiles.first(tile);
  return {packed + size_t(first) * w.words_of_input() + (row - first), tiles.rows(tile), w.form};
}

// Write inputs first … first + count − 1 of a row; first is even. An odd number of inputs is followed by a 0.
inline void pack(const float* source, int first, int count, PackedRow row) {
  if (row.form != Form::pairs) {
    for (int i = 0; i < count; ++i) row.base[size_t(first + i) * row.stride] = source[i];
    return;
  }
  for (int i = 0; i < count; i += kLanes) {
    const int part = std::min(kLanes, count - i);
    f32x16 values = {};
    if (part == kLanes) values = load16(source + i);
    else std::memcpy(&values, source + i, part * sizeof(float));
    uint32_t words[kLanes / 2];
    store_pairs(words, values);
    for (int pair = 0; pair < (part + 1) / 2; ++pair)
      std::memcpy(row.base + size_t((first + i) / 2 + pair) * row.stride, words + pair, sizeof *words);
  }
}

// Call write(row, output, count, sums) for every row and every block of outputs in the range.
template <class Write>
void multiply(const Linear& w, Range blocks, const Tiles& tiles, const float* packed, Write write) {
  alignas(64) float sums[kMaxRows * kBlock];
  for (int block = blocks.first; block < blocks.last; ++block) {
    const int output = block * kBlock, count = std::min(kBlock, w.num_outputs - output);
    for (int tile = 0; tile < tiles.count; ++tile) {
      const int rows = tiles.rows(tile), first = tiles.first(tile);
      product_for(w, rows)(w, block, packed + size_t(first) * w.words_of_input(), sums);
      for (int row = 0; row < rows; ++row) write(first + row, output, count, sums + row * kBlock);
    }
  }
}

}  // namespace native
