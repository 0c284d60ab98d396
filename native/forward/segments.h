// A pass as the engine describes it, by sequences and trees, and the rows that this makes.
#pragma once

#include <cstdint>
#include <vector>

#include "forward/pass.h"

namespace native {

// One sequence's part of a pass: its context tokens first … last − 1, then the nodes of its tree below token last − 1.
struct Segment {
  int32_t first, last, num_nodes, num_blocks;
};

// A pass over segments, whose rows follow one another; every array belongs to the caller.
struct SegmentPass {
  int32_t num_segments, num_rows, num_logits, num_blocks, num_nodes, block_tokens, num_slots, feature_width, num_threads;
  const Segment* segments;
  const int32_t* ids;      // (num_rows)
  const int32_t* blocks;   // (num_blocks), the segments' blocks: position p of a sequence is in its block p / block_tokens
  const int32_t* parents;  // (num_nodes), the parents of nodes 1…m of the segments' trees; 0 is the root
  float *cache, *features;  // as in Pass
  float* logits;            // (num_logits, vocab_size), those of every segment's root and nodes
};

// The rotation of a position: the cosines and sines of position · frequency, times a scale. They depend only on the
// position; the angle is computed in float32, as in transformers.
class Rotation {
 public:
  Rotation(const float* frequencies, int count, float scale) : frequencies_(frequencies, frequencies + count), scale_(scale) {}

  int size() const { return int(frequencies_.size()); }
  void copy(int position, float* cosines, float* sines);

 private:
  std::vector<float> frequencies_;
  float scale_;
  std::vector<float> table_;  // (positions, 2, size)
};

// The rows of a pass over segments; keeps their arrays.
class SegmentRows {
 public:
  // Return what is wrong with the segments, or null; then `fill` may be called.
  static const char* refusal(const SegmentPass& pass);

  // Return the pass; its arrays stay valid until the next call.
  Pass fill(const SegmentPass& pass);

  std::vector<Rotation> rotations;  // one for each kind of layer, all of the same size

 private:
  void add_segment(const SegmentPass& pass, const Segment& segment, const int32_t* blocks, const int32_t* parents);
  void fill_rotations();

  std::vector<int32_t> positions_, slots_, context_starts_, context_lens_, context_slots_, extra_starts_, extra_slots_, logit_rows_;
  std::vector<float> cosines_, sines_;
};

}  // namespace native
