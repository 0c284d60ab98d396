#include "sampling/distribution.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace sampling {
namespace {

typedef float f32x8 __attribute__((vector_size(32)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));

template <typename Vector, typename T>
Vector load_as(const T* source) {
  Vector value;
  std::memcpy(&value, source, sizeof value);
  return value;
}

f64x8 widened8(const double* source) { return load8(source); }
f64x8 widened8(const float* source) { return __builtin_convertvector(load_as<f32x8>(source), f64x8); }
f64x8 widened8(const uint16_t* source) {
  const u32x8 bits = __builtin_convertvector(load_as<u16x8>(source), u32x8) << 16;
  return __builtin_convertvector((f32x8)bits, f64x8);
}

float number(float value) { return value; }
double number(double value) { return value; }
float number(uint16_t value) {
  const uint32_t bits = uint32_t(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// Write a row as float64, divided by the temperature; return its largest number, or nan if it contains one.
template <typename T>
double load_row(const T* row, double temperature, size_t length, double* target) {
  f64x8 largest = splat(-kInfinity);
  i64x8 is_nan = i64x8{};
  size_t start = 0;
  for (; start + kLanes <= length; start += kLanes) {
    f64x8 values = widened8(row + start);
    if (temperature != 1.0) values = values / splat(temperature);
    largest = values > largest ? values : largest;
    is_nan |= values != values;
    store8(target + start, values);
  }
  double result = -kInfinity;
  bool found_nan = any(is_nan);
  for (int lane = 0; lane < kLanes; ++lane) result = largest[lane] > result ? largest[lane] : result;
  for (; start < length; ++start) {
    target[start] = double(number(row[start])) / temperature;
    result = target[start] > result ? target[start] : result;
    found_nan |= target[start] != target[start];
  }
  return found_nan ? std::nan("") : result;
}

// Return call(row), the row with the type of its numbers.
template <typename Call>
auto with_type(const void* row, Type type, Call call) {
  switch (type) {
    case kFloat32: return call(static_cast<const float*>(row));
    case kBFloat16: return call(static_cast<const uint16_t*>(row));
    default: return call(static_cast<const double*>(row));
  }
}

// Write exp(x - shift) of every number.
void write_exp(const double* x, double shift, size_t length, double* target) {
  size_t start = 0;
  for (; start + kLanes <= length; start += kLanes) store8(target + start, exp(load8(x + start) - shift));
  for (; start < length; ++start) target[start] = exp(x[start] - shift);
}

template <typename T>
size_t first_largest_of(const T* row, size_t length) {
  constexpr size_t kPart = 256;
  size_t best = 0;
  for (size_t start = 0; start < length; start += kPart) {
    const size_t stop = std::min(length, start + kPart);
    const auto bound = number(row[best]);
    int has_larger = 0;
    for (size_t i = start; i < stop; ++i) has_larger |= !(number(row[i]) <= bound);
    if (!has_larger) continue;
    for (size_t i = start; i < stop; ++i) {
      const auto value = number(row[i]);
      if (value != value) return i;
      best = value > number(row[best]) ? i : best;
    }
  }
  return best;
}

// Most numbers are below the last of the best so far, so a row costs about one comparison per number.
template <typename T>
void largest_ids_of(const T* row, size_t length, size_t count, int32_t* ids) {
  for (size_t i = 0; i < length; ++i) {
    const auto value = number(row[i]);
    size_t place = std::min(i, count);
    if (place == count && !(value > number(row[size_t(ids[count - 1])]))) continue;
    place = std::min(place, count - 1);
    for (; place > 0 && value > number(row[size_t(ids[place - 1])]); --place) ids[place] = ids[place - 1];
    ids[place] = int32_t(i);
  }
}

}  // namespace

size_t argmax(const void* logits, Type type, size_t vocab_size) {
  return with_type(logits, type, [&](auto row) { return first_largest_of(row, vocab_size); });
}

void largest_ids(const void* logits, Type type, size_t vocab_size, size_t count, int32_t* ids) {
  if (count > 0) with_type(logits, type, [&](auto row) { largest_ids_of(row, vocab_size, count, ids); });
}

Distribution::Distribution(size_t size)
    : vocab_size(size), values(size), weights(size), scratch_(size), dense_(size) {}

bool Distribution::compute(const void* logits, Type type, double temperature, const Truncation& truncation) {
  is_dense = true;
  values.resize(vocab_size), weights.resize(vocab_size);
  const auto load = [&](auto row) { return load_row(row, temperature, vocab_size, values.data()); };
  largest = with_type(logits, type, load);
  if (!std::isfinite(largest)) return false;
  write_exp(values.data(), largest, vocab_size, weights.data());
  const double sum = total(weights.data(), vocab_size, scratch_.data());
  log_total = log(sum), scale = 1.0 / sum;
  if (!truncation.applies(vocab_size)) return true;
  to_support();
  if (truncation.cuts_top_k(vocab_size)) cut_top_k(size_t(truncation.top_k));
  if (truncation.top_p < 1.0) {
    std::vector<double> ranks(log_probs.size());
    for (size_t i = 0; i < ranks.size(); ++i) ranks[i] = -log_probs[i];
    cut_nucleus(ranks, truncation.top_p);
  }
  if (truncation.min_p > 0.0)
    keep_at_least(*std::max_element(log_probs.begin(), log_probs.end()) + log(truncation.min_p));
  if (truncation.typical_p < 1.0) cut_typical(truncation.typical_p);
  weights.resize(log_probs.size());
  write_exp(log_probs.data(), 0.0, log_probs.size(), weights.data());
  scale = 1.0;
  return true;
}

// Change to the sparse form, ids and log_probs, without tokens whose log p is -inf.
void Distribution::to_support() {
  is_dense = false;
  ids.resize(vocab_size), log_probs.resize(vocab_size);
  size_t length = 0;
  for (size_t i = 0; i < vocab_size; ++i) {
    const double own = (values[i] - largest) - log_total;
    ids[length] = int32_t(i), log_probs[length] = own;
    length += own > -kInfinity;
  }
  ids.resize(length), log_probs.resize(length);
}

template <typename IsKept>
void Distribution::keep_if(IsKept is_kept) {
  size_t length = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    const bool kept = is_kept(i);
    ids[length] = ids[i], log_probs[length] = log_probs[i];
    length += kept;
  }
  ids.resize(length), log_probs.resize(length);
  renormalise();
}

void Distribution::keep_at_least(double floor) {
  keep_if([&](size_t i) { return log_probs[i] >= floor; });
}

// The log-softmax over the support; the sum runs over the whole vocabulary, with 0 for the other tokens.
void Distribution::renormalise() {
  const size_t length = ids.size();
  const double top = *std::max_element(log_probs.begin(), log_probs.end());
  weights.resize(length);
  write_exp(log_probs.data(), top, length, weights.data());
  std::fill(dense_.begin(), dense_.end(), 0.0);
  for (size_t i = 0; i < length; ++i) dense_[size_t(ids[i])] = weights[i];
  const double log_sum = log(total(dense_.data(), vocab_size, scratch_.data()));
  for (double& own : log_probs) own = (own - top) - log_sum;
}

// Keep the k most probable tokens, and all that tie with the k-th.
void Distribution::cut_top_k(size_t k) {
  if (k >= log_probs.size()) return keep_at_least(-kInfinity);
  // Most tokens are far below the k-th: a threshold leaves few to choose it from.
  const double top = *std::max_element(log_probs.begin(), log_probs.end());
  std::vector<double> best;
  for (double depth = 4.0; best.size() < k; depth *= 2.0) {
    best.clear();
    for (const double own : log_probs)
      if (own >= top - depth) best.push_back(own);
  }
  std::nth_element(best.begin(), best.begin() + long(k) - 1, best.end(), std::greater<double>());
  keep_at_least(best[k - 1]);
}

// Keep the fewest tokens that reach the mass, by ascending rank; the lowest id first among equals.
void Distribution::cut_nucleus(const std::vector<double>& ranks, double mass) {
  std::vector<int32_t> order;
  const size_t size = nucleus_size(ranks, mass, order);
  std::vector<uint8_t> kept(ids.size(), 0);
  for (size_t i = 0; i < size; ++i) kept[size_t(order[i])] = 1;
  keep_if([&](size_t i) { return kept[i]; });
}

// How many tokens of the support reach the mass; order: their indices by ascending rank, at least that many.
size_t Distribution::nucleus_size(const std::vector<double>& ranks, double mass, std::vector<int32_t>& order) {
  constexpr double kMassTolerance = 1e-6;
  const double lowest = *std::min_element(ranks.begin(), ranks.end());
  weights.resize(ids.size());
  write_exp(log_probs.data(), 0.0, ids.size(), weights.data());
  std::vector<double> probs;
  for (double depth = 2.0;; depth *= 1.5) {
    // Sort only the few tokens nearest to the lowest rank, and more only if these fall short of the mass.
    order.clear();
    double found = 0.0;
    for (size_t i = 0; i < ranks.size(); ++i)
      if (ranks[i] <= lowest + depth) order.push_back(int32_t(i)), found += weights[i];
    const bool is_all = order.size() == ranks.size();
    if (!is_all && found < mass - kMassTolerance) continue;
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return ranks[size_t(a)] < ranks[size_t(b)] || (ranks[size_t(a)] == ranks[size_t(b)] && a < b);
    });
    probs.resize(order.size());
    for (size_t i = 0; i < order.size(); ++i) probs[i] = weights[size_t(order[i])];
    running_total(probs.data(), probs.size(), scratch_.data());
    const auto reached = std::find_if(probs.begin(), probs.end(), [&](double sum) { return sum >= mass; });
    if (reached != probs.end()) return size_t(reached - probs.begin()) + 1;
    if (is_all) return order.size();
  }
}

// Keep the fewest tokens that reach the mass, those whose -log p is nearest to the entropy first.
void Distribution::cut_typical(double mass) {
  weights.resize(ids.size());
  write_exp(log_probs.data(), 0.0, ids.size(), weights.data());
  std::fill(dense_.begin(), dense_.end(), 0.0);
  for (size_t i = 0; i < ids.size(); ++i)
    dense_[size_t(ids[i])] = weights[i] * (weights[i] > 0.0 ? log_probs[i] : 0.0);
  const double negative_entropy = total(dense_.data(), vocab_size, scratch_.data());
  std::vector<double> ranks(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) ranks[i] = std::fabs(log_probs[i] - negative_entropy);
  cut_nucleus(ranks, mass);
}

void Distribution::write_log_probs(double* target) const {
  if (is_dense) {
    for (size_t i = 0; i < vocab_size; ++i) target[i] = (values[i] - largest) - log_total;
    return;
  }
  std::fill(target, target + vocab_size, -kInfinity);
  for (size_t i = 0; i < ids.size(); ++i) target[size_t(ids[i])] = log_probs[i];
}

void Distribution::write_probs(double* target) const {
  write_log_probs(target);
  write_exp(target, 0.0, vocab_size, target);
}

}  // namespace sampling
