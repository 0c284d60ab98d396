#include "forward/attention.h"

#include <utility>

namespace native {

namespace {

constexpr float kUnseen = -1e30f;

// scores[query][16 · Tiles] of tiles of keys, each (head_dim, 16); queries: (head_dim, Queries).
template <int Queries, int Tiles>
void score_tiles(const float* const* tiles, const float* queries, int head_dim, float* scores, size_t stride) {
  f32x16 sum[Queries][Tiles] = {};
  for (int i = 0; i < head_dim; ++i) {
    f32x16 key[Tiles];
#pragma GCC unroll 8
    for (int tile = 0; tile < Tiles; ++tile) key[tile] = load16(tiles[tile] + size_t(i) * kKeyTile);
#pragma GCC unroll 8
    for (int query = 0; query < Queries; ++query) {
      const f32x16 value = splat(queries[size_t(i) * Queries + query]);
#pragma GCC unroll 8
      for (int tile = 0; tile < Tiles; ++tile) sum[query][tile] = fma16(value, key[tile], sum[query][tile]);
    }
  }
  for (int query = 0; query < Queries; ++query)
    for (int tile = 0; tile < Tiles; ++tile) store16(scores + query * stride + tile * kKeyTile, sum[query][tile]);
}

// How many tiles of keys are scored at once: enough independent sums to hide the latency of an addition.
constexpr int kMaxTiles = 8;
constexpr int tiles_at_once(int queries) { return std::min(kMaxTiles, kMaxSums / queries); }

using ScoreTiles = void (*)(const float* const*, const float*, int, float*, size_t);

template <bool Several, int... Query>
ScoreTiles choose_score(int queries, std::integer_sequence<int, Query...>) {
  static constexpr ScoreTiles table[] = {score_tiles<Query + 1, Several ? tiles_at_once(Query + 1) : 1>...};
  return table[queries - 1];
}

// sums[query][16 · Vectors] += Σ weight · value, in the order of the slots; the queries' sums are head_dim apart.
template <int Queries, int Vectors>
void add_values(const float* values, const int32_t* slots, int count, int head_dim, const float* weights, size_t stride,
                float* sums) {
  f32x16 sum[Queries][Vectors];
  for (int query = 0; query < Queries; ++query)
    for (int i = 0; i < Vectors; ++i) sum[query][i] = load16(sums + size_t(query) * head_dim + i * kLanes);
  for (int place = 0; place < count; ++place) {
    const float* value = values + size_t(slots[place]) * head_dim;
    f32x16 element[Vectors];
#pragma GCC unroll 4
    for (int i = 0; i < Vectors; ++i) element[i] = load16(value + i * kLanes);
#pragma GCC unroll 4
    for (int query = 0; query < Queries; ++query) {
      const f32x16 weight = splat(weights[query * stride + place]);
#pragma GCC unroll 4
      for (int i = 0; i < Vectors; ++i) sum[query][i] = fma16(weight, element[i], sum[query][i]);
    }
  }
  for (int query = 0; query < Queries; ++query)
    for (int i = 0; i < Vectors; ++i) store16(sums + size_t(query) * head_dim + i * kLanes, sum[query][i]);
}

constexpr int kMaxVectors = 4;
constexpr int kQueriesAtOnce = std::max(1, kMaxSums / 6);  // times 4 vectors

using AddValues = void (*)(const float*, const int32_t*, int, int, const float*, size_t, float*);

template <int Queries>
AddValues choose_vectors(int vectors) {
  static constexpr AddValues table[] = {add_values<Queries, 1>, add_values<Queries, 2>, add_values<Queries, 3>,
                                        add_values<Queries, 4>};
  return table[vectors - 1];
}

template <int... Query>
AddValues choose_add(int queries, int vectors, std::integer_sequence<int, Query...>) {
  static constexpr AddValues (*table[])(int) = {choose_vectors<Query + 1>...};
  return table[queries - 1](vectors);
}


}  // namespace

Attention::Seen Attention::seen_by(const AttentionShape& shape, const Pass& pass, const Layout& layout, int row) const {
  const int first_extra = pass.extra_starts[row];
  const int context = pass.context_lens[row], end = context + pass.extra_starts[row + 1] - first_extra;
  return {shape.window ? std::max(0, end - shape.window) : 0, context, end, pass.extra_slots + first_extra,
          layout.extra_columns.data() + first_extra};
}

const float* Attention::attend(const AttentionShape& shape, const Pass& pass, const Layout& layout, RowTile tile,
                               const float* queries, size_t row_stride, const float* keys, const float* values) {
  const Layout::Sequence& sequence = layout.sequences[tile.sequence];
  const int num_queries = tile.count * shape.group, head_dim = shape.head_dim;
  int begin = 0, least_begin = INT32_MAX, common_end = INT32_MAX, most_end = 0;
  bool has_extra = false;
  seen_.clear();
  for (int row = tile.first; row < tile.first + tile.count; ++row) {
    const Seen seen = seen_by(shape, pass, layout, row);
    begin = std::max(begin, seen.begin);
    least_begin = std::min(least_begin, seen.begin);
    common_end = std::min(common_end, seen.context_end);
    most_end = std::max(most_end, seen.end);
    has_extra |= seen.end > seen.context_end;
    seen_.push_back(seen);
  }
  // Without extra places, the first rows of a prompt read few of the tiles; with a window, no row reads the oldest
  // ones.
  const bool is_in_order = sequence.is_in_order;
  const int first_tile = is_in_order ? least_begin / kKeyTile : 0;
  const int last_tile = is_in_order && !has_extra ? (most_end + kKeyTile - 1) / kKeyTile : sequence.num_key_tiles;
  const int num_places = std::max(last_tile * kKeyTile, (most_end + kLanes - 1) / kLanes * kLanes);
  stride_ = size_t(num_places) + kLanes;  // with a power of 2, rows would compete for the same cache lines
  grow(scores_, num_queries * stride_);
  score(shape, layout.key_tiles.data() + sequence.first_key_tile, first_tile, last_tile, num_queries, queries, row_stride,
        keys);
  grow(totals_, num_queries);
  if (!is_in_order) grow(ordered_, num_queries * stride_);
  weights_ = is_in_order ? scores_.data() : ordered_.data();
  for (int query = 0; query < num_queries; ++query) {
    const Seen& seen = seen_[query / shape.group];
    totals_[query] = softmax(seen, shape.softcap, order(seen, layout, sequence, query));
  }

  // Every row's values in order of place: those before the places that all rows see, then these, then the rest.
  grow(sums_, size_t(num_queries) * head_dim);
  std::fill_n(sums_.data(), size_t(num_queries) * head_dim, 0.0f);
  const int32_t* slots = pass.context_slots + pass.context_starts[tile.first];
  if (begin >= common_end) begin = common_end = -1;
  for (int i = 0; i < tile.count && begin >= 0; ++i)
    add(head_dim, values, slots + seen_[i].begin, seen_[i].begin, begin - seen_[i].begin, i * shape.group, shape.group);
  if (begin >= 0) add(head_dim, values, slots + begin, begin, common_end - begin, 0, num_queries);
  for (int i = 0; i < tile.count; ++i) {
    const Seen& seen = seen_[i];
    const int first = begin >= 0 ? common_end : seen.begin, first_extra = std::max(seen.begin, seen.context_end);
    add(head_dim, values, slots + first, first, seen.context_end - first, i * shape.group, shape.group);
    add(head_dim, values, seen.extra_slots + first_extra - seen.context_end, first_extra, seen.end - first_extra,
        i * shape.group, shape.group);
  }
  for (int query = 0; query < num_queries; ++query) {
    float* sum = sums_.data() + size_t(query) * head_dim;
    for (int i = 0; i < head_dim; i += kLanes) store16(sum + i, load16(sum + i) / totals_[query]);
  }
  return sums_.data();
}

// Fill the columns of the sequence's tiles of keys from `first` to `last` − 1.
void Attention::score(const AttentionShape& shape, const int32_t* key_tiles, int first, int last, int num_queries,
                      const float* queries, size_t row_stride, const float* keys) {
  const size_t tile_size = size_t(kKeyTile) * shape.head_dim;
  grow(packed_queries_, size_t(kMaxQueries) * shape.head_dim);
  for (int done = 0; done < num_queries; done += kMaxQueries) {
    const int count = std::min(kMaxQueries, num_queries - done);
    for (int query = 0; query < count; ++query) {
      const int row = (done + query) / shape.group, head = (done + query) % shape.group;
      const float* source = queries + row * row_stride + size_t(head) * shape.head_dim;
      for (int i = 0; i < shape.head_dim; ++i) packed_queries_[size_t(i) * count + query] = source[i] * shape.scale;
    }
    constexpr auto all = std::make_integer_sequence<int, kMaxQueries>{};
    const int step = last - first >= tiles_at_once(count) ? tiles_at_once(count) : 1;
    const ScoreTiles kernel = step > 1 ? choose_score<true>(count, all) : choose_score<false>(count, all);
    for (int tile = first; tile < last; tile += step) {
      tile = std::min(tile, last - step);  // score some tiles twice rather than the last ones one by one
      const float* tiles[kMaxTiles];
      for (int i = 0; i < step; ++i) tiles[i] = keys + key_tiles[tile + i] * tile_size;
      kernel(tiles, packed_queries_.data(), shape.head_dim, scores_.data() + done * stride_ + tile * kKeyTile, stride_);
    }
  }
}

// Reorder a query's scores from columns to places; return them.
float* Attention::order(const Seen& seen, const Layout& layout, const Layout::Sequence& sequence, int query) {
  const float* scores = scores_.data() + query * stride_;
  float* target = weights_ + query * stride_;
  if (!sequence.is_in_order)
    for (int place = seen.begin; place < seen.context_end; ++place)
      target[place] = scores[layout.columns[sequence.first_column + place]];
  const int num_extra = seen.end - seen.context_end;
  extra_.resize(num_extra);  // a copy, since the column of one place may be the place of another
  for (int i = 0; i < num_extra; ++i) extra_[i] = scores[seen.extra_columns[i]];
  std::copy(extra_.begin(), extra_.end(), target + seen.context_end);
  return target;
}

// Turn scores into weights exp(score − largest), 0 where nothing is seen; return their sum, taken in 16 fixed lanes.
float Attention::softmax(const Seen& seen, float softcap, float* scores) const {
  const int first = seen.begin / kLanes * kLanes, last = (seen.end + kLanes - 1) / kLanes * kLanes;
  std::fill(scores + first, scores + seen.begin, kUnseen);
  std::fill(scores + seen.end, scores + last, kUnseen);
  if (softcap > 0.0f)
    for (int i = first; i < last; i += kLanes) store16(scores + i, softcap * tanh16(load16(scores + i) / softcap));
  f32x16 largest = load16(scores + first), total = {};
  for (int i = first + kLanes; i < last; i += kLanes) largest = max16(largest, load16(scores + i));
  const f32x16 shift = splat(max_lanes(largest));
  for (int i = first; i < last; i += kLanes) store16(scores + i, exp16(load16(scores + i) - shift));
  std::fill(scores + first, scores + seen.begin, 0.0f);
  std::fill(scores + seen.end, scores + last, 0.0f);
  for (int i = first; i < last; i += kLanes) total += load16(scores + i);
  return sum_lanes(total);
}

// Add the values of `count` slots, which hold the places from `place` on, to the sums of num_queries queries.
void Attention::add(int head_dim, const float* values, const int32_t* slots, int place, int count, int first_query,
                    int num_queries) {
  if (count <= 0) return;
  constexpr auto all = std::make_integer_sequence<int, kQueriesAtOnce>{};
  for (int done = 0; done < num_queries; done += kQueriesAtOnce) {
    const int queries = std::min(kQueriesAtOnce, num_queries - done), query = first_query + done;
    for (int i = 0; i < head_dim; i += kMaxVectors * kLanes) {
      const int vectors = std::min(kMaxVectors, (head_dim - i) / kLanes);
      choose_add(queries, vectors, all)(values + i, slots, count, head_dim, weights_ + query * stride_ + place, stride_,
                                        sums_.data() + size_t(query) * head_dim + i);
    }
  }
}

}  // namespace native
