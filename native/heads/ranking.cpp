#include "heads/ranking.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "forward/kernels.h"

namespace native {

namespace {

// As in runtime/models/heads/engines, where ranking.py and sampled.py say why.
constexpr int kCandidates = 256;
constexpr double kLaterShare = 0.42;
// Streams of orchestrator/core/noise.py; each node has its own draft stream.
constexpr uint32_t kTargetStream = 0, kDraftStream = 1, kNumStreams = 4;

struct Extent {
  float least, most;
};

Extent extent_of(const float* logits, int size) {
  f32x16 least = splat(logits[0]), most = least;
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    least = min16(least, load16(logits + i));
    most = max16(most, load16(logits + i));
  }
  Extent found = {-max_lanes(-least), max_lanes(most)};
  for (; i < size; ++i) found = {std::min(found.least, logits[i]), std::max(found.most, logits[i])};
  return found;
}

int count_from(const float* logits, int size, float limit) {
  i32x16 counts = {};
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) counts -= load16(logits + i) >= splat(limit);
  int count = 0;
  for (int lane = 0; lane < kLanes; ++lane) count += counts[lane];
  for (; i < size; ++i) count += logits[i] >= limit;
  return count;
}

// Return a limit that at least `count` of the logits reach, and not many more unless several are equal.
float find_limit(const float* logits, int size, int count) {
  auto [low, high] = extent_of(logits, size);
  while (true) {
    const float middle = low + (high - low) / 2;
    if (!(low < middle && middle < high)) return low;
    const int found = count_from(logits, size, middle);
    if (found < count) {
      high = middle;
    } else {
      low = middle;
      if (found <= 2 * count) return low;
    }
  }
}

bool is_truncated(const Ranking& r) {
  return r.temperature > 0.0 && (r.top_k > 0 || r.top_p < 1.0 || r.min_p > 0.0 || r.typical_p < 1.0);
}

// −log(−log u) for the u of orchestrator/core/noise.py.
double gumbel(uint64_t seed, uint32_t position, uint32_t token, uint32_t stream, uint32_t epoch) {
  uint32_t c[4] = {position, token, stream, epoch}, key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t(c[0]) * 0xD2511F53u, product1 = uint64_t(c[2]) * 0xCD9E8D57u;
    const uint32_t next[4] = {uint32_t(product1 >> 32) ^ c[1] ^ key[0], uint32_t(product1),
                              uint32_t(product0 >> 32) ^ c[3] ^ key[1], uint32_t(product0)};
    std::copy(next, next + 4, c);
    key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u;
  }
  const uint64_t bits = uint64_t(c[0]) << 20 | c[1] >> 12;
  return -std::log(-std::log((double(bits) + 0.5) * 0x1p-52));
}

}  // namespace

bool Ranker::is_likelier(const Column& a, const Column& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.index < b.index;
}

int Ranker::rank(const float* logits, int size, const int32_t* ids, const Ranking& ranking, int64_t position, int k,
                 Guess* found) {
  choose_columns(logits, size, std::min(std::max(k, kCandidates), size));
  const double temperature = ranking.temperature > 0.0 ? ranking.temperature : 1.0;
  for (Column& column : columns_) column.score = double(column.logit) / temperature;
  if (is_truncated(ranking)) truncate(ranking);
  else if (!ranking.takes_argmax) normalise();  // sharpening normalises anyway
  if (ranking.takes_argmax) {
    if (ranking.temperature > 0.0) add_noise(ids, ranking.seed, position);
    sharpen(ranking.sharpness);
  }
  const auto middle = columns_.begin() + std::min<size_t>(size_t(k), columns_.size());
  std::partial_sort(columns_.begin(), middle, columns_.end(), [](const Column& a, const Column& b) {
    return a.score != b.score ? a.score > b.score : a.index < b.index;
  });
  int count = 0;
  for (auto column = columns_.begin(); column < middle; ++column)
    if (column->score > -std::numeric_limits<double>::infinity())
      found[count++] = {ids ? ids[column->index] : column->index, column->score, column->score};
  return count;
}

const Weights& Ranker::find_q(const float* logits, int size, const int32_t* ids, const Ranking& ranking) {
  choose_columns(logits, size, std::min(kCandidates, size));
  for (Column& column : columns_) column.score = double(column.logit) / ranking.temperature;
  if (is_truncated(ranking)) truncate(ranking);
  std::sort(columns_.begin(), columns_.end(), is_likelier);
  keep(kMaxSampled);
  q_ = {};
  for (const Column& column : columns_) {
    const float weight = float(std::exp(column.score));
    if (weight <= 0.0f) continue;
    q_.tokens.push_back(ids ? ids[column.index] : column.index);
    q_.weights.push_back(weight);
  }
  return q_;
}

