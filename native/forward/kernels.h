// Vector primitives with a fixed order of arithmetic: every result depends only on its own inputs.
//
// Compile with -ffp-contract=off: a multiplication and an addition are fused only by fma16(). So the AVX-512, AVX2,
// NEON and portable builds round alike, and so do all tile sizes. (The exception are subnormal sums of bfloat16
// products: the AVX-512 instruction makes them 0.)
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace native {

constexpr int kLanes = 16;

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));

inline f32x16 splat(float value) {
  return f32x16{value, value, value, value, value, value, value, value,
                value, value, value, value, value, value, value, value};
}

inline f32x16 load16(const float* source) {
  f32x16 value;
  std::memcpy(&value, source, sizeof value);
  return value;
}

inline void store16(float* target, f32x16 value) { std::memcpy(target, &value, sizeof value); }

// a * b + c, rounded once.
inline f32x16 fma16(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  __m256 x[2], y[2], z[2];
  std::memcpy(x, &a, sizeof x), std::memcpy(y, &b, sizeof y), std::memcpy(z, &c, sizeof z);
  for (int half = 0; half < 2; ++half) z[half] = _mm256_fmadd_ps(x[half], y[half], z[half]);
  f32x16 sum;
  std::memcpy(&sum, z, sizeof sum);
  return sum;
#elif defined(__ARM_NEON)
  float32x4_t x[4], y[4], z[4];
  std::memcpy(x, &a, sizeof x), std::memcpy(y, &b, sizeof y), std::memcpy(z, &c, sizeof z);
  for (int quarter = 0; quarter < 4; ++quarter) z[quarter] = vfmaq_f32(z[quarter], x[quarter], y[quarter]);
  f32x16 sum;
  std::memcpy(&sum, z, sizeof sum);
  return sum;
#else
  for (int lane = 0; lane < kLanes; ++lane) c[lane] = std::fma(a[lane], b[lane], c[lane]);
  return c;
#endif
}

// A number's bits rounded to bfloat16, ties to even; a subnormal number becomes 0, as with the instruction.
inline uint32_t bfloat16_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bits >> 16 | 0x40u;  // a NaN stays a NaN
  if (!(bits & 0x7f800000u)) return bits >> 16 & 0x8000u;
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

// Write 16 numbers, rounded to bfloat16, as 8 words: number 2i in the lower half of word i, 2i + 1 in the upper half.
inline void store_pairs(uint32_t* words, f32x16 values) {
#if defined(__AVX512BF16__)
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)values);
  std::memcpy(words, &rounded, sizeof rounded);
#else
  for (int i = 0; i < kLanes / 2; ++i) words[i] = bfloat16_bits(values[2 * i]) | bfloat16_bits(values[2 * i + 1]) << 16;
#endif
}

// sum + the two products of a lane's bfloat16 halves: first the upper halves', then the lower halves', each rounded
// once.
inline f32x16 dot_pairs16(f32x16 a, f32x16 b, f32x16 sum) {
#if defined(__AVX512BF16__)
  return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
  const u32x16 x = (u32x16)a, y = (u32x16)b;
  sum = fma16((f32x16)(x & 0xffff0000u), (f32x16)(y & 0xffff0000u), sum);
  return fma16((f32x16)(x << 16), (f32x16)(y << 16), sum);
#endif
}

// The sum of the lanes, as one fixed tree: halves, then halves of the sum.
inline float sum_lanes(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#endif
  float lane[kLanes];
  store16(lane, v);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  return lane[0];
}

inline float max_lanes(f32x16 v) {
  float lane[kLanes];
  store16(lane, v);
  float largest = lane[0];
  for (int i = 1; i < kLanes; ++i) largest = lane[i] > largest ? lane[i] : largest;
  return largest;
}

inline f32x16 max16(f32x16 a, f32x16 b) { return a > b ? a : b; }
inline f32x16 min16(f32x16 a, f32x16 b) { return a < b ? a : b; }

// exp(x) to 2 units in the last place for x in -87..88, clamped outside (Cephes' polynomial).
inline f32x16 exp16(f32x16 x) {
  x = max16(min16(x, splat(88.0f)), splat(-87.0f));
  const f32x16 magic = splat(12582912.0f);  // adding it rounds to a whole number
  const f32x16 n = fma16(x, splat(1.44269504088896341f), magic) - magic;
  f32x16 r = fma16(n, splat(-0.693359375f), x);
  r = fma16(n, splat(2.12194440e-4f), r);
  f32x16 p = splat(1.9875691500e-4f);
  p = fma16(p, r, splat(1.3981999507e-3f));
  p = fma16(p, r, splat(8.3334519073e-3f));
  p = fma16(p, r, splat(4.1665795894e-2f));
  p = fma16(p, r, splat(1.6666665459e-1f));
  p = fma16(p, r, splat(5.0000001201e-1f));
  p = fma16(p, r * r, r) + 1.0f;
  const i32x16 exponent = __builtin_convertvector(n, i32x16);
  return (f32x16)((i32x16)p + (exponent << 23));
}

inline f32x16 sigmoid16(f32x16 x) { return 1.0f / (1.0f + exp16(-x)); }

inline f32x16 silu16(f32x16 x) { return x / (1.0f + exp16(-x)); }

inline f32x16 tanh16(f32x16 x) { return 2.0f * sigmoid16(2.0f * x) - 1.0f; }

// GELU in its tanh approximation: x · (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2.
inline f32x16 gelu16(f32x16 x) {
  const f32x16 inner = x * fma16(x * x, splat(0.044715f), splat(1.0f));
  return x * sigmoid16(1.5957691216057308f * inner);
}

// target = weight · source ÷ rms(source); the sum of squares uses 16 fixed lanes. size is a multiple of 16.
inline void rms_norm(const float* source, const float* weight, int size, float eps, float* target) {
  f32x16 squares = {};
  for (int i = 0; i < size; i += kLanes) {
    const f32x16 value = load16(source + i);
    squares = fma16(value, value, squares);
  }
  const f32x16 scale = splat(1.0f / std::sqrt(sum_lanes(squares) / float(size) + eps));
  for (int i = 0; i < size; i += kLanes) store16(target + i, load16(source + i) * scale * load16(weight + i));
}

}  // namespace native
