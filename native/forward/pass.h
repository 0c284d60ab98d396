// What a pass computes: its rows as the caller gives them, and how the rows of one sequence attend together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "forward/pool.h"

namespace native {

// The cache holds keys in tiles of 16 slots: element 0 of all 16 keys, then element 1 of them, and so on.
constexpr int kKeyTile = 16;

constexpr int kMaxPassRows = 4096;

// One pass; every array belongs to the caller.
//
// Row i holds the token ids[i]; its key and value go to slots[i] of the cache. In order of position, it sees
// context_lens[i] entries of context_slots from context_starts[i] on, then the entries of extra_slots from
// extra_starts[i] up to extra_starts[i + 1]. Its own slot is the last one that it sees.
struct Pass {
  int32_t num_rows, num_logits, num_context_slots, num_extra_slots, num_slots, feature_width, num_threads;
  const int32_t *ids, *slots, *context_starts, *context_lens, *context_slots, *extra_starts, *extra_slots, *logit_rows;
  const float *cosines, *sines;  // (num_rows, rotated elements of a head / 2), the rotation of each row
  float* cache;     // (layers, 2, kv_heads, num_slots · head_dim): keys in tiles, values (num_slots, head_dim)
  float* features;  // (num_slots, feature_width)
  float* logits;    // (num_logits, vocab_size), those of the rows logit_rows
  // Only for a drafting head, otherwise null: what the rows start from instead of embeddings, (num_rows, hidden_size),
  // and what the first layer's attention reads instead of the normed rows, (num_rows, inputs of its qkv).
  const float *inputs, *attention_inputs;
};

// Copy `count` slots of a cache (layers, 2, kv_heads, num_slots · head_dim) to others; all are read before any is
// written. num_planes: layers · kv_heads.
void move_slots(float* cache, int num_planes, int kv_heads, int num_slots, int head_dim, const int32_t* sources,
                const int32_t* destinations, int count);

// The slot of the index-th token of a sequence with these blocks.
inline int slot_of(const int32_t* blocks, int block_tokens, int index) {
  return blocks[index / block_tokens] * block_tokens + index % block_tokens;
}

// Consecutive rows of one sequence that attend together; their contexts begin at the same place.
struct RowTile {
  int32_t sequence, first, count;
};

// Where the scores of a row's keys are: a sequence's keys are scored tile by tile, and a column is a place in its
// tiles.
class Layout {
 public:
  // Return what is wrong with the indices of a pass, or null; if null, none is outside its array.
  static const char* refusal(const Pass& pass, int vocab_size);

  // Lay out a pass that has no refusal, in tiles of at most max_tile_rows rows.
  void fill(const Pass& pass, int max_tile_rows);

  struct Sequence {
    size_t first_key_tile, first_column;  // where its entries in key_tiles and columns begin
    int num_key_tiles;
    bool is_in_order;  // each place of the context is its own column
  };

  std::vector<RowTile> tiles;
  std::vector<Sequence> sequences;
  std::vector<int32_t> key_tiles;      // the tiles of the cache that each sequence's rows read, the context's first
  std::vector<int32_t> columns;        // the column of each place of the contexts
  std::vector<int32_t> extra_columns;  // the column of each entry of Pass::extra_slots
  std::vector<int32_t> logit_of_row;   // the index of each row's logits; −1: none are wanted

 private:
  int32_t column_of(int32_t slot);

  std::vector<int32_t> tile_numbers_;  // the number of each tile of the cache within the current sequence, or −1
};

}  // namespace native
