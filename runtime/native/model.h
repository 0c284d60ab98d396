// One forward pass of a Llama-like decoder over a ragged batch of token trees.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pool.h"
#include "product.h"

namespace native {

// The sizes and constants of a decoder.
struct Shape {
  int32_t num_layers, hidden_size, num_heads, num_kv_heads, head_dim, mlp_size, vocab_size;
  float norm_eps, score_scale;
};

// One pass; every array belongs to the caller.
//
// Row i holds the token ids[i]; its key and value go to slots[i] of the cache. In order of position it sees
// context_lens[i] entries of context_slots from context_starts[i] on, then those of extra_slots from extra_starts[i] to
// extra_starts[i + 1]. Its own slot is the last one that it sees.
struct Pass {
  int32_t num_rows, num_logits, num_context_slots, num_extra_slots, num_slots, feature_width, num_threads;
  const int32_t *ids, *slots, *context_starts, *context_lens, *context_slots, *extra_starts, *extra_slots, *logit_rows;
  const float *cosines, *sines;  // (num_rows, head_dim / 2), the rotation of each row
  float* cache;                  // (layers, 2, kv_heads, num_slots, head_dim)
  float* features;               // (num_slots, feature_width)
  float* logits;                 // (num_logits, vocab_size), of the rows logit_rows
  // For a drafting head, else null: what the rows begin with in place of their embeddings, (num_rows, hidden_size), and
  // what the first layer's attention reads in place of the normed rows, (num_rows, inputs of its qkv).
  const float *inputs, *attention_inputs;
};

struct Layer {
  Linear qkv, output, gate_up, down;
  std::vector<float> input_norm, mlp_norm, qkv_bias, query_norm, key_norm;  // empty: the model does not have it
  int window = 0;           // positions that a row sees, its own included; 0: all
  int feature_column = -1;  // where its input stands among the features; -1: it is not kept
};

class Model {
 public:
  Model(const Shape& shape, int max_threads);

  // Return what is wrong with a pass, or null. No index of a pass that has no refusal leaves its array.
  const char* refusal(const Pass& pass) const;

  // Compute the pass: writes cache, features and logits.
  void forward(const Pass& pass);

  const Shape shape;
  std::vector<Layer> layers;
  std::vector<float> embedding, final_norm;
  Linear lm_head;
  int final_feature_column = -1;   // of the state after the final norm; -1: it is not kept
  int output_feature_column = -1;  // of the last layer's output

 private:
  // What one thread needs for itself.
  struct Scratch {
    std::vector<float> row, scores, gates;
    std::vector<size_t> offsets;
  };

  void run(const Pass& pass, int thread, int num_threads);
  void run_layer(const Pass& pass, int index, int thread, int num_threads);
  void run_head(const Pass& pass, int thread, int num_threads);
  void rotate_and_store(const Pass& pass, int index, int row);
  void attend(const Pass& pass, int index, int row, int kv_head, Scratch& scratch);
  int find_visible(const Pass& pass, int row, int window, std::vector<size_t>& offsets) const;
  void normalise_row(const float* source, const std::vector<float>& norm, float* target) const;
  void keep_feature(const Pass& pass, int row, int column, const float* values);
  void multiply_mlp(const Layer& layer, Range pairs, Scratch& scratch);
  void add_product(const Linear& w, Range blocks, const std::vector<float>& packed);

  Pool pool_;
  Tiles tiles_, logit_tiles_;
  std::vector<float> hidden_;                       // (rows, hidden_size), the residual stream
  std::vector<float> qkv_;                          // (rows, heads and key and value heads, head_dim)
  std::vector<float> normed_, attended_, activated_, logit_input_;  // packed in tiles
  std::vector<Scratch> scratch_;
};

}  // namespace native
