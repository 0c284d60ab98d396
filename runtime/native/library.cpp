// The C interface of models: a model is created empty, given its weights, and then run. Called from Python
// (library.py).

#include <cstddef>
#include <cstring>
#include <new>
#include <string>

#include "model.h"
#include "segments.h"

using native::Form;
using native::Layer;
using native::Linear;
using native::Model;
using native::Pass;
using native::SegmentPass;
using native::Shape;

namespace {

std::vector<float> copy_of(const float* values, int count) { return {values, values + count}; }

}  // namespace

extern "C" {

Model* native_new(const Shape* shape, int max_threads) {
  return new (std::nothrow) Model(*shape, std::make_shared<native::Pool>(max_threads));
}

void native_delete(Model* model) { delete model; }

// Set a matrix (num_outputs, num_inputs) of a layer, or of the model for layer -1. Returns 0, or 1 for an unknown name.
int native_set_linear(Model* model, int layer, const char* name, const float* weight, int num_outputs, int num_inputs) {
  const std::string key = name;
  Linear packed(weight, num_outputs, num_inputs, model->shape.rounds_inputs);
  if (layer < 0 && key == "lm_head") return model->lm_head = std::move(packed), 0;
  if (layer < 0 || layer >= model->shape.num_layers) return 1;
  Layer& own = model->layers[layer];
  if (key == "qkv") return own.qkv = std::move(packed), 0;
  if (key == "output") return own.output = std::move(packed), 0;
  if (key == "gate_up") return own.gate_up = std::move(packed), 0;
  if (key == "down") return own.down = std::move(packed), 0;
  return 1;
}

// Set a vector of a layer, or of the model for layer -1. Returns 0, or 1 for an unknown name.
int native_set_vector(Model* model, int layer, const char* name, const float* values, int count) {
  const std::string key = name;
  if (layer < 0 && key == "embedding") return model->embedding = copy_of(values, count), 0;
  if (layer < 0 && key == "final_norm") return model->final_norm = copy_of(values, count), 0;
  if (layer < 0 || layer >= model->shape.num_layers) return 1;
  Layer& own = model->layers[layer];
  if (key == "input_norm") return own.input_norm = copy_of(values, count), 0;
  if (key == "mlp_norm") return own.mlp_norm = copy_of(values, count), 0;
  if (key == "qkv_bias") return own.qkv_bias = copy_of(values, count), 0;
  if (key == "query_norm") return own.query_norm = copy_of(values, count), 0;
  if (key == "key_norm") return own.key_norm = copy_of(values, count), 0;
  if (key == "post_attention_norm") return own.post_attention_norm = copy_of(values, count), 0;
  if (key == "post_mlp_norm") return own.post_mlp_norm = copy_of(values, count), 0;
  return 1;
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

// Add a rotation by (count) frequencies; returns its number.
int native_add_rotation(Model* model, const float* frequencies, int count, float scale) {
  model->segment_rows.rotations.emplace_back(frequencies, count, scale);
  return int(model->segment_rows.rotations.size()) - 1;
}

// Let a layer apply one of the rotations.
void native_set_rotation(Model* model, int layer, int rotation) { model->layers[layer].rotation = rotation; }

// native::move_slots for Python.
void native_move(float* cache, int num_planes, int kv_heads, int num_slots, int head_dim, const int32_t* sources,
                 const int32_t* destinations, int count) {
  native::move_slots(cache, num_planes, kv_heads, num_slots, head_dim, sources, destinations, count);
}

// Put a cache that has not been written yet on huge pages.
void native_advise(float* cache, size_t size) { native::advise_huge_pages(cache, size); }

// Return 1 when all weights are kept as bfloat16.
int native_is_bfloat16(const Model* model) {
  bool all = model->lm_head.form != Form::float32;
  for (const Layer& layer : model->layers)
    for (const Linear* own : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down})
      all = all && own->form != Form::float32;
  return all;
}

// Run a pass. Returns null, or what is wrong with it; nothing was computed then.
const char* native_forward(Model* model, const Pass* pass) {
  if (const char* wrong = model->refusal(*pass)) return wrong;
  model->forward(*pass);
  return nullptr;
}

// The same, for a pass over segments.
const char* native_forward_segments(Model* model, const SegmentPass* segments) {
  if (const char* wrong = native::SegmentRows::refusal(*segments)) return wrong;
  const Pass pass = model->segment_rows.fill(*segments);
  return native_forward(model, &pass);
}

}  // extern "C"
