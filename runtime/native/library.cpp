// The C interface: a model is made empty, given its weights, and then run. Called from runtime/native/library.py.

#include <cstddef>
#include <cstring>
#include <new>
#include <string>

#include "model.h"

using native::Layer;
using native::Linear;
using native::Model;
using native::Pass;
using native::Shape;

namespace {

std::vector<float> copy_of(const float* values, int count) { return {values, values + count}; }

}  // namespace

extern "C" {

Model* native_new(const Shape* shape, int max_threads) { return new (std::nothrow) Model(*shape, max_threads); }

void native_delete(Model* model) { delete model; }

// Set a matrix (num_outputs, num_inputs) of a layer, or of the model for layer -1. Returns 0, or 1 for an unknown name.
int native_set_linear(Model* model, int layer, const char* name, const float* weight, int num_outputs, int num_inputs) {
  const std::string key = name;
  Linear packed(weight, num_outputs, num_inputs);
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
  return 1;
}

// Set what a layer sees and keeps; layer -1: where the state after the final norm is kept.
void native_set_layer(Model* model, int layer, int window, int feature_column) {
  if (layer < 0) {
    model->final_feature_column = feature_column;
    return;
  }
  model->layers[layer].window = window;
  model->layers[layer].feature_column = feature_column;
}

// Run a pass. Returns null, or what is wrong with it; then nothing was computed.
const char* native_forward(Model* model, const Pass* pass) {
  if (const char* wrong = model->refusal(*pass)) return wrong;
  model->forward(*pass);
  return nullptr;
}

}  // extern "C"
