// Products with quantised weights against scalar loops, bit by bit; prints a checksum, which all processors share.

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "forward/product.h"

namespace {

using native::Quantization;

std::mt19937 rng;

int below(int limit) { return int(rng() % unsigned(limit)); }

float half(const uint8_t* bytes) {
  const int bits = bytes[0] | bytes[1] << 8, exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float magnitude = exponent ? std::ldexp(float(1024 + fraction), exponent - 25) : std::ldexp(float(fraction), -24);
  return bits & 0x8000 ? -magnitude : magnitude;
}

// Random blocks of a file; scales of all finite sizes, among them subnormal ones and 0.
std::vector<uint8_t> random_blocks(Quantization kind, int count) {
  const int size = native::block_bytes(kind);
  std::vector<uint8_t> blocks(size_t(count) * size);
  for (uint8_t& byte : blocks) byte = uint8_t(rng());
  for (int i = 0; i < count; ++i)
    for (int at = 1; at < (kind == Quantization::q4_1 ? 4 : 2); at += 2)
      blocks[size_t(i) * size + at] = uint8_t((blocks[size_t(i) * size + at] & 0x83) | below(5) * 16);
  return blocks;
}

// A row of inputs as numbers and their quants.
struct Row {
  std::vector<float> values, scales;
  std::vector<int> quants;
};

Row random_row(int num_inputs) {
  std::normal_distribution<float> normal;
  Row row;
  for (int first = 0; first < num_inputs; first += 32) {
    const float size = below(8) ? std::ldexp(1.0f, below(60) - 30) : below(2) ? 0.0f : 1e-35f;
    float most = 0.0f;
    for (int i = 0; i < 32; ++i) row.values.push_back(size * normal(rng)), most = std::max(most, std::fabs(row.values.back()));
    const bool is_zero = most < 0x1p-100f;
    row.scales.push_back(is_zero ? 0.0f : most / 127.0f);
    const float factor = is_zero ? 0.0f : 127.0f / most;
    for (int i = 0; i < 32; ++i) row.quants.push_back(int(std::nearbyint(row.values[first + i] * factor)));
  }
  return row;
}

int quant(Quantization kind, const uint8_t* block, int i) {
  if (kind == Quantization::q8_0) return int8_t(block[2 + i]);
  const uint8_t* nibbles = block + (kind == Quantization::q4_1 ? 4 : 2);
  return (i < 16 ? nibbles[i] & 15 : nibbles[i - 16] >> 4) - (kind == Quantization::q4_0 ? 8 : 0);
}

float expected(Quantization kind, const uint8_t* blocks, const Row& row) {
  float sum = 0.0f;
  for (size_t block = 0; block < row.scales.size(); ++block, blocks += native::block_bytes(kind)) {
    int total = 0, inputs = 0;
    for (int i = 0; i < 32; ++i) {
      const int input = row.quants[32 * block + i];
      total += quant(kind, blocks, i) * input, inputs += input;
    }
    sum = std::fma(half(blocks) * row.scales[block], float(total), sum);
    if (kind == Quantization::q4_1) sum = std::fma(half(blocks + 2), row.scales[block] * float(inputs), sum);
  }
  return sum;
}

uint32_t bits(float value) {
  uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  return word;
}

uint64_t checksum = 14695981039346656037u;
int num_wrong = 0;

void check(float found, float wanted) {
  num_wrong += bits(found) != bits(wanted);
  checksum = (checksum ^ bits(found)) * 1099511628211u;
}

void check_product(Quantization kind, int num_rows) {
  const int num_outputs = 1 + below(70), num_blocks = 1 + below(7), num_inputs = 32 * num_blocks;
  const std::vector<uint8_t> blocks = random_blocks(kind, num_outputs * num_blocks);
  const native::Linear w(kind, blocks.data(), num_outputs, num_inputs);
  const native::Tiles tiles(num_rows);
  std::vector<float> packed(size_t(num_rows) * w.words_of_input());
  std::vector<Row> rows;
  for (int row = 0; row < num_rows; ++row) {
    rows.push_back(random_row(num_inputs));
    native::pack(rows[row].values.data(), 0, num_inputs, packed_row(packed.data(), tiles, row, w));
  }
  const size_t width = size_t(num_blocks) * native::block_bytes(kind);
  native::multiply(w, {0, w.num_blocks}, tiles, packed.data(), [&](int row, int first, int count, const float* sums) {
    for (int i = 0; i < count; ++i) check(sums[i], expected(kind, blocks.data() + (first + i) * width, rows[row]));
  });
  std::vector<float> weights(num_inputs);
  const int output = below(num_outputs);
  w.row(output, weights.data());
  for (int i = 0; i < num_inputs; ++i) {
    const uint8_t* block = blocks.data() + output * width + size_t(i / 32) * native::block_bytes(kind);
    const float weight = half(block) * float(quant(kind, block, i % 32));
    check(weights[i], kind == Quantization::q4_1 ? weight + half(block + 2) : weight);
  }
}

void check_that_nothing_unusual_is_lost() {
  for (const float unusual : {__builtin_nanf(""), HUGE_VALF, -HUGE_VALF})
    for (int place = 0; place < 32; ++place) {
      std::vector<float> values(32, 1.0f);
      values[place] = unusual;
      native::QuantizedInputs block;
      native::quantize(values.data(), 32, 128, block);
      num_wrong += !std::isnan(block.scale) || block.start != 0;
    }
}

}  // namespace

int main() {
  for (const Quantization kind : {Quantization::q8_0, Quantization::q4_0, Quantization::q4_1})
    for (int num_rows = 1; num_rows <= 30; ++num_rows) check_product(kind, num_rows);
  check_that_nothing_unusual_is_lost();
  std::printf("%016llx\n", static_cast<unsigned long long>(checksum));
  if (num_wrong) std::fprintf(stderr, "%d results are wrong\n", num_wrong);
  return num_wrong ? 1 : 0;
}
