#include "forward/model.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace native {

namespace {

// One thread finishes this many rows before another would have woken up.
constexpr int kFewRows = 6;
constexpr int kRowsOfPiece = 4;

// Rotate the halves of a head: (a, b) → (a cos − b sin, b cos + a sin).
void rotate(float* head, const float* cosines, const float* sines, int half) {
  for (int i = 0; i < half; ++i) {
    const float a = head[i], b = head[i + half];
    head[i] = a * cosines[i] - b * sines[i];
    head[i + half] = b * cosines[i] + a * sines[i];
  }
}

void softcap(float* values, int count, float bound) {
  for (int first = 0; first < count; first += kLanes) {
    const int part = std::min(kLanes, count - first);
    float lane[kLanes] = {};
    std::copy(values + first, values + first + part, lane);
    store16(lane, bound * tanh16(load16(lane) / bound));
    std::copy(lane, lane + part, values + first);
  }
}


}  // namespace

Model::Model(const Shape& shape, std::shared_ptr<Pool> pool)
    : shape(shape), layers(shape.num_layers), pool(std::move(pool)), scratch_(this->pool->size()) {}

const char* Model::refusal(const Pass& p) const {
  if (p.num_threads < 1 || p.num_threads > pool->size()) return "num_threads is above the pool's";
  if (const char* wrong = Layout::refusal(p, shape.vocab_size)) return wrong;
  const int last = std::max(final_feature_column, output_feature_column);
  const int needed = std::accumulate(layers.begin(), layers.end(), last, [](int most, const Layer& layer) {
    return std::max(most, layer.feature_column);
  });
  if (needed >= 0 && (!p.features || p.feature_width < needed + shape.hidden_size)) return "features: too narrow";
  return nullptr;
}

