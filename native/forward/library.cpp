// The C interface of models: a model is created empty, given its weights, and then run. Called from Python
// (library.py). A function that makes an object returns null if it fails. The others that can fail return null, or a
// text that says what is wrong.

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>

#include "guarded.h"
#include "forward/model.h"
#include "forward/segments.h"

using native::guarded;
using native::Layer;
using native::Linear;
using native::Model;
using native::Pass;
using native::SegmentPass;
using native::Shape;

namespace {

// The matrix of a layer, or of the model for layer -1, null for an unknown name.
Linear* find_linear(Model& model, int layer, const std::string& name) {
  if (layer < 0) return name == "lm_head" ? &model.lm_head : name == "embedding" ? &model.embedding : nullptr;
  if (layer >= model.shape.num_layers) return nullptr;
  Layer& own = model.layers[layer];
  if (name == "qkv") return &own.qkv;
  if (name == "output") return &own.output;
  if (name == "gate_up") return &own.gate_up;
  return name == "down" ? &own.down : nullptr;
}

// The vector of a layer, or of the model for layer -1, null for an unknown name.
std::vector<float>* find_vector(Model& model, int layer, const std::string& name) {
  if (layer < 0) return name == "final_norm" ? &model.final_norm : nullptr;
  if (layer >= model.shape.num_layers) return nullptr;
  Layer& own = model.layers[layer];
  if (name == "input_norm") return &own.input_norm;
  if (name == "mlp_norm") return &own.mlp_norm;
  if (name == "qkv_bias") return &own.qkv_bias;
  if (name == "query_norm") return &own.query_norm;
  if (name == "key_norm") return &own.key_norm;
  if (name == "post_attention_norm") return &own.post_attention_norm;
  return name == "post_mlp_norm" ? &own.post_mlp_norm : nullptr;
}

const char* forward(Model& model, const Pass& pass) {
  if (const char* wrong = model.refusal(pass)) return wrong;
  model.forward(pass);
  return nullptr;
}

}  // namespace

extern "C" {

Model* native_new(const Shape* shape, int max_threads) {
  return native::guarded_or<Model*>(
      nullptr, [&] { return new Model(*shape, std::make_shared<native::Pool>(max_threads)); });
}

void native_delete(Model* model) { delete model; }

// Set a matrix (num_outputs, num_inputs) of a layer, or of the model for layer -1.
const char* native_set_linear(Model* model, int layer, const char* name, const float* weight, int num_outputs,
                              int num_inputs) {
  return guarded([&] {
    Linear* own = find_linear(*model, layer, name);
    if (!own) return "there is no such matrix";
    *own = Linear(weight, num_outputs, num_inputs, model->shape.rounds_inputs);
    return static_cast<const char*>(nullptr);
  });
}

// The same for a matrix of quantised blocks, (num_outputs, num_inputs / 32). kind: a native::Quantization.
const char* native_set_quantized(Model* model, int layer, const char* name, int kind, const uint8_t* blocks,
                                 int num_outputs, int num_inputs) {
  return guarded([&] {
    Linear* own = find_linear(*model, layer, name);
    if (!own) return "there is no such matrix";
    const native::Shape& shape = model->shape;
    if (own == &model->layers[std::max(layer, 0)].output && shape.num_heads / shape.num_kv_heads * shape.head_dim % native::kQuants)
      return "the heads of a key head are no whole blocks of 32 numbers";
    const char* wrong = Linear::refusal(kind, blocks, num_outputs, num_inputs);
    if (!wrong) *own = Linear(native::Quantization(kind), blocks, num_outputs, num_inputs);
    return wrong;
  });
}

// Set a vector of a layer, or of the model for layer -1.
const char* native_set_vector(Model* model, int layer, const char* name, const float* values, int count) {
  return guarded([&] {
    std::vector<float>* own = find_vector(*model, layer, name);
    if (!own) return "there is no such vector";
    own->assign(values, values + count);
    return static_cast<const char*>(nullptr);
  });
}

// Set the window of a layer and the feature column of its input; layer -1: the column of the state after the final
// norm.
void native_set_layer(Model* model, int layer, int window, int feature_column) {
  if (layer < 0) {
    model->final_feature_column = feature_column;
    return;
  }
  model->layers[layer].window = window;
  model->layers[layer].feature_column = feature_column;
}

// Add a rotation by (count) frequencies; the first one has the number 0.
const char* native_add_rotation(Model* model, const float* frequencies, int count, float scale) {
  return guarded([&] { return model->segment_rows.rotations.emplace_back(frequencies, count, scale), nullptr; });
}

// Let a layer apply one of the rotations.
void native_set_rotation(Model* model, int layer, int rotation) { model->layers[layer].rotation = rotation; }

// native::move_slots for Python.
const char* native_move(float* cache, int num_planes, int kv_heads, int num_slots, int head_dim,
                        const int32_t* sources, const int32_t* destinations, int count) {
  return guarded([&] {
    native::move_slots(cache, num_planes, kv_heads, num_slots, head_dim, sources, destinations, count);
    return nullptr;
  });
}

// Put a cache that has not been written yet on huge pages.
void native_advise(float* cache, size_t size) { native::advise_huge_pages(cache, size); }

// Run a pass. If the arguments are wrong, nothing was computed.
const char* native_forward(Model* model, const Pass* pass) {
  return guarded([&] { return forward(*model, *pass); });
}

// The same, for a pass over segments.
const char* native_forward_segments(Model* model, const SegmentPass* segments) {
  return guarded([&] {
    const char* wrong = native::SegmentRows::refusal(*segments);
    return wrong ? wrong : forward(*model, model->segment_rows.fill(*segments));
  });
}

}  // extern "C"
