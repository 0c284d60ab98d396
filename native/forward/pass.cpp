#include "forward/pass.h"

#include <algorithm>

namespace native {

namespace {

bool all_below(const int32_t* values, int count, int limit) {
  return std::all_of(values, values + count, [limit](int32_t value) { return 0 <= value && value < limit; });
}

}  // namespace

void move_slots(float* cache, int num_planes, int kv_heads, int num_slots, int head_dim, const int32_t* sources,
                const int32_t* destinations, int count) {
  std::vector<float> held(size_t(count) * head_dim);
  const size_t plane_size = size_t(num_slots) * head_dim;
  for (int plane = 0; plane < 2 * num_planes; ++plane) {
    float* base = cache + plane * plane_size;
    const bool is_keys = plane / kv_heads % 2 == 0;
    const size_t step = is_keys ? kKeyTile : 1;
    const auto at = [&](int slot) {
      return base + (is_keys ? size_t(slot / kKeyTile) * kKeyTile * head_dim + slot % kKeyTile
                             : size_t(slot) * head_dim);
    };
    for (int i = 0; i < count; ++i)
      for (int k = 0; k < head_dim; ++k) held[size_t(i) * head_dim + k] = at(sources[i])[k * step];
    for (int i = 0; i < count; ++i)
      for (int k = 0; k < head_dim; ++k) at(destinations[i])[k * step] = held[size_t(i) * head_dim + k];
  }
}

const char* Layout::refusal(const Pass& p, int vocab_size) {
  if (p.num_rows < 1 || p.num_rows > kMaxPassRows || p.num_logits < 0) return "num_rows: not in 1..4096";
  if (p.num_slots < 1 || p.num_slots % kKeyTile) return "num_slots: not a multiple of 16";
  if (p.num_logits > p.num_rows) return "num_logits: more than rows";
  if (!p.inputs && !all_below(p.ids, p.num_rows, vocab_size)) return "ids: a token outside the vocabulary";
  if (!all_below(p.slots, p.num_rows, p.num_slots)) return "slots: a slot outside the cache";
  if (!all_below(p.logit_rows, p.num_logits, p.num_rows)) return "logit_rows: no such row";
  if (!all_below(p.context_slots, p.num_context_slots, p.num_slots)) return "context_slots: a slot outside the cache";
  if (!all_below(p.extra_slots, p.num_extra_slots, p.num_slots)) return "extra_slots: a slot outside the cache";
  if (p.extra_starts[0] != 0 || p.extra_starts[p.num_rows] != p.num_extra_slots) return "extra_starts: wrong ends";
  for (int row = 0; row < p.num_rows; ++row) {
    const int64_t start = p.context_starts[row], length = p.context_lens[row];
    if (start < 0 || length < 0 || start + length > p.num_context_slots) return "context_starts: beyond context_slots";
    if (p.extra_starts[row] > p.extra_starts[row + 1]) return "extra_starts: not ascending";
    if (length + p.extra_starts[row + 1] - p.extra_starts[row] < 1) return "a row must see its own slot";
  }
  return nullptr;
}

void Layout::fill(const Pass& pass, int max_tile_rows) {
  tiles.clear(), sequences.clear(), key_tiles.clear(), columns.clear();
  extra_columns.resize(pass.num_extra_slots);
  tile_numbers_.resize(pass.num_slots / kKeyTile, -1);
  logit_of_row.assign(pass.num_rows, -1);
  for (int i = 0; i < pass.num_logits; ++i) logit_of_row[pass.logit_rows[i]] = i;
  for (int first = 0, last; first < pass.num_rows; first = last) {
    const int start = pass.context_starts[first];
    int length = 0;
    for (last = first; last < pass.num_rows && pass.context_starts[last] == start; ++last)
      length = std::max(length, pass.context_lens[last]);
    sequences.push_back({key_tiles.size(), columns.size(), 0, true});
    Sequence& sequence = sequences.back();
    for (int place = 0; place < length; ++place) {
      columns.push_back(column_of(pass.context_slots[start + place]));
      sequence.is_in_order &= columns.back() == place;
    }
    for (int i = pass.extra_starts[first]; i < pass.extra_starts[last]; ++i)
      extra_columns[i] = column_of(pass.extra_slots[i]);
    sequence.num_key_tiles = int(key_tiles.size() - sequence.first_key_tile);
    for (size_t i = sequence.first_key_tile; i < key_tiles.size(); ++i) tile_numbers_[key_tiles[i]] = -1;
    const int count = last - first, parts = (count + max_tile_rows - 1) / max_tile_rows;
    for (int part = 0; part < parts; ++part) {
      const Range range = share(count, part, parts);
      tiles.push_back({int32_t(sequences.size()) - 1, first + range.first, range.last - range.first});
    }
  }
}

int32_t Layout::column_of(int32_t slot) {
  int32_t& number = tile_numbers_[slot / kKeyTile];
  if (number < 0) {
    number = int32_t(key_tiles.size() - sequences.back().first_key_tile);
    key_tiles.push_back(slot / kKeyTile);
  }
  return number * kKeyTile + slot % kKeyTile;
}

}  // namespace native
