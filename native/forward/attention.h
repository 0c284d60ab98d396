// Attention of a few rows of one sequence to its keys and values in the cache, for the query heads of one key head.
#pragma once

#include <algorithm>
#include <vector>

#include "forward/kernels.h"
#include "forward/pass.h"
#include "forward/product.h"

namespace native {

struct AttentionShape {
  int head_dim, group, window;  // group: query heads of a key head; window: keys that a row sees, with its own; 0: all
  float scale, softcap;         // softcap: the bound of the scores; 0: no bound
};

// How many queries are scored each time a key is read.
constexpr int kMaxQueries = std::max(1, kMaxSums / 3);

inline int max_tile_rows(int group) { return std::max(1, kMaxQueries / group); }

// Computes attention, in memory that each thread needs for itself.
//
// A score is summed over the head's elements in order; the softmax sums in lanes that depend only on the place; values
// are added in order of place. So a row's result depends on what it sees, in order, not on its tile, the tree or the
// slots.
class Attention {
 public:
  // queries: (group, head_dim) of the tile's first row; those of the next row begin row_stride numbers later.
  // keys, values: those of one key head. Returns (rows of the tile, group, head_dim), valid until the next call.
  const float* attend(const AttentionShape& shape, const Pass& pass, const Layout& layout, RowTile tile,
                      const float* queries, size_t row_stride, const float* keys, const float* values);

 private:
  // The places that a row sees: begin … end − 1; those from context_end on are extra slots.
  struct Seen {
    int begin, context_end, end;
    const int32_t *extra_slots, *extra_columns;
  };

  Seen seen_by(const AttentionShape& shape, const Pass& pass, const Layout& layout, int row) const;
  void score(const AttentionShape& shape, const int32_t* key_tiles, int first, int last, int num_queries,
             const float* queries, size_t row_stride, const float* keys);
  float* order(const Seen& seen, const Layout& layout, const Layout::Sequence& sequence, int query);
  float softmax(const Seen& seen, float softcap, float* scores) const;
  void add(int head_dim, const float* values, const int32_t* slots, int place, int count, int first_query,
           int num_queries);

  size_t stride_ = 0;  // between the scores of two queries
  std::vector<Seen> seen_;
  std::vector<float> packed_queries_, scores_, ordered_, extra_, sums_, totals_;
  float* weights_ = nullptr;  // scores_ or ordered_, by place
};

}  // namespace native
