// What a pass computes: its rows as they come from the caller, and how the rows of one sequence attend together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pool.h"

namespace native {

// The cache holds keys in tiles of 16 slots: element 0 of all 16 keys, then element 1 of them, and so on.
constexpr int kKeyTile = 16;

constexpr int kMaxPassRows = 4096;

// One pass; every array belongs to the caller.
//
// Row i holds the token ids[i]; its key and value go to slots[i] of the cache. In order of position it sees
// context_lens[i] entries of context_slots from context_starts[i] on, then those of extra_slots from extra_starts[i] to
// extra_starts[i + 1]. Its own slot is the last one that it sees.
struct Pass {
  int32_t num_rows, num_logits, num_context_slots, num_extra_slots, num_slots, feature_width, num_threads;
  const int32_t *ids, *slots, *context_starts, *context_lens, *context_slots, *extra_starts, *extra_slots, *logit_rows;
  const float *cosines, *sines;  // (num_rows, rotated elements of a head / 2), the rotation of each row
  float* cache;     // (layers, 2, kv_heads, num_slots · head_dim): keys in tiles, values (num_slots, head_dim)
  float* features;  // (num_slots, feature_width)
  float* logits;    // (num_logits, vocab_size), of the rows logit_rows
  // For a drafting head, else null: what the rows begin with in place of their embeddings, (num_rows, hidden_size), and
  // what the first layer's attention reads in place of the normed rows, (num_rows, inputs of its qkv).
  const float *inputs, *attention_inputs;
};

// Copy `count` slots of a cache (layers, 2, kv_heads, num_slots · head_dim) to others; all are read before any is
// written. num_planes: layers · kv_heads.
void move_slots(float* cache, int num_planes, int kv_heads, int num_slots, int head_dim, const int32_t* sources,
                const int32_t* destinations, int count);

// Consecutive rows of one sequence that attend together; their contexts have one start.
struct RowTile {
  int32_t sequence, first, count;
};

// Where the scores of a row's keys stand: the keys of a sequence are scored by tiles, and a column is a place in them.
class Layout {
 public:
  // Return what is wrong with the indices of a pass, or null. None of a pass without refusal leaves its array.
  static const char* refusal(const Pass& pass, int vocab_size);

  // Lay out a pass that has no refusal, in tiles of at most max_tile_rows rows.
  void fill(const Pass& pass, int max_tile_rows);

  struct Sequence {
    size_t first_key_tile, first_column;  // of its entries in key_tiles and columns
    int num_key_tiles;
    bool is_in_order;  // the column of each place in the context is the place itself
  };

  std::vector<RowTile> tiles;
  std::vector<Sequence> sequences;
  std::vector<int32_t> key_tiles;      // tiles of the cache that a sequence's rows read, the context's first
  std::vector<int32_t> columns;        // of each entry of the context
  std::vector<int32_t> extra_columns;  // of each entry of Pass::extra_slots
  std::vector<int32_t> logit_of_row;   // −1: no logits are asked for

 private:
  int32_t column_of(int32_t slot);

  std::vector<int32_t> tile_numbers_;  // of each tile of the cache, its number in the sequence under work, or −1
};

}  // namespace native
