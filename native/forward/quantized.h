// Quantised weights and inputs: integer products within blocks of 32 inputs, and float32 sums over the blocks in order.
//
// Integer sums do not depend on their order, so all processors compute the same bits, whatever instructions they have.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "forward/kernels.h"

namespace native {

constexpr int kQuants = 32;     // inputs of a block, which share a scale
constexpr int kQuads = 8;       // registers of a block: each holds 4 inputs of 16 outputs
constexpr int kScaleBytes = 64;  // the scales of 16 outputs for two blocks, as float16

// The block formats of GGUF files. An output's block of inputs is a float16 scale d (q4_1: and a minimum m), then the
// quants; a weight is d · q (q8_0: −128 … 127), d · (q − 8) (q4_0: 0 … 15) or d · q + m (q4_1).
enum class Quantization { q8_0, q4_0, q4_1 };

constexpr int block_bytes(Quantization kind) {
  return kind == Quantization::q8_0 ? 34 : kind == Quantization::q4_0 ? 18 : 20;
}

// What the packed weights, which are unsigned, have in excess of the quants.
constexpr int zero_point(Quantization kind) {
  return kind == Quantization::q8_0 ? 128 : kind == Quantization::q4_0 ? 8 : 0;
}

// Packed weights: 16 outputs are one stream of groups of two blocks: the scales (q4_1: then the minima), then for each
// block the quads. Byte 4 · output + i of quad g is the weight of input 4g + i; of 4 bits, quads g and g + 4 share bytes.
constexpr int header_bytes(Quantization kind) { return kind == Quantization::q4_1 ? 2 * kScaleBytes : kScaleBytes; }
constexpr int quad_bytes(Quantization kind) { return kind == Quantization::q8_0 ? 512 : 256; }
constexpr int group_bytes(Quantization kind) { return header_bytes(kind) + 2 * quad_bytes(kind); }
constexpr size_t stream_bytes(Quantization kind, int num_inputs) {
  return size_t((num_inputs / kQuants + 1) / 2) * group_bytes(kind);
}

// A block of inputs: x ≈ scale · values. start: what a sum of products with packed weights starts from, to be that of
// the weights. offset: scale · Σ values, for the minima.
struct QuantizedInputs {
  int8_t values[kQuants];
  float scale;
  int32_t start;
  float offset;
};
constexpr int kInputWords = sizeof(QuantizedInputs) / sizeof(float);

inline int32_t sum_lanes(i32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#endif
  int32_t sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += v[lane];
  return sum;
}

inline int32_t max_lanes(i32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)v);
#endif
  int32_t largest = v[0];
  for (int lane = 1; lane < kLanes; ++lane) largest = std::max(largest, int32_t(v[lane]));
  return largest;
}

typedef uint8_t u8x64 __attribute__((vector_size(64)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

inline u8x64 load64(const uint8_t* source) {
  u8x64 bytes;
  std::memcpy(&bytes, source, sizeof bytes);
  return bytes;
}

// 16 float16 numbers, which must be finite.
inline f32x16 load_halves(const uint8_t* source) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
#elif defined(__F16C__)
  __m256 half[2];
  for (int i = 0; i < 2; ++i)
    half[i] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source + 16 * i)));
  f32x16 value;
  std::memcpy(&value, half, sizeof value);
  return value;
#else
  uint16_t halves[kLanes];
  std::memcpy(halves, source, sizeof halves);
  u32x16 bits;
  for (int i = 0; i < kLanes; ++i) bits[i] = halves[i];
  const f32x16 magnitude = (f32x16)((bits & 0x7fff) << 13) * 0x1p112f;  // rebias the exponent; exact
  return (f32x16)((u32x16)magnitude | (bits & 0x8000) << 16);
#endif
}

inline float half_to_float(const uint8_t* source) {
  uint8_t halves[2 * kLanes] = {source[0], source[1]};
  return load_halves(halves)[0];
}

// Whether the scale and the minimum of a file's block are finite.
inline bool is_finite_block(Quantization kind, const uint8_t* block) {
  return (block[1] & 0x7c) != 0x7c && (kind != Quantization::q4_1 || (block[3] & 0x7c) != 0x7c);
}

