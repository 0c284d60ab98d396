// Products with packed weights: each output accumulates over k in order, whatever the number of rows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "pool.h"

namespace native {

constexpr int kBlock = 32;  // outputs of a packed block of weights

// Pieces of a product for each thread: enough that none waits long for the last one.
constexpr int kPiecesOfThread = 4;

// Sums of 16 lanes that fit the registers beside what they are summed from.
#if defined(__AVX512F__)
constexpr int kMaxSums = 24;
#else
constexpr int kMaxSums = 6;
#endif
constexpr int kMaxRows = kMaxSums / 2;  // rows of a tile

// y = x Wᵀ for W (num_outputs, num_inputs), packed as [block][k][32]: as pairs of bfloat16 (outputs j and j + 16 of a
// block in one word) where that loses nothing, else as float32.
class Linear {
 public:
  Linear() = default;

  Linear(const float* weight, int num_outputs, int num_inputs)
      : num_outputs(num_outputs), num_inputs(num_inputs), num_blocks((num_outputs + kBlock - 1) / kBlock) {
    is_bfloat16 = true;
    const size_t size = size_t(num_outputs) * num_inputs;
    for (size_t i = 0; i < size && is_bfloat16; ++i) is_bfloat16 = (bits(weight[i]) & 0xffff) == 0;
    words_.assign(size_t(num_blocks) * num_inputs * (is_bfloat16 ? kLanes : kBlock), 0);
    for (int output = 0; output < num_outputs; ++output)
      for (int k = 0; k < num_inputs; ++k) put(output, k, bits(weight[size_t(output) * num_inputs + k]));
  }

  const uint32_t* block(int index) const {
    return words_.data() + size_t(index) * num_inputs * (is_bfloat16 ? kLanes : kBlock);
  }

  int num_outputs = 0, num_inputs = 0, num_blocks = 0;
  bool is_bfloat16 = false;

 private:
  static uint32_t bits(float value) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    return word;
  }

  void put(int output, int k, uint32_t word) {
    const int lane = output % kBlock;
    uint32_t* row = words_.data() + (size_t(output / kBlock) * num_inputs + k) * (is_bfloat16 ? kLanes : kBlock);
    if (!is_bfloat16) row[lane] = word;
    else if (lane < kLanes) row[lane] |= word >> 16;
    else row[lane - kLanes] |= word;
  }

  std::vector<uint32_t, HugeAllocator<uint32_t>> words_;
};

// sums[row][32] of one block of outputs for a tile of rows. x: [k][rows].
//
// One block at a time, so that its weights are one stream of memory: for a single row, whose time is that of reading
// them, several blocks at once were slower, although more independent sums hide the latency of an addition.
template <int Rows, bool Bfloat16>
void block_product(const Linear& w, int block, const float* x, float* sums) {
  f32x16 sum[Rows][2] = {};
  const int num_inputs = w.num_inputs;
  const uint32_t* words = w.block(block);
  for (int k = 0; k < num_inputs; ++k) {
    f32x16 weight[2];
    if (Bfloat16) {
      u32x16 pair;
      std::memcpy(&pair, words + size_t(k) * kLanes, sizeof pair);
      weight[0] = (f32x16)(pair << 16);
      weight[1] = (f32x16)(pair & 0xffff0000u);
    } else {
      std::memcpy(weight, words + size_t(k) * kBlock, sizeof weight);
    }
#pragma GCC unroll 12
    for (int row = 0; row < Rows; ++row) {
      const f32x16 value = splat(x[size_t(k) * Rows + row]);
      sum[row][0] = fma16(value, weight[0], sum[row][0]);
      sum[row][1] = fma16(value, weight[1], sum[row][1]);
    }
  }
  std::memcpy(sums, sum, sizeof sum);
}

using BlockProduct = void (*)(const Linear&, int, const float*, float*);

template <bool Bfloat16, int... Row>
BlockProduct choose_product(int rows, std::integer_sequence<int, Row...>) {
  static constexpr BlockProduct table[] = {block_product<Row + 1, Bfloat16>...};
  return table[rows - 1];
}

inline BlockProduct product_for(const Linear& w, int rows) {
  constexpr auto all = std::make_integer_sequence<int, kMaxRows>{};
  return w.is_bfloat16 ? choose_product<true>(rows, all) : choose_product<false>(rows, all);
}

// The rows of a pass in tiles of at most kMaxRows, as equal as can be, larger ones first. An activation of width k lies
// packed as [tile][k][row of the tile].
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

// Where one row of a packed activation lies: element k is at base[k * stride].
struct PackedRow {
  float* base;
  int stride;
};

inline PackedRow packed_row(float* packed, const Tiles& tiles, int row, int width) {
  const int tile = tiles.tile_of(row), first = tiles.first(tile);
  return {packed + size_t(first) * width + (row - first), tiles.rows(tile)};
}

// Call write(row, output, count, sums) for every row and every block of outputs in the range.
template <class Write>
void multiply(const Linear& w, Range blocks, const Tiles& tiles, const float* packed, Write write) {
  alignas(64) float sums[kMaxRows * kBlock];
  for (int block = blocks.first; block < blocks.last; ++block) {
    const int output = block * kBlock, count = std::min(kBlock, w.num_outputs - output);
    for (int tile = 0; tile < tiles.count; ++tile) {
      const int rows = tiles.rows(tile), first = tiles.first(tile);
      product_for(w, rows)(w, block, packed + size_t(first) * w.num_inputs, sums);
      for (int row = 0; row < rows; ++row) write(first + row, output, count, sums + row * kBlock);
    }
  }
}

}  // namespace native
