// Philox4x32-10 noise, eight tokens at a time, bit for bit as in orchestrator/core/noise.py (docs/wire.md, Noise).
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "sampling/elementary.h"

namespace sampling {

enum Stream : uint32_t { kTarget = 0, kDraft = 1, kAccept = 2, kRecover = 3 };

// What every random number of one decision has in common; position and epoch are below 2^32.
struct Key {
  uint64_t seed;
  uint64_t position;
  uint64_t stream;
  uint64_t epoch;
};

inline u64x8 splat(uint64_t value) { return u64x8{value, value, value, value, value, value, value, value}; }

// The products of every lane's low 32 bits and a number below 2^32.
inline u64x8 multiply32(u64x8 x, uint64_t factor) {
#if defined(__AVX512F__)
  return (u64x8)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64((int64_t)factor));
#elif defined(__AVX2__)
  __m256i half[2];
  std::memcpy(half, &x, sizeof x);
  for (__m256i& each : half) each = _mm256_mul_epu32(each, _mm256_set1_epi64x((int64_t)factor));
  std::memcpy(&x, half, sizeof x);
  return x;
#else
  return (x & uint64_t{0xFFFFFFFF}) * factor;
#endif
}

// The 52 bits b of every token: word 0 * 2^20 + word 1 / 2^12. The upper halves of the lanes are garbage until the end.
template <int N>
inline void bits(const Key& key, const u64x8 (&tokens)[N], u64x8 (&result)[N]) {
  u64x8 c0[N], c1[N], c2[N], c3[N];
  for (int i = 0; i < N; ++i)
    c0[i] = splat(key.position), c1[i] = tokens[i], c2[i] = splat(key.stream), c3[i] = splat(key.epoch);
  uint64_t low = key.seed & 0xFFFFFFFF, high = key.seed >> 32;
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < N; ++i) {
      const u64x8 product0 = multiply32(c0[i], 0xD2511F53), product1 = multiply32(c2[i], 0xCD9E8D57);
      c0[i] = (product1 >> 32) ^ c1[i] ^ low;
      c1[i] = product1;
      c2[i] = (product0 >> 32) ^ c3[i] ^ high;
      c3[i] = product0;
    }
    low = (low + 0x9E3779B9) & 0xFFFFFFFF, high = (high + 0xBB67AE85) & 0xFFFFFFFF;
  }
  for (int i = 0; i < N; ++i)
    result[i] = ((c0[i] & uint64_t{0xFFFFFFFF}) << 20) | ((c1[i] & uint64_t{0xFFFFFFFF}) >> 12);
}

// b < 2^52 as a float, exactly.
inline f64x8 as_float(u64x8 b) { return (f64x8)(b | uint64_t{0x4330000000000000}) - 0x1p52; }

// u = (b + 1/2) * 2^-52, in the open interval (0, 1).
inline f64x8 unit(u64x8 b) { return (as_float(b) + 0.5) * 0x1p-52; }

// 1 - u, exactly.
inline f64x8 rest_of_unit(u64x8 b) { return ((0x1p52 - 0.5) - as_float(b)) * 0x1p-52; }

// g = -log(-log u).
inline f64x8 gumbel(u64x8 b) { return -log_of_normal(-log_of_normal(unit(b))); }

inline u64x8 bits_of(const Key& key, u64x8 tokens) {
  const u64x8 asked[1] = {tokens};
  u64x8 found[1];
  bits(key, asked, found);
  return found[0];
}

inline double uniform(const Key& key, uint64_t token) { return unit(bits_of(key, splat(token)))[0]; }

inline double gumbel(const Key& key, uint64_t token) { return gumbel(bits_of(key, splat(token)))[0]; }

// The index of the first largest value; nan is never the largest.
inline size_t first_largest(const double* values, size_t length) {
  f64x8 largest = splat(-kInfinity);
  size_t start = 0;
  for (; start + kLanes <= length; start += kLanes) {
    const f64x8 found = load8(values + start);
    largest = found > largest ? found : largest;
  }
  double top = -kInfinity;
  for (int lane = 0; lane < kLanes; ++lane) top = largest[lane] > top ? largest[lane] : top;
  for (; start < length; ++start) top = values[start] > top ? values[start] : top;
  for (size_t i = 0; i < length; ++i)
    if (values[i] == top) return i;
  return 0;
}

// The index of the largest log(weight) + noise, the first among equals. The weights are not negative.
//
// tokens: ascending; null for 0, 1, 2 ... scale: a token's score is about log(weight * scale) + noise. score(i): the
// exact score of index i without its noise.
// Few scores are computed. A token can beat the best score B only if -log u <= weight * scale * exp(-B), and
// -log u >= 1 - u; the tolerance covers the rounding of both sides many times over.
template <typename Score>
inline size_t race(const Key& key, const double* weights, const int32_t* tokens, size_t length, double scale,
                   Score score) {
  constexpr int kWide = 4;
  const u64x8 kFirst = {0, 1, 2, 3, 4, 5, 6, 7};
  constexpr double kTolerance = 1.0 + 1e-9, kLeastRest = 0x1p-53;
  size_t best = first_largest(weights, length);
  if (!(weights[best] > 0.0)) return 0;
  const auto token_of = [&](size_t i) { return uint64_t(tokens ? tokens[i] : int32_t(i)); };
  double best_score = score(best) + gumbel(key, token_of(best));
  const auto bound_of = [&] { return scale * kTolerance * __builtin_exp(-best_score); };
  double bound = bound_of();
  const auto run = [&](size_t i) {
    const double own = score(i) + gumbel(key, token_of(i));
    if (own < best_score || (own == best_score && i >= best)) return;
    best = i, best_score = own, bound = bound_of();
  };
  size_t start = 0;
  for (; start + kWide * kLanes <= length; start += kWide * kLanes) {
    f64x8 limits[kWide];
    f64x8 largest = splat(0.0);
    for (int i = 0; i < kWide; ++i) {
      limits[i] = load8(weights + start + i * kLanes) * bound;
      largest = limits[i] > largest ? limits[i] : largest;
    }
    if (!any(largest >= kLeastRest)) continue;
    u64x8 asked[kWide], found[kWide];
    for (int i = 0; i < kWide; ++i) {
      asked[i] = kFirst + uint64_t(start + i * kLanes);
      if (tokens)
        for (int lane = 0; lane < kLanes; ++lane) asked[i][lane] = uint64_t(tokens[start + i * kLanes + lane]);
    }
    bits(key, asked, found);
    i64x8 hit = i64x8{};
    for (int i = 0; i < kWide; ++i) hit |= rest_of_unit(found[i]) <= limits[i];
    if (!any(hit)) continue;
    for (int i = 0; i < kWide; ++i) {
      const i64x8 own = rest_of_unit(found[i]) <= limits[i];
      for (int lane = 0; lane < kLanes; ++lane)
        if (own[lane]) run(start + i * kLanes + lane);
    }
  }
  for (; start < length; ++start)
    if (weights[start] * bound >= kLeastRest) run(start);
  return best;
}

}  // namespace sampling
