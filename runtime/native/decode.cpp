// Plain decoding: passes of one row for every sequence, one after another, without returning to the caller.

#include <chrono>
#include <cstdint>
#include <vector>

#include "../../orchestrator/native/rules.h"
#include "model.h"

using native::Model;
using native::Pass;
using native::Segment;
using native::SegmentPass;
using native::SegmentRows;

namespace native {

// Decides `count` rows over a vocabulary; returns what is wrong, or null. The function of orchestrator/native/sampling.cpp.
using Verify = const char* (*)(sampling::Request*, size_t count, size_t vocab_size, int num_threads);

// Up to num_steps tokens for every segment of a pass. No further pass begins after limit_us, nor once `interrupt` is set.
struct Decoding {
  int32_t num_steps, limit_us;
  const volatile int32_t* interrupt;
  sampling::Request* requests;  // (num_segments), how each sequence is sampled; logits and prefix_len are filled in here
  Verify verify;
  int32_t* tokens;    // (num_steps, num_segments), written
  int32_t* times_us;  // (num_steps, 2), written: what each pass took, and the decision of its tokens
  int32_t num_made;   // written: how many steps were made
};

namespace {

using Clock = std::chrono::steady_clock;

int32_t us_between(Clock::time_point from, Clock::time_point to) {
  return int32_t(std::chrono::duration_cast<std::chrono::microseconds>(to - from).count());
}

const char* refusal(const Model& model, const SegmentPass& pass, const Decoding& decoding) {
  if (decoding.num_steps < 1) return "num_steps: below 1";
  if (pass.num_rows != pass.num_segments || pass.num_nodes) return "segments: not one row each";
  for (int i = 0; i < pass.num_segments; ++i) {
    const Segment& segment = pass.segments[i];
    if (int64_t(segment.last) + decoding.num_steps - 1 > int64_t(segment.num_blocks) * pass.block_tokens)
      return "num_steps: beyond the segment's blocks";
  }
  return model.shape.vocab_size < 1 ? "the model has no vocabulary" : nullptr;
}

}  // namespace
}  // namespace native

extern "C" {

// Make the steps; logits holds those of the last pass. Returns null, or what is wrong with the arguments; then the steps
// before num_made are sound.
const char* native_decode(Model* model, const SegmentPass* first, native::Decoding* decoding) {
  decoding->num_made = 0;
  if (const char* wrong = SegmentRows::refusal(*first)) return wrong;
  if (const char* wrong = native::refusal(*model, *first, *decoding)) return wrong;
  const int count = first->num_segments, vocab_size = model->shape.vocab_size;
  std::vector<Segment> segments(first->segments, first->segments + count);
  SegmentPass next = *first;
  next.segments = segments.data();
  const native::Pool::Awake awake(*model->pool, first->num_threads);
  const auto began = native::Clock::now();
  for (auto since = began;;) {
    const Pass pass = model->segment_rows.fill(next);
    if (const char* wrong = model->refusal(pass)) return wrong;
    model->forward(pass);
    const auto computed = native::Clock::now();
    for (int i = 0; i < count; ++i) {
      decoding->requests[i].logits = first->logits + size_t(i) * vocab_size;
      decoding->requests[i].prefix_len = segments[i].last;
    }
    if (const char* wrong = decoding->verify(decoding->requests, size_t(count), size_t(vocab_size), 1)) return wrong;
    const int step = decoding->num_made++;
    int32_t* tokens = decoding->tokens + size_t(step) * count;
    for (int i = 0; i < count; ++i) {
      tokens[i] = decoding->requests[i].next_token;
      segments[i].first = segments[i].last++;
    }
    next.ids = tokens;
    const auto now = native::Clock::now();
    decoding->times_us[2 * step] = native::us_between(since, computed);
    decoding->times_us[2 * step + 1] = native::us_between(computed, now);
    since = now;
    const bool is_over = decoding->num_made == decoding->num_steps || *decoding->interrupt;
    if (is_over || native::us_between(began, now) >= decoding->limit_us) return nullptr;
  }
}

}  // extern "C"
