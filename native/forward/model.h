// One forward pass of a Llama-like decoder over a ragged batch of token trees.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "forward/attention.h"
#include "forward/pass.h"
#include "forward/pool.h"
#include "forward/product.h"
#include "forward/segments.h"

namespace native {

// The sizes and constants of a decoder. For the fields after score_scale, 0 means that the model has no such thing.
struct Shape {
  int32_t num_layers, hidden_size, num_heads, num_kv_heads, head_dim, mlp_size, vocab_size;
  float norm_eps, score_scale;
  float score_softcap, logit_softcap, embedding_scale;
  int32_t is_gelu;        // the MLP's activation is GELU in its tanh approximation, not SiLU
  int32_t rotary_size;    // how many of a head's first elements are rotated; 0: all
  int32_t rounds_inputs;  // the products are in bfloat16 (Form::pairs)
};

struct Layer {
  Linear qkv, output, gate_up, down;
  // Empty if the model has none. The post norms are applied to what attention or the MLP adds to the rows.
  std::vector<float> input_norm, mlp_norm, qkv_bias, query_norm, key_norm, post_attention_norm, post_mlp_norm;
  int window = 0;           // positions that a row sees, its own included; 0: all
  int rotation = 0;         // which of the pass's rotations the layer applies
  int feature_column = -1;  // the column of its input among the features; -1: it is not kept
};

class Model : private Job {
 public:
  Model(const Shape& shape, std::shared_ptr<Pool> pool);

  // Return what is wrong with a pass, or null; if null, no index is outside its array.
  const char* refusal(const Pass& pass) const;

  // Compute a pass: write the cache, the features and the logits.
  void forward(const Pass& pass);

  const Shape shape;
  std::vector<Layer> layers;
  std::vector<float> final_norm;
  Linear lm_head, embedding;       // (vocab_size, hidden_size); an empty embedding is tied to the LM head
  int final_feature_column = -1;   // of the state after the final norm; -1: it is not kept
  int output_feature_column = -1;  // of the last layer's output
  SegmentRows segment_rows;        // for passes that come as segments
  const std::shared_ptr<Pool> pool;

 private:
  // The phases of a pass; those from enter to down are done for every layer.
  enum class Step { none, enter, qkv, rotate, attend, output, enter_mlp, gate_up, down, leave, lm_head, end };

  // The memory of one thread.
  struct alignas(64) Scratch {
    Attention attention;
    std::vector<float> row, gates;
  };

  int begin() override;
  void work(int piece, int thread) override;
  bool is_by_row() const;
  int count_pieces();
  const Linear& linear() const;  // of the step

  void work_row(int row, Scratch& scratch);
  void enter(int row, float* normed);
  void leave(int row, float* normed);
  const float* add_delta(int row, const std::vector<float>& norm, float* normed);
  void normalise(const float* source, const std::vector<float>& norm, float* target) const;
  void keep_feature(int row, int column, const float* values);
  void rotate_and_store(int row);
  float* keys(int kv_head) const;
  float* values(int kv_head) const;
  void attend(int piece, Attention& attention);
  void multiply_blocks(Range blocks, Scratch& scratch);
  void multiply_mlp(Range blocks, Scratch& scratch);

  // The current pass.
  Pass pass_ = {};
  Layout layout_;
  Tiles tiles_, logit_tiles_;
  Step step_ = Step::none;
  int layer_ = 0, unit_ = 1;  // unit_: rows of a piece
  Split split_;                  // the blocks of a product
  std::vector<float> hidden_;                       // (rows, hidden_size), the residual stream
  std::vector<float> delta_;                        // (rows, hidden_size), what attention or the MLP adds to it
  std::vector<float> qkv_;                          // (rows, query, key and value heads, head_dim)
  std::vector<float> normed_, attended_, activated_, logit_input_;  // packed in tiles
  std::vector<Scratch> scratch_;
};

}  // namespace native