void Model::forward(const Pass& pass) {
  const size_t rows = pass.num_rows, width = shape.hidden_size;
  pass_ = pass;
  layout_.fill(pass, max_tile_rows(shape.num_heads / shape.num_kv_heads));
  tiles_ = Tiles(pass.num_rows);
  logit_tiles_ = Tiles(pass.num_logits);
  grow(hidden_, rows * width);
  grow(delta_, rows * width);
  grow(normed_, rows * std::max(shape.hidden_size, layers[0].qkv.num_inputs));
  grow(qkv_, rows * (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim);
  grow(attended_, rows * shape.num_heads * shape.head_dim);
  grow(activated_, rows * shape.mlp_size);
  grow(logit_input_, size_t(pass.num_logits) * width);
  for (Scratch& scratch : scratch_) grow(scratch.row, width), grow(scratch.gates, rows * kBlock);
  layer_ = 0;
  step_ = Step::none;
  pool->run(pass.num_threads, *this);
}

int Model::begin() {
  for (;;) {
    if (step_ == Step::down && ++layer_ < shape.num_layers) step_ = Step::enter;
    else step_ = Step(int(step_) + 1);
    if (step_ == Step::end || (step_ == Step::lm_head && !pass_.num_logits)) return 0;
    if (!is_by_row() || pass_.num_rows > kFewRows) return count_pieces();
    for (int row = 0; row < pass_.num_rows; ++row) work_row(row, scratch_[0]);
  }
}

bool Model::is_by_row() const {
  return step_ == Step::enter || step_ == Step::rotate || step_ == Step::enter_mlp || step_ == Step::leave;
}

int Model::count_pieces() {
  unit_ = 1;
  int count = int(layout_.tiles.size()) * shape.num_kv_heads;
  if (is_by_row()) {
    unit_ = kRowsOfPiece, count = pass_.num_rows;
  } else if (step_ != Step::attend) {
    const int pair = step_ == Step::gate_up ? 2 : 1;  // a gate and its up
    split_ = Split(linear().num_blocks, pair, pass_.num_threads);
    return split_.num_pieces;
  }
  return (count + unit_ - 1) / unit_;
}

const Linear& Model::linear() const {
  if (step_ == Step::lm_head) return lm_head;
  const Layer& layer = layers[layer_];
  return step_ == Step::qkv ? layer.qkv : step_ == Step::output ? layer.output : step_ == Step::gate_up ? layer.gate_up : layer.down;
}

void Model::work(int piece, int thread) {
  Scratch& scratch = scratch_[thread];
  const int first = piece * unit_;
  if (step_ == Step::attend) {
    attend(piece, scratch.attention);
  } else if (is_by_row()) {
    for (int row = first; row < std::min(first + unit_, pass_.num_rows); ++row) work_row(row, scratch);
  } else {
    multiply_blocks(split_.range(piece), scratch);
  }
}

void Model::work_row(int row, Scratch& scratch) {
  if (step_ == Step::rotate) rotate_and_store(row);
  else if (step_ == Step::leave) leave(row, scratch.row.data());
  else enter(row, scratch.row.data());
}

// Bring the residual stream up to date and pack what the next product reads.
void Model::enter(int row, float* normed) {
  const Layer& layer = layers[layer_];
  float* hidden = hidden_.data() + size_t(row) * shape.hidden_size;
  if (step_ == Step::enter && layer_ == 0) {
    if (pass_.inputs) std::copy_n(pass_.inputs + size_t(row) * shape.hidden_size, shape.hidden_size, hidden);
    else (embedding.num_outputs ? embedding : lm_head).row(pass_.ids[row], hidden);
    if (shape.embedding_scale != 0.0f)
      for (int i = 0; i < shape.hidden_size; ++i) hidden[i] *= shape.embedding_scale;
  } else {
    add_delta(row, step_ == Step::enter ? layers[layer_ - 1].post_mlp_norm : layer.post_attention_norm, normed);
  }
  if (step_ == Step::enter) keep_feature(row, layer.feature_column, hidden);
  if (step_ == Step::enter && layer_ == 0 && pass_.attention_inputs) {
    const int size = layer.qkv.num_inputs;
    pack(pass_.attention_inputs + size_t(row) * size, 0, size, packed_row(normed_.data(), tiles_, row, layer.qkv));
    return;
  }
  normalise(hidden, step_ == Step::enter ? layer.input_norm : layer.mlp_norm, normed);
  const Linear& next = step_ == Step::enter ? layer.qkv : layer.gate_up;
  pack(normed, 0, shape.hidden_size, packed_row(normed_.data(), tiles_, row, next));
}

void Model::leave(int row, float* normed) {
  const float* hidden = add_delta(row, layers.back().post_mlp_norm, normed);
  keep_feature(row, output_feature_column, hidden);
  const int logits = layout_.logit_of_row[row];
  if (logits < 0 && final_feature_column < 0) return;
  normalise(hidden, final_norm, normed);
  keep_feature(row, final_feature_column, normed);
  if (logits >= 0) pack(normed, 0, shape.hidden_size, packed_row(logit_input_.data(), logit_tiles_, logits, lm_head));
}

const float* Model::add_delta(int row, const std::vector<float>& norm, float* normed) {
  float* hidden = hidden_.data() + size_t(row) * shape.hidden_size;
  const float* delta = delta_.data() + size_t(row) * shape.hidden_size;
  if (!norm.empty()) normalise(delta, norm, normed), delta = normed;
  for (int i = 0; i < shape.hidden_size; i += kLanes) store16(hidden + i, load16(hidden + i) + load16(delta + i));
  return hidden;
}

// A drafting head's layer may lack a norm; the row is then copied.
void Model::normalise(const float* source, const std::vector<float>& norm, float* target) const {
  if (norm.empty()) std::copy(source, source + shape.hidden_size, target);
  else rms_norm(source, norm.data(), shape.hidden_size, shape.norm_eps, target);
}

void Model::keep_feature(int row, int column, const float* values) {
  if (column >= 0)
    std::copy(values, values + shape.hidden_size, pass_.features + size_t(pass_.slots[row]) * pass_.feature_width + column);
}

void Model::rotate_and_store(int row) {
  const Layer& layer = layers[layer_];
  const int size = shape.head_dim, half = (shape.rotary_size ? shape.rotary_size : size) / 2, num_rotated = shape.num_heads + shape.num_kv_heads;
  const size_t angles = (size_t(layer.rotation) * pass_.num_rows + row) * half;
  float* heads = qkv_.data() + size_t(row) * (num_rotated + shape.num_kv_heads) * size;
  for (int head = 0; head < num_rotated; ++head) {
    const std::vector<float>& norm = head < shape.num_heads ? layer.query_norm : layer.key_norm;
    if (!norm.empty()) rms_norm(heads + head * size, norm.data(), size, shape.norm_eps, heads + head * size);
    rotate(heads + head * size, pass_.cosines + angles, pass_.sines + angles, half);
  }
  const int slot = pass_.slots[row];
  for (int head = 0; head < shape.num_kv_heads; ++head) {
    const float *key = heads + (shape.num_heads + head) * size, *value = key + shape.num_kv_heads * size;
    float* tile = keys(head) + size_t(slot / kKeyTile) * kKeyTile * size + slot % kKeyTile;
    for (int i = 0; i < size; ++i) tile[size_t(i) * kKeyTile] = key[i];
    std::copy(value, value + size, values(head) + size_t(slot) * size);
  }
}

float* Model::keys(int kv_head) const {
  return pass_.cache + (size_t(layer_) * 2 * shape.num_kv_heads + kv_head) * pass_.num_slots * shape.head_dim;
}

float* Model::values(int kv_head) const {
  return keys(kv_head) + size_t(shape.num_kv_heads) * pass_.num_slots * shape.head_dim;
}

// Pieces are ordered by head, so that a thread keeps working on the keys that it has just read.
void Model::attend(int piece, Attention& attention) {
  const int num_tiles = int(layout_.tiles.size()), kv_head = piece / num_tiles;
  const RowTile tile = layout_.tiles[piece % num_tiles];
  const AttentionShape form = {shape.head_dim, shape.num_heads / shape.num_kv_heads, layers[layer_].window,
                               shape.score_scale, shape.score_softcap};
  const size_t row_stride = size_t(shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim;
  const int size = form.group * shape.head_dim;
  const float* queries = qkv_.data() + tile.first * row_stride + size_t(kv_head) * size;
  const float* outputs = attention.attend(form, pass_, layout_, tile, queries, row_stride, keys(kv_head), values(kv_head));
  for (int i = 0; i < tile.count; ++i)
    pack(outputs + size_t(i) * size, kv_head * size, size,
         packed_row(attended_.data(), tiles_, tile.first + i, layers[layer_].output));
}

void Model::multiply_blocks(Range blocks, Scratch& scratch) {
  const Linear& w = linear();
  const size_t width = w.num_outputs;
  if (step_ == Step::qkv) {
    const std::vector<float>& bias = layers[layer_].qkv_bias;
    multiply(w, blocks, tiles_, normed_.data(), [&](int row, int first, int count, const float* sums) {
      float* target = qkv_.data() + row * width + first;
      if (bias.empty()) std::copy(sums, sums + count, target);
      else for (int i = 0; i < count; ++i) target[i] = sums[i] + bias[first + i];
    });
  } else if (step_ == Step::gate_up) {
    multiply_mlp(blocks, scratch);
  } else if (step_ == Step::lm_head) {
    multiply(w, blocks, logit_tiles_, logit_input_.data(), [&](int row, int first, int count, const float* sums) {
      float* target = pass_.logits + row * width + first;
      std::copy(sums, sums + count, target);
      if (shape.logit_softcap > 0.0f) softcap(target, count, shape.logit_softcap);
    });
  } else {
    const std::vector<float>& input = step_ == Step::output ? attended_ : activated_;
    multiply(w, blocks, tiles_, input.data(), [&](int row, int first, int count, const float* sums) {
      std::copy(sums, sums + count, delta_.data() + row * width + first);
    });
  }
}

// down's input: activation(gate) · up. The blocks of gate and up alternate in gate_up.
void Model::multiply_mlp(Range blocks, Scratch& scratch) {
  multiply(layers[layer_].gate_up, blocks, tiles_, normed_.data(), [&](int row, int first, int, const float* sums) {
    float* gates = scratch.gates.data() + size_t(row) * kBlock;
    if (first / kBlock % 2 == 0) {
      std::copy(sums, sums + kBlock, gates);
      return;
    }
    for (int i = 0; i < kBlock; i += kLanes) {
      const f32x16 gate = load16(gates + i);
      store16(gates + i, (shape.is_gelu ? gelu16(gate) : silu16(gate)) * load16(sums + i));
    }
    const int output = first / kBlock / 2 * kBlock;
    pack(gates, output, std::min(kBlock, shape.mlp_size - output),
         packed_row(activated_.data(), tiles_, row, layers[layer_].down));
  });
}

}  // namespace native
