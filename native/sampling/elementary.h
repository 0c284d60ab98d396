// log, exp and sums from float64 +, -, *, / and integer operations only, bit for bit as in
// auditor/reference/elementary.py (docs/wire.md, Arithmetic). Compile with -ffp-contract=off: no product and sum may be fused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

namespace sampling {

constexpr int kLanes = 8;
typedef double f64x8 __attribute__((vector_size(64)));
typedef int64_t i64x8 __attribute__((vector_size(64)));
typedef uint64_t u64x8 __attribute__((vector_size(64)));

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kLn2High = 0x1.62e42fefp-1, kLn2Low = 0x1.473de6af278edp-34, kLog2E = 0x1.71547652b82fep+0;
constexpr double kLogCoefficients[] = {
    0x1.555555555558fp-1, 0x1.9999999980d53p-2, 0x1.2492494137eeap-2, 0x1.c71c528cf6fefp-3,
    0x1.746626a98e09ep-3, 0x1.39a3f6de3c195p-3, 0x1.2ef084b026ab6p-3};
constexpr double kExpCoefficients[] = {
    0x1.000000000000ap-1,  0x1.5555555555560p-3,  0x1.55555555508a2p-5,  0x1.111111110d9dcp-7,  0x1.6c16c18420277p-10,
    0x1.a01a01b9d6a81p-13, 0x1.a0199a2661c2fp-16, 0x1.71dde1d4ba5f7p-19, 0x1.28ad5cde58c7ap-22, 0x1.af82abecadcecp-26};
constexpr int64_t kBias = 1023, kOne = kBias << 52, kSqrtHalf = 0x3FE6A09E00000000, kFraction = (int64_t{1} << 52) - 1;
constexpr double kRounding = 0x1.8p52, kSmallestNormal = 0x1p-1022, kExpLowest = -708.0;

inline f64x8 splat(double value) { return f64x8{value, value, value, value, value, value, value, value}; }

inline f64x8 load8(const double* source) {
  f64x8 value;
  std::memcpy(&value, source, sizeof value);
  return value;
}

inline void store8(double* target, f64x8 value) { std::memcpy(target, &value, sizeof value); }

inline bool any(i64x8 mask) {
  int64_t found = 0;
  for (int lane = 0; lane < kLanes; ++lane) found |= mask[lane];
  return found != 0;
}

template <size_t N>
inline f64x8 polynomial(f64x8 x, const double (&coefficients)[N]) {
  f64x8 result = x * coefficients[N - 1] + coefficients[N - 2];
  for (int power = int(N) - 3; power >= 0; --power) result = result * x + coefficients[power];
  return result;
}

// log x of normal positive numbers; `shift` is subtracted from their exponents.
inline f64x8 log_of_normal(f64x8 x, i64x8 shift = i64x8{}) {
  const i64x8 bits = (i64x8)x + (kOne - kSqrtHalf);
  // The integer k, added to the bits of 1.5 * 2^52, becomes a float without a conversion.
  const f64x8 k = (f64x8)((bits >> 52) - kBias - shift + (int64_t)0x4338000000000000) - kRounding;
  const f64x8 f = (f64x8)((bits & kFraction) + kSqrtHalf) - 1.0;
  const f64x8 s = f / (f + 2.0), z = s * s, half_square = f * f * 0.5;
  const f64x8 tail = s * (half_square + z * polynomial(z, kLogCoefficients));
  return k * kLn2High - ((half_square - (tail + k * kLn2Low)) - f);
}

// log x: minus infinity for 0, nan for a negative number.
inline f64x8 log(f64x8 x) {
  const i64x8 is_subnormal = x < kSmallestNormal;
  const f64x8 result = log_of_normal(is_subnormal ? x * 0x1p54 : x, is_subnormal & 54);
  const f64x8 nan = splat(std::numeric_limits<double>::quiet_NaN());
  const f64x8 special = x == 0.0 ? splat(-kInfinity) : (x > 0.0 ? x : nan);
  return (x > 0.0) & (x < kInfinity) ? result : special;
}

// exp x for x <= 0; 0 below kExpLowest.
inline f64x8 exp(f64x8 x) {
  const f64x8 clipped = x < kExpLowest ? splat(kExpLowest) : x;
  const f64x8 shifted = clipped * kLog2E + kRounding, k = shifted - kRounding;
  const f64x8 r = (clipped - k * kLn2High) - k * kLn2Low;
  const f64x8 scale = (f64x8)(((u64x8)shifted + (uint64_t)kBias) << 52);
  const f64x8 result = ((r + r * r * polynomial(r, kExpCoefficients)) + 1.0) * scale;
  return x < kExpLowest ? splat(0.0) : result;
}

inline double log(double x) { return log(splat(x))[0]; }
inline double exp(double x) { return exp(splat(x))[0]; }

// The sum of x[0, length): the upper half is added to the lower, repeatedly; the length counts as the next power of two.
// scratch: as long as x.
inline double total(const double* x, size_t length, double* scratch) {
  if (length == 1) return x[0];
  size_t half = 1;
  while (2 * half < length) half *= 2;
  const size_t above = length - half;
  for (size_t i = 0; i < above; ++i) scratch[i] = x[i] + x[i + half];
  if (above < half) std::memcpy(scratch + above, x + above, (half - above) * sizeof(double));
  for (half /= 2; half > 0; half /= 2)
    for (size_t i = 0; i < half; ++i) scratch[i] += scratch[i + half];
  return scratch[0];
}

// Replace x by the sums of its first 1, 2, 3 ... numbers: for d = 1, 2, 4 ... the number d places before is added.
// scratch: as long as x.
inline void running_total(double* x, size_t length, double* scratch) {
  double *from = x, *to = scratch;
  for (size_t distance = 1; distance < length; distance *= 2) {
    std::memcpy(to, from, distance * sizeof(double));
    for (size_t i = distance; i < length; ++i) to[i] = from[i] + from[i - distance];
    double* const other = from;
    from = to, to = other;
  }
  if (from != x) std::memcpy(x, from, length * sizeof(double));
}

}  // namespace sampling
