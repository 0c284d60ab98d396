#include "forward/product.h"

#include <utility>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace native {

namespace {

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

// sums + the products of each lane's 4 weights with 4 inputs. is_wide: weights above 127 occur, with zero point 128.
template <bool is_wide>
i32x16 dot_quads(i32x16 sums, u8x64 weights, const int8_t* inputs) {
  int32_t four;
  std::memcpy(&four, inputs, sizeof four);
#if defined(__AVX512VNNI__)
  return (i32x16)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(four));
#elif defined(__AVX2__)
  __m256i sum[2], weight[2];
  std::memcpy(sum, &sums, sizeof sum), std::memcpy(weight, &weights, sizeof weight);
  const __m256i input = _mm256_set1_epi32(four);
  for (int half = 0; half < 2; ++half) {
#if defined(__AVXVNNI__)
    sum[half] = _mm256_dpbusd_avx_epi32(sum[half], weight[half], input);
#else
    // Pairs are added in 16 bits, which would overflow with weights up to 255: these are multiplied without their zero
    // point, by sign and magnitude.
    __m256i magnitude = weight[half], factor = input;
    if constexpr (is_wide) {
      const __m256i quants = _mm256_xor_si256(magnitude, _mm256_set1_epi8(-128));
      magnitude = _mm256_abs_epi8(quants), factor = _mm256_sign_epi8(input, quants);
    }
    const __m256i pairs = _mm256_maddubs_epi16(magnitude, factor);
    sum[half] = _mm256_add_epi32(sum[half], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
  }
  std::memcpy(&sums, sum, sizeof sums);
  return sums;
#else
  for (int lane = 0; lane < kLanes; ++lane)
    for (int i = 0; i < 4; ++i) sums[lane] += int32_t(weights[4 * lane + i]) * inputs[i];
  return sums;
#endif
}

#if defined(__AVX2__) && !defined(__AVXVNNI__) && !defined(__AVX512VNNI__)
constexpr bool kMultipliesQuants = true;  // dot_quads<true> takes the zero point away itself
#else
constexpr bool kMultipliesQuants = false;
#endif

constexpr int kPrefetchBytes = 8192;

// From how many rows on blocks are requested from memory in advance. Up to 5 rows it costs AMD's Zen 4 up to 40 %, while
// Intel's Sapphire Rapids gains 10 to 40 % at any number.
int find_prefetch_rows() {
#if defined(__x86_64__)
  unsigned level, vendor, unused[2];
  if (__get_cpuid(0, &level, &vendor, unused, unused + 1) && vendor == signature_INTEL_ebx) return 1;
#endif
  return 6;
}
const int kPrefetchRows = find_prefetch_rows();

// sums[row · stride + 0 … 15] of one stream for a tile of rows. x: [block][row].
template <int Rows, Quantization kind>
void stream_product(const uint8_t* stream, int num_blocks, const QuantizedInputs* x, float* sums, int stride) {
  constexpr bool is_wide = kind == Quantization::q8_0;
  f32x16 sum[Rows] = {};
  for (int block = 0; block < num_blocks; ++block, x += Rows) {
    const int half = block % 2;
    const uint8_t* group = stream + size_t(block / 2) * group_bytes(kind);
    const uint8_t* bytes = group + header_bytes(kind) + half * quad_bytes(kind);
    if (Rows >= kPrefetchRows)
      for (int line = 0; line < quad_bytes(kind); line += 64) __builtin_prefetch(bytes + kPrefetchBytes + line, 0, 2);
    const f32x16 scales = load_halves(group + 32 * half);
    u8x64 quads[kQuads];
#pragma GCC unroll 8
    for (int quad = 0; quad < kQuads; ++quad) {
      if constexpr (is_wide) quads[quad] = load64(bytes + 64 * quad);
      else if (quad < 4) quads[quad] = load64(bytes + 64 * quad) & 15;
      else quads[quad] = load64(bytes + 64 * (quad - 4)) >> 4;
    }
#pragma GCC unroll 12
    for (int row = 0; row < Rows; ++row) {
      i32x16 total = is_wide && kMultipliesQuants ? i32x16{} : i32x16{} + x[row].start;
#pragma GCC unroll 8
      for (int quad = 0; quad < kQuads; ++quad) total = dot_quads<is_wide>(total, quads[quad], x[row].values + 4 * quad);
      sum[row] = fma16(scales * x[row].scale, __builtin_convertvector(total, f32x16), sum[row]);
      if constexpr (kind == Quantization::q4_1)
        sum[row] = fma16(load_halves(group + kScaleBytes + 32 * half), splat(x[row].offset), sum[row]);
    }
  }
#pragma GCC unroll 12
  for (int row = 0; row < Rows; ++row) store16(sums + row * stride, sum[row]);
}

// The same for quantised weights. x: [block of inputs][rows].
template <int Rows, Quantization kind>
void quantized_product(const Linear& w, int block, const float* x, float* sums) {
  for (int half = 0; half < 2; ++half)
    stream_product<Rows, kind>(w.stream(2 * block + half), w.num_inputs / kQuants,
                               reinterpret_cast<const QuantizedInputs*>(x), sums + half * kLanes, kBlock);
}

template <Form form, int... Row>
BlockProduct choose_product(int rows, std::integer_sequence<int, Row...>) {
  static constexpr BlockProduct table[] = {block_product<Row + 1, form>...};
  return table[rows - 1];
}

template <Quantization kind, int... Row>
BlockProduct choose_quantized(int rows, std::integer_sequence<int, Row...>) {
  static constexpr BlockProduct table[] = {quantized_product<Row + 1, kind>...};
  return table[rows - 1];
}

}  // namespace

BlockProduct product_for(const Linear& w, int rows) {
  constexpr auto all = std::make_integer_sequence<int, kMaxRows>{};
  if (w.form == Form::quantized) {
    if (w.kind == Quantization::q8_0) return choose_quantized<Quantization::q8_0>(rows, all);
    return w.kind == Quantization::q4_0 ? choose_quantized<Quantization::q4_0>(rows, all)
                                        : choose_quantized<Quantization::q4_1>(rows, all);
  }
  if (w.form == Form::pairs) return choose_product<Form::pairs>(rows, all);
  return w.form == Form::bfloat16 ? choose_product<Form::bfloat16>(rows, all) : choose_product<Form::float32>(rows, all);
}

}  // namespace native
