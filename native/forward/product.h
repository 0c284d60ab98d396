// Products with packed weights: each output accumulates over k in order, whatever the number of rows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "forward/kernels.h"
#include "forward/memory.h"
#include "forward/pool.h"
#include "forward/quantized.h"

namespace native {

constexpr int kBlock = 32;  // outputs of a packed block of weights

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
  quantized,  // [block][2] streams of 16 outputs (quantized.h); inputs are rounded to 8 bits
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

  // Return what is wrong with quantised blocks, or null.
  static const char* refusal(int kind, const uint8_t* blocks, int num_outputs, int num_inputs) {
    if (kind < 0 || kind > int(Quantization::q4_1)) return "there is no such quantisation";
    if (num_outputs < 1 || num_inputs < 1 || num_inputs % kQuants) return "the inputs are no whole blocks of 32";
    const size_t count = size_t(num_outputs) * (num_inputs / kQuants), size = block_bytes(Quantization(kind));
    for (size_t i = 0; i < count; ++i)
      if (!is_finite_block(Quantization(kind), blocks + i * size)) return "a block's scale is not finite";
    return nullptr;
  }

  // blocks: (num_outputs, num_inputs / 32), without refusal.
  Linear(Quantization kind, const uint8_t* blocks, int num_outputs, int num_inputs)
      : num_outputs(num_outputs), num_inputs(num_inputs), num_blocks((num_outputs + kBlock - 1) / kBlock),
        form(Form::quantized), kind(kind) {
    words_.assign(num_blocks * words_of_block(), 0);
    for (int output = 0; output < num_outputs; ++output)
      for (int k = 0; k < num_inputs / kQuants; ++k, blocks += block_bytes(kind))
        pack_block(kind, blocks, output % kLanes, k, const_cast<uint8_t*>(stream(output / kLanes)));
  }

  const uint32_t* block(int index) const { return words_.data() + index * words_of_block(); }

  // The index-th 16 outputs of quantised weights.
  const uint8_t* stream(int index) const {
    return reinterpret_cast<const uint8_t*>(words_.data()) + index * stream_bytes(kind, num_inputs);
  }

  // Words of a packed row of inputs.
  int words_of_input() const {
    if (form == Form::quantized) return num_inputs / kQuants * kInputWords;
    return form == Form::pairs ? (num_inputs + 1) / 2 : num_inputs;
  }

  // Write the weights of one output, as the products use them.
  void row(int output, float* target) const {
    const int lane = output % kBlock;
    if (form == Form::quantized) return unpack_row(kind, stream(output / kLanes), output % kLanes, num_inputs, target);
    for (int k = 0; k < num_inputs; ++k) {
      const uint32_t* words = block(output / kBlock);
      const bool is_pairs = form == Form::pairs;
      const uint32_t word = form == Form::bfloat16 ? words[size_t(k) * kLanes + lane % kLanes]
                                                   : words[size_t(is_pairs ? k / 2 : k) * kBlock + lane];
      const bool is_upper = form == Form::float32 || (is_pairs ? k % 2 : lane >= kLanes);
      const uint32_t value = form == Form::float32 ? word : is_upper ? word & 0xffff0000u : word << 16;
      std::memcpy(target + k, &value, sizeof value);
    }
  }

  int num_outputs = 0, num_inputs = 0, num_blocks = 0;
  Form form = Form::float32;
  Quantization kind = Quantization::q8_0;  // of Form::quantized

 private:
  static uint32_t bits(float value) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    return word;
  }

  size_t words_of_block() const {
    if (form == Form::quantized) return 2 * stream_bytes(kind, num_inputs) / sizeof(uint32_t);
    return size_t(words_of_input()) * (form == Form::bfloat16 ? kLanes : kBlock);
  }

  void put(int output, int k, float weight) {
    uint32_t* block = words_.data() + output / kBlock * words_of_block();
    const int lane = output % kBlock;
    if (form == Form::float32) block[size_t(k) * kBlock + lane] = bits(weight);
    else if (form == Form::pairs) block[size_t(k / 2) * kBlock + lane] |= bfloat16_bits(weight) << 16 * (k % 2);
    else block[size_t(k) * kLanes + lane % kLanes] |= lane < kLanes ? bits(weight) >> 16 : bits(weight);
  }

  std::vector<uint32_t, HugeAllocator<uint32_t>> words_;
};

// Computes sums[row][32] of one block of outputs for a tile of rows. x: the tile's packed inputs, [word][row] (for
// quantised weights [block of inputs][row]).
using BlockProduct = void (*)(const Linear&, int block, const float* x, float* sums);

// The function for a tile of this many rows.
BlockProduct product_for(const Linear& w, int rows);

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

// Where one row of a product's packed inputs is: word i, or block i of quantised inputs, is at base[i * stride].
struct PackedRow {
  float* base;
  int stride;
  Form form;
  int zero_point;
};

inline PackedRow packed_row(float* packed, const Tiles& tiles, int row, const Linear& w) {
  const int tile = tiles.tile_of(row), first = tiles.first(tile);
  const int width = w.form == Form::quantized ? kInputWords : 1;
  return {packed + size_t(first) * w.words_of_input() + (row - first) * width, tiles.rows(tile) * width, w.form,
          zero_point(w.kind)};
}

// Write inputs first … first + count − 1 of a row; first is even, and both are multiples of 32 where inputs are quantised.
// An odd number of inputs is followed by a 0.
inline void pack(const float* source, int first, int count, PackedRow row) {
  if (row.form == Form::quantized) {
    for (int i = 0; i < count; i += kQuants)
      quantize(source + i, std::min(kQuants, count - i), row.zero_point,
               *reinterpret_cast<QuantizedInputs*>(row.base + size_t((first + i) / kQuants) * row.stride));
    return;
  }
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
