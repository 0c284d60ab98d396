#include "model.h"

#include <algorithm>
#include <numeric>

namespace native {

namespace {

constexpr int kMaxHeadDim = 512;

void scatter(const float* source, int first, int count, PackedRow target) {
  for (int i = 0; i < count; ++i) target.base[size_t(first + i) * target.stride] = source[i];
}

// Rotate the halves of a head: (a, b) → (a cos − b sin, b cos + a sin).
void rotate(float* head, const float* cosines, const float* sines, int half) {
  for (int i = 0; i < half; ++i) {
    const float a = head[i], b = head[i + half];
    head[i] = a * cosines[i] - b * sines[i];
    head[i + half] = b * cosines[i] + a * sines[i];
  }
}

// Turn scores into weights exp(score − largest), in place and zero beyond count; return their sum over 16 fixed lanes.
float softmax_weights(float* scores, int count, int padded) {
  std::fill(scores + count, scores + padded, scores[0]);
  f32x16 largest = load16(scores), total = {};
  for (int i = kLanes; i < padded; i += kLanes) largest = max16(largest, load16(scores + i));
  const f32x16 shift = splat(max_lanes(largest));
  for (int i = 0; i < padded; i += kLanes) store16(scores + i, exp16(load16(scores + i) - shift));
  std::fill(scores + count, scores + padded, 0.0f);
  for (int i = 0; i < padded; i += kLanes) total += load16(scores + i);
  return sum_lanes(total);
}

// target = Σ weight · value ÷ total over up to 64 elements of a head, in the order of the offsets.
template <int Vectors>
void add_values(const float* values, const size_t* offsets, const float* weights, int count, float total, float* target) {
  f32x16 sum[Vectors] = {};
  for (int place = 0; place < count; ++place) {
    const f32x16 weight = splat(weights[place]);
    const float* value = values + offsets[place];
    for (int i = 0; i < Vectors; ++i) sum[i] = fma16(weight, load16(value + i * kLanes), sum[i]);
  }
  for (int i = 0; i < Vectors; ++i) store16(target + i * kLanes, sum[i] / total);
}

void add_values(const float* values, const size_t* offsets, const float* weights, int count, int vectors, float total,
                float* target) {
  static constexpr decltype(&add_values<1>) table[] = {add_values<1>, add_values<2>, add_values<3>, add_values<4>};
  table[vectors - 1](values, offsets, weights, count, total, target);
}

bool all_below(const int32_t* values, int count, int limit) {
  return std::all_of(values, values + count, [limit](int32_t value) { return 0 <= value && value < limit; });
}

void grow(std::vector<float>& buffer, size_t size) {
  if (buffer.size() < size) buffer.resize(size);
}

int round_up(int value, int step) { return (value + step - 1) / step * step; }

}  // namespace

Model::Model(const Shape& shape, int max_threads)
    : shape(shape), layers(shape.num_layers), pool_(max_threads), scratch_(max_threads) {}

const char* Model::refusal(const Pass& p) const {
  if (p.num_rows < 1 || p.num_logits < 0 || p.num_slots < 1) return "a pass needs rows and slots";
  if (p.num_threads < 1 || p.num_threads > pool_.size()) return "num_threads is above the pool's";
  if (!all_below(p.ids, p.num_rows, shape.vocab_size)) return "ids: a token outside the vocabulary";
  if (!all_below(p.slots, p.num_rows, p.num_slots)) return "slots: a slot outside the cache";
  if (!all_below(p.logit_rows, p.num_logits, p.num_rows)) return "logit_rows: no such row";
  if (!all_below(p.context_slots, p.num_context_slots, p.num_slots)) return "context_slots: a slot outside the cache";
  if (!all_below(p.extra_slots, p.num_extra_slots, p.num_slots)) return "extra_slots: a slot outside the cache";
  if (p.extra_starts[0] != 0 || p.extra_starts[p.num_rows] != p.num_extra_slots) return "extra_starts: wrong ends";
  for (int row = 0; row < p.num_rows; ++row) {
    const int64_t start = p.context_starts[row], length = p.context_lens[row];
    if (start < 0 || length < 0 || start + length > p.num_context_slots) return "context_starts: beyond context_slots";
    if (p.extra_starts[row] > p.extra_starts[row + 1]) return "extra_starts: not ascending";
    if (length + p.extra_starts[row + 1] - p.extra_starts[row] < 1) return "a row must see its own slot";
  }
  const int last = std::max(final_feature_column, output_feature_column);
  const int needed = std::accumulate(layers.begin(), layers.end(), last, [](int most, const Layer& layer) {
    return std::max(most, layer.feature_column);
  });
  if (needed >= 0 && (!p.features || p.feature_width < needed + shape.hidden_size)) return "features: too narrow";
  return nullptr;
}

void Model::forward(const Pass& pass) {
  const size_t rows = pass.num_rows;
  tiles_ = Tiles(pass.num_rows);
  logit_tiles_ = Tiles(pass.num_logits);
  grow(hidden_, rows * shape.hidden_size);
  grow(normed_, rows * std::max(shape.hidden_size, layers[0].qkv.num_inputs));
  grow(qkv_, rows * (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim);
  grow(attended_, rows * shape.num_heads * shape.head_dim);
  grow(activated_, rows * shape.mlp_size);
  grow(logit_input_, size_t(pass.num_logits) * shape.hidden_size);
  pool_.run(pass.num_threads, [&](int thread, int num_threads) { run(pass, thread, num_threads); });
}

void Model::run(const Pass& pass, int thread, int num_threads) {
  const Range rows = share(pass.num_rows, thread, num_threads);
  for (int row = rows.first; row < rows.last; ++row) {
    const float* vector = pass.inputs ? pass.inputs + size_t(row) * shape.hidden_size
                                      : embedding.data() + size_t(pass.ids[row]) * shape.hidden_size;
    std::copy(vector, vector + shape.hidden_size, hidden_.data() + size_t(row) * shape.hidden_size);
  }
  grow(scratch_[thread].row, shape.hidden_size);
  grow(scratch_[thread].gates, size_t(pass.num_rows) * kBlock);
  for (int index = 0; index < shape.num_layers; ++index) run_layer(pass, index, thread, num_threads);
  run_head(pass, thread, num_threads);
}

// A barrier stands before every phase that reads what other threads have written.
void Model::run_layer(const Pass& pass, int index, int thread, int num_threads) {
  const Layer& layer = layers[index];
  const Range rows = share(pass.num_rows, thread, num_threads);
  const int width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim;
  Scratch& scratch = scratch_[thread];
  const auto normalise = [&](const std::vector<float>& weight) {
    for (int row = rows.first; row < rows.last; ++row) {
      const float* source = hidden_.data() + size_t(row) * shape.hidden_size;
      normalise_row(source, weight, scratch.row.data());
      scatter(scratch.row.data(), 0, shape.hidden_size,
              packed_row(normed_.data(), tiles_, row, shape.hidden_size));
    }
  };

  for (int row = rows.first; row < rows.last; ++row)
    keep_feature(pass, row, layer.feature_column, hidden_.data() + size_t(row) * shape.hidden_size);
  if (index == 0 && pass.attention_inputs) {
    const int size = layer.qkv.num_inputs;
    for (int row = rows.first; row < rows.last; ++row)
      scatter(pass.attention_inputs + size_t(row) * size, 0, size, packed_row(normed_.data(), tiles_, row, size));
  } else {
    normalise(layer.input_norm);
  }
  pool_.barrier();
  multiply(layer.qkv, share(layer.qkv.num_blocks, thread, num_threads), tiles_, normed_.data(),
           [&](int row, int first, int count, const float* sums) {
             float* target = qkv_.data() + size_t(row) * width + first;
             for (int i = 0; i < count; ++i) target[i] = layer.qkv_bias.empty() ? sums[i] : sums[i] + layer.qkv_bias[first + i];
           });
  pool_.barrier();
  for (int row = rows.first; row < rows.last; ++row) rotate_and_store(pass, index, row);
  pool_.barrier();
  const Range tasks = share(pass.num_rows * shape.num_kv_heads, thread, num_threads);
  for (int task = tasks.first; task < tasks.last; ++task)
    attend(pass, index, task / shape.num_kv_heads, task % shape.num_kv_heads, scratch);
  pool_.barrier();
  add_product(layer.output, share(layer.output.num_blocks, thread, num_threads), attended_);
  pool_.barrier();
  normalise(layer.mlp_norm);
  pool_.barrier();
  multiply_mlp(layer, share(layer.gate_up.num_blocks / 2, thread, num_threads), scratch);
  pool_.barrier();
  add_product(layer.down, share(layer.down.num_blocks, thread, num_threads), activated_);
  pool_.barrier();
}

void Model::run_head(const Pass& pass, int thread, int num_threads) {
  float* normed = scratch_[thread].row.data();
  const auto normalise = [&](int row) {
    normalise_row(hidden_.data() + size_t(row) * shape.hidden_size, final_norm, normed);
  };
  const bool keeps_features = final_feature_column >= 0 || output_feature_column >= 0;
  const Range rows = keeps_features ? share(pass.num_rows, thread, num_threads) : Range{0, 0};
  for (int row = rows.first; row < rows.last; ++row) {
    normalise(row);
    keep_feature(pass, row, final_feature_column, normed);
    keep_feature(pass, row, output_feature_column, hidden_.data() + size_t(row) * shape.hidden_size);
  }
  if (!pass.num_logits) return;
  const Range asked = share(pass.num_logits, thread, num_threads);
  for (int i = asked.first; i < asked.last; ++i) {
    normalise(pass.logit_rows[i]);
    scatter(normed, 0, shape.hidden_size, packed_row(logit_input_.data(), logit_tiles_, i, shape.hidden_size));
  }
  pool_.barrier();
  multiply(lm_head, share(lm_head.num_blocks, thread, num_threads), logit_tiles_, logit_input_.data(),
           [&](int row, int first, int count, const float* sums) {
             std::copy(sums, sums + count, pass.logits + size_t(row) * shape.vocab_size + first);
           });
}

// A head's layer may lack a norm: the row stays as it is.
void Model::normalise_row(const float* source, const std::vector<float>& norm, float* target) const {
  if (norm.empty()) std::copy(source, source + shape.hidden_size, target);
  else rms_norm(source, norm.data(), shape.hidden_size, shape.norm_eps, target);
}

void Model::keep_feature(const Pass& pass, int row, int column, const float* values) {
  if (column >= 0)
    std::copy(values, values + shape.hidden_size, pass.features + size_t(pass.slots[row]) * pass.feature_width + column);
}

void Model::rotate_and_store(const Pass& pass, int index, int row) {
  const Layer& layer = layers[index];
  const int size = shape.head_dim, half = size / 2, num_rotated = shape.num_heads + shape.num_kv_heads;
  float* heads = qkv_.data() + size_t(row) * (num_rotated + shape.num_kv_heads) * size;
  for (int head = 0; head < num_rotated; ++head) {
    const std::vector<float>& norm = head < shape.num_heads ? layer.query_norm : layer.key_norm;
    if (!norm.empty()) rms_norm(heads + head * size, norm.data(), size, shape.norm_eps, heads + head * size);
    rotate(heads + head * size, pass.cosines + size_t(row) * half, pass.sines + size_t(row) * half, half);
  }
  for (int kind = 0; kind < 2; ++kind)
    for (int head = 0; head < shape.num_kv_heads; ++head) {
      const float* source = heads + (shape.num_heads + kind * shape.num_kv_heads + head) * size;
      const size_t plane = (size_t(index) * 2 + kind) * shape.num_kv_heads + head;
      std::copy(source, source + size, pass.cache + (plane * pass.num_slots + pass.slots[row]) * size);
    }
}

// All query heads of one key head, for one row: keys are scored and values added in order of position.
void Model::attend(const Pass& pass, int index, int row, int kv_head, Scratch& scratch) {
  const int size = shape.head_dim, group = shape.num_heads / shape.num_kv_heads;
  const size_t plane = size_t(pass.num_slots) * size;
  const float* keys = pass.cache + (size_t(index) * 2 * shape.num_kv_heads + kv_head) * plane;
  const float* values = keys + size_t(shape.num_kv_heads) * plane;
  const float* queries =
      qkv_.data() + (size_t(row) * (shape.num_heads + 2 * shape.num_kv_heads) + size_t(kv_head) * group) * size;
  const int count = find_visible(pass, row, layers[index].window, scratch.offsets), padded = round_up(count, kLanes);
  grow(scratch.scores, size_t(group) * padded);
  const PackedRow target = packed_row(attended_.data(), tiles_, row, shape.num_heads * size);

  for (int place = 0; place < count; ++place) {
    const float* key = keys + scratch.offsets[place];
    for (int query = 0; query < group; ++query) {
      f32x16 sum = {};
      for (int i = 0; i < size; i += kLanes) sum = fma16(load16(queries + query * size + i), load16(key + i), sum);
      scratch.scores[size_t(query) * padded + place] = sum_lanes(sum) * shape.score_scale;
    }
  }
  for (int query = 0; query < group; ++query) {
    float* scores = scratch.scores.data() + size_t(query) * padded;
    const float total = softmax_weights(scores, count, padded);
    alignas(64) float sums[kMaxHeadDim];
    for (int i = 0; i < size; i += 4 * kLanes)
      add_values(values + i, scratch.offsets.data(), scores, count, std::min(4, (size - i) / kLanes), total, sums + i);
    scatter(sums, (kv_head * group + query) * size, size, target);
  }
}

// Fill offsets with head_dim × slot of all that a row sees, in order of position; return their number.
int Model::find_visible(const Pass& pass, int row, int window, std::vector<size_t>& offsets) const {
  const int context = pass.context_lens[row], extra = pass.extra_starts[row + 1] - pass.extra_starts[row];
  const int first = window ? std::max(0, context + extra - window) : 0;
  const int32_t* near = pass.context_slots + pass.context_starts[row];
  const int32_t* far = pass.extra_slots + pass.extra_starts[row];
  offsets.clear();
  for (int place = first; place < context; ++place) offsets.push_back(size_t(near[place]) * shape.head_dim);
  for (int place = std::max(0, first - context); place < extra; ++place)
    offsets.push_back(size_t(far[place]) * shape.head_dim);
  return int(offsets.size());
}

// down's input: silu(gate) · up. The blocks of gate and up alternate in gate_up.
void Model::multiply_mlp(const Layer& layer, Range pairs, Scratch& scratch) {
  multiply(layer.gate_up, {2 * pairs.first, 2 * pairs.last}, tiles_, normed_.data(),
           [&](int row, int first, int, const float* sums) {
             float* gates = scratch.gates.data() + size_t(row) * kBlock;
             if (first / kBlock % 2 == 0) {
               std::copy(sums, sums + kBlock, gates);
               return;
             }
             for (int i = 0; i < kBlock; i += kLanes) store16(gates + i, silu16(load16(gates + i)) * load16(sums + i));
             const int output = first / kBlock / 2 * kBlock;
             scatter(gates, output, std::min(kBlock, shape.mlp_size - output),
                     packed_row(activated_.data(), tiles_, row, shape.mlp_size));
           });
}

void Model::add_product(const Linear& w, Range blocks, const std::vector<float>& packed) {
  multiply(w, blocks, tiles_, packed.data(), [&](int row, int first, int count, const float* sums) {
    float* target = hidden_.data() + size_t(row) * shape.hidden_size + first;
    for (int i = 0; i < count; ++i) target[i] += sums[i];
  });
}

}  // namespace native