// Quantise up to 32 inputs, the rest are 0: scale = max |x| ÷ 127, values = x · (127 ÷ max |x|), rounded to even. A block
// below 2^-100 is 0; one with an infinity or NaN makes every output NaN.
inline void quantize(const float* source, int count, int zero_point, QuantizedInputs& target) {
  f32x16 part[2] = {};
  if (count == kQuants) std::memcpy(part, source, sizeof part);
  else std::memcpy(part, source, count * sizeof(float));
  const i32x16 low = (i32x16)part[0] & 0x7fffffff, high = (i32x16)part[1] & 0x7fffffff;
  const int32_t bits = max_lanes(low > high ? low : high);  // without sign, numbers and their bits order alike
  float most;
  std::memcpy(&most, &bits, sizeof most);
  const bool is_finite = bits < 0x7f800000, is_zero = most < 0x1p-100f;
  target.scale = is_finite ? is_zero ? 0.0f : most / 127.0f : __builtin_nanf("");
  const float factor = is_finite && !is_zero ? 127.0f / most : 0.0f;
  const f32x16 magic = splat(12582912.0f);  // adding it rounds to a whole number, which is in the last bits
  i32x16 values[2];
  for (int i = 0; i < 2; ++i) {
    values[i] = (i32x16)(part[i] * factor + magic) - (i32x16)magic;
    if (!is_finite) values[i] = i32x16{};
    const i8x16 bytes = __builtin_convertvector(values[i], i8x16);
    std::memcpy(target.values + kLanes * i, &bytes, sizeof bytes);
  }
  const int32_t sum = sum_lanes(values[0] + values[1]);
  target.start = -zero_point * sum;
  target.offset = target.scale * float(sum);
}

// The quant of input i in a block of a file.
inline int file_quant(Quantization kind, const uint8_t* block, int i) {
  if (kind == Quantization::q8_0) return int8_t(block[2 + i]);
  const uint8_t byte = block[block_bytes(kind) - kQuants / 2 + i % 16];
  return i < 16 ? byte & 15 : byte >> 4;
}

// Put one output's block of inputs into its stream. lane: the output's place among the 16 of the stream.
inline void pack_block(Quantization kind, const uint8_t* source, int lane, int block, uint8_t* stream) {
  const int half = block % 2;
  uint8_t* group = stream + size_t(block / 2) * group_bytes(kind);
  std::memcpy(group + 32 * half + 2 * lane, source, 2);
  if (kind == Quantization::q4_1) std::memcpy(group + kScaleBytes + 32 * half + 2 * lane, source + 2, 2);
  uint8_t* bytes = group + header_bytes(kind) + half * quad_bytes(kind);
  for (int i = 0; i < kQuants; ++i) {
    const int quant = file_quant(kind, source, i), quad = i / 4, place = 4 * lane + i % 4;
    if (kind == Quantization::q8_0) bytes[64 * quad + place] = uint8_t(quant + 128);
    else bytes[64 * (quad % 4) + place] |= uint8_t(quad < 4 ? quant : quant << 4);
  }
}

// The weights of one output, as floats: exactly those of the file.
inline void unpack_row(Quantization kind, const uint8_t* stream, int lane, int num_inputs, float* target) {
  for (int i = 0; i < num_inputs; ++i) {
    const int block = i / kQuants, half = block % 2, quad = i % kQuants / 4;
    const uint8_t* group = stream + size_t(block / 2) * group_bytes(kind);
    const uint8_t* bytes = group + header_bytes(kind) + half * quad_bytes(kind) + 4 * lane + i % 4;
    const bool is_wide = kind == Quantization::q8_0;
    const int packed = is_wide ? bytes[64 * quad] : bytes[64 * (quad % 4)] >> (quad < 4 ? 0 : 4) & 15;
    target[i] = half_to_float(group + 32 * half + 2 * lane) * float(packed - zero_point(kind));
    if (kind == Quantization::q4_1) target[i] += half_to_float(group + kScaleBytes + 32 * half + 2 * lane);
  }
}

}  // namespace native
