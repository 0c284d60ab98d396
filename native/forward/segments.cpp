#include "forward/segments.h"

#include <algorithm>
#include <cmath>

namespace native {

namespace {

constexpr int kMaxPositions = 1 << 24;  // larger positions are not all exact in float32

const char* segment_refusal(const SegmentPass& p, const Segment& s, const int32_t* parents) {
  if (s.first < 0 || s.first >= s.last || s.last + int64_t(s.num_nodes) > kMaxPositions) return "segments: no tokens";
  if (s.num_blocks < 1 || int64_t(s.num_blocks) * p.block_tokens < int64_t(s.last) + s.num_nodes)
    return "segments: more tokens than slots";
  for (int node = 0; node < s.num_nodes; ++node)
    if (parents[node] < 0 || parents[node] > node) return "parents: a parent that does not come before its child";
  return nullptr;
}

}  // namespace

void Rotation::copy(int position, float* cosines, float* sines) {
  const size_t n = frequencies_.size();
  for (size_t next = table_.size() / (2 * n); next <= size_t(position); ++next)
    for (int is_sine = 0; is_sine < 2; ++is_sine)
      for (size_t i = 0; i < n; ++i) {
        const double angle = float(next) * frequencies_[i];
        table_.push_back(float((is_sine ? std::sin(angle) : std::cos(angle)) * scale_));
      }
  const float* entry = table_.data() + size_t(position) * 2 * n;
  std::copy(entry, entry + n, cosines);
  std::copy(entry + n, entry + 2 * n, sines);
}

const char* SegmentRows::refusal(const SegmentPass& p) {
  if (p.num_segments < 1 || p.block_tokens < 1 || p.num_slots < 1) return "a pass needs segments and slots";
  const int num_blocks = p.num_slots / p.block_tokens;
  for (int i = 0; i < p.num_blocks; ++i)
    if (p.blocks[i] < 0 || p.blocks[i] >= num_blocks) return "blocks: a block outside the cache";
  int64_t rows = 0, nodes = 0, blocks = 0;
  for (int i = 0; i < p.num_segments; ++i) {
    const Segment& segment = p.segments[i];
    if (segment.num_nodes < 0 || nodes + segment.num_nodes > p.num_nodes) return "segments: more nodes than parents";
    if (const char* wrong = segment_refusal(p, segment, p.parents + nodes)) return wrong;
    rows += segment.last - segment.first + segment.num_nodes;
    nodes += segment.num_nodes;
    blocks += segment.num_blocks;
  }
  if (rows != p.num_rows) return "segments: another number of rows than ids";
  if (nodes != p.num_nodes || blocks != p.num_blocks) return "segments: another number of nodes or blocks";
  if (p.num_logits != p.num_nodes + p.num_segments) return "num_logits: not that of roots and nodes";
  return nullptr;
}

Pass SegmentRows::fill(const SegmentPass& p) {
  for (auto* array : {&positions_, &slots_, &context_starts_, &context_lens_, &context_slots_, &extra_slots_, &logit_rows_})
    array->clear();
  extra_starts_.assign(1, 0);
  const int32_t *blocks = p.blocks, *parents = p.parents;
  for (int i = 0; i < p.num_segments; ++i) {
    add_segment(p, p.segments[i], blocks, parents);
    blocks += p.segments[i].num_blocks;
    parents += p.segments[i].num_nodes;
  }
  fill_rotations();
  return {p.num_rows, p.num_logits, int32_t(context_slots_.size()), int32_t(extra_slots_.size()), p.num_slots,
          p.feature_width, p.num_threads, p.ids, slots_.data(), context_starts_.data(), context_lens_.data(),
          context_slots_.data(), extra_starts_.data(), extra_slots_.data(), logit_rows_.data(), cosines_.data(),
          sines_.data(), p.cache, p.features, p.logits, nullptr, nullptr};
}

// A row sees its context, then its ancestors. Node numbers ascend along a path, so both are in order of position.
void SegmentRows::add_segment(const SegmentPass& p, const Segment& segment, const int32_t* blocks, const int32_t* parents) {
  const int32_t start = int32_t(context_slots_.size());
  const auto slot = [&](int place) { return slot_of(blocks, p.block_tokens, place); };
  for (int place = 0; place < segment.last; ++place) context_slots_.push_back(slot(place));
  for (int position = segment.first; position < segment.last; ++position) {
    positions_.push_back(position);
    slots_.push_back(context_slots_[start + position]);
    context_starts_.push_back(start);
    context_lens_.push_back(position + 1);
    extra_starts_.push_back(int32_t(extra_slots_.size()));
  }
  const size_t root = positions_.size() - 1;
  logit_rows_.push_back(int32_t(root));
  for (int node = 0; node < segment.num_nodes; ++node) {
    const size_t parent = root + parents[node];
    positions_.push_back(positions_[parent] + 1);
    slots_.push_back(slot(segment.last + node));
    context_starts_.push_back(start);
    context_lens_.push_back(segment.last);
    for (int i = extra_starts_[parent]; i < extra_starts_[parent + 1]; ++i) extra_slots_.push_back(extra_slots_[i]);
    extra_slots_.push_back(slots_.back());
    extra_starts_.push_back(int32_t(extra_slots_.size()));
    logit_rows_.push_back(int32_t(positions_.size()) - 1);
  }
}

void SegmentRows::fill_rotations() {
  const size_t num_rows = positions_.size(), size = rotations.empty() ? 0 : rotations[0].size();
  cosines_.resize(rotations.size() * num_rows * size);
  sines_.resize(cosines_.size());
  for (size_t kind = 0; kind < rotations.size(); ++kind)
    for (size_t row = 0; row < num_rows; ++row) {
      const size_t at = (kind * num_rows + row) * size;
      rotations[kind].copy(positions_[row], cosines_.data() + at, sines_.data() + at);
    }
}

}  // namespace native