int Ranker::sample(const Ranking& ranking, int64_t position, int node, int k, Guess* found) {
  const int size = int(q_.tokens.size());
  const uint32_t stream = kDraftStream + kNumStreams * uint32_t(node);
  keys_.clear();
  for (int i = 0; i < size; ++i)
    keys_.push_back({std::log(double(q_.weights[i])) + gumbel(ranking.seed, uint32_t(position), uint32_t(q_.tokens[i]),
                                                              stream, uint32_t(ranking.epoch)), i});
  std::sort(keys_.begin(), keys_.end(), [this](const Key& a, const Key& b) {
    return a.value != b.value ? a.value > b.value : q_.tokens[a.place] < q_.tokens[b.place];
  });
  is_sampled_.assign(size, false);
  double total = 0.0, left = 1.0, missed = 1.0, bound = 1.0;
  for (const float weight : q_.weights) total += weight;
  int count = 0;
  for (int best = 0; count < std::min(k, size) && missed > 0.0 && left > 0.0; ++count) {
    while (is_sampled_[best]) ++best;
    const int sampled = keys_[count].place;
    const double doubt = count ? 1.0 - (1.0 - ranking.sharpness) * kLaterShare : ranking.sharpness;
    const double probability = q_.weights[sampled] / total;
    const auto confidence_of = [&](double q) { return missed * (1.0 - doubt + doubt * std::min(q / left, 1.0)); };
    bound = std::min(bound, confidence_of(q_.weights[best] / total));
    const double confidence = std::min(bound, confidence_of(probability));
    found[count] = {q_.tokens[sampled], std::log(confidence), std::log(bound)};
    is_sampled_[sampled] = true;
    missed -= confidence;
    left -= probability;
  }
  return count;
}

// Fill columns_ with the `count` likeliest columns, the lowest ones among equals.
void Ranker::choose_columns(const float* logits, int size, int count) {
  const float limit = count < size ? find_limit(logits, size, count) : -std::numeric_limits<float>::infinity();
  columns_.clear();
  for (int i = 0; i < size; ++i)
    if (logits[i] >= limit) columns_.push_back({i, logits[i], 0.0});
  if (columns_.size() <= size_t(count)) return;
  std::nth_element(columns_.begin(), columns_.begin() + count, columns_.end(), is_likelier);
  columns_.resize(count);
}

// Keep the first `count` columns and normalise their scores.
void Ranker::keep(size_t count) {
  columns_.resize(std::min(count, columns_.size()));
  normalise();
}

void Ranker::normalise() {
  double most = -std::numeric_limits<double>::infinity(), total = 0.0;
  for (const Column& column : columns_) most = std::max(most, column.score);
  for (const Column& column : columns_) total += std::exp(column.score - most);
  const double shift = most + std::log(total);
  for (Column& column : columns_) column.score -= shift;
}

void Ranker::sharpen(double sharpness) {
  for (Column& column : columns_) column.score /= sharpness;
  normalise();
}

void Ranker::add_noise(const int32_t* ids, uint64_t seed, int64_t position) {
  for (Column& column : columns_)
    column.score +=
        gumbel(seed, uint32_t(position), uint32_t(ids ? ids[column.index] : column.index), kTargetStream, 0);
}

// The truncations of runtime/engine/sampling/distribution.py, in its order.
void Ranker::truncate(const Ranking& r) {
  std::sort(columns_.begin(), columns_.end(), is_likelier);
  normalise();
  if (r.top_k > 0 && size_t(r.top_k) < columns_.size()) {
    const double kth = columns_[r.top_k - 1].score;
    keep(std::find_if(columns_.begin(), columns_.end(), [&](const Column& c) { return c.score < kth; }) -
         columns_.begin());
  }
  if (r.top_p < 1.0) {
    size_t count = 0;
    for (double before = 0.0; count < columns_.size() && before < r.top_p; ++count)
      before += std::exp(columns_[count].score);
    keep(count);
  }
  if (r.min_p > 0.0 && !columns_.empty()) {
    const double floor = columns_[0].score + std::log(r.min_p);
    keep(std::find_if(columns_.begin(), columns_.end(), [&](const Column& c) { return c.score < floor; }) -
         columns_.begin());
  }
  if (r.typical_p < 1.0) {
    double negative_entropy = 0.0, before = 0.0;
    for (const Column& column : columns_) negative_entropy += std::exp(column.score) * column.score;
    const auto surprise = [&](const Column& column) { return std::abs(column.score - negative_entropy); };
    std::stable_sort(columns_.begin(), columns_.end(),
                     [&](const Column& a, const Column& b) { return surprise(a) < surprise(b); });
    size_t count = 0;
    for (; count < columns_.size() && before < r.typical_p; ++count) before += std::exp(columns_[count].score);
    keep(count);
  }
}

}  // namespace native
