// Attention of a few rows of one sequence over its keys and values in the cache, for the query heads of one key head.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "pass.h"
#include "product.h"

namespace native {

struct AttentionShape {
  int head_dim, group, window;  // group: query heads of a key head; window: keys that a row sees, its own too; 0: all
  float scale, softcap;         // softcap: the bound of the scores; 0: there is none
};

// Queries that are scored together against a key that is read once.
constexpr int kMaxQueries = std::max(1, kMaxSums / 3);

inline int max_tile_rows(int group) { return std::max(1, kMaxQueries / group); }

// Attends; keeps the memory that a thread needs for it.
//
// A score is a sum over the head in order; the softmax sums in lanes that depend on the place alone; values are added in
// order of place. So a row's result depends on what it sees, in order, not on its tile, the tree or the slots.
class Attention {
 public:
  // queries: of the tile's first row, (group, head_dim); those of the next row stand row_stride further.
  // keys, values: of one key head. Returns (count of the tile, group, head_dim), valid until the next call.
  const float* attend(const AttentionShape& shape, const Pass& pass, const Layout& layout, RowTile tile,
                      const float* queries, size_t row_stride, const float* keys, const float* values);

 private:
  // Places that a row sees: begin … end − 1; from context_end on they are extra ones.
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
