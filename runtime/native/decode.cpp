// Decoding without returning to the caller: a pass over the trees of all sequences, its decision, the next trees.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include "../../orchestrator/native/drafts.h"
#include "../../orchestrator/native/rules.h"
#include "model.h"

using native::Model;
using native::Pass;
using native::SegmentPass;
using native::SegmentRows;

namespace native {

// Decides `count` steps over a vocabulary; returns what is wrong, or null. The function of orchestrator/native/sampling.cpp.
using Verify = const char* (*)(sampling::Request*, size_t count, size_t vocab_size, int num_threads);

// How a sequence is drafted for. growth: null: not at all. tokens_left: most tokens that it may still get; no step begins
// for a sequence that may get none. max_depth: most levels of a tree.
struct Drafter {
  void* growth;
  drafts::Costs costs;
  int32_t max_nodes, max_depth, tokens_left;
};

// Up to num_steps steps for every segment of a pass. No further pass begins after limit_us, nor once `interrupt` is set.
// The trees of the first pass are the caller's; those that are grown here are written to node_…, one after another, and
// the paths of all steps to `paths`. Both have room for num_steps times all drafters' max_nodes and the first trees.
struct Decoding {
  int32_t num_steps, limit_us, max_logits;  // max_logits: rows of the pass's logits
  const volatile int32_t* interrupt;
  sampling::Request* requests;  // (num_segments), how each sequence is sampled; all about its rows is filled in here
  Verify verify;
  drafts::Next next;
  const Drafter* drafters;     // (num_segments)
  const int32_t* num_threads;  // (14), of a pass by the bits of its number of rows
  int32_t *num_nodes, *path_lens, *next_tokens;  // (num_steps, num_segments), written
  int32_t *node_tokens, *node_parents, *node_names, *paths;  // written
  int32_t* times_us;  // (num_steps, 3), written: what each pass took, its decision, and the growth of the next trees
  int32_t num_made;   // written: how many steps were made
};

namespace {

using Clock = std::chrono::steady_clock;

int32_t us_between(Clock::time_point from, Clock::time_point to) {
  return int32_t(std::chrono::duration_cast<std::chrono::microseconds>(to - from).count());
}

int bits_of(int number) {
  int bits = 0;
  for (; number; number >>= 1) ++bits;
  return bits;
}

const char* refusal(const Model& model, const SegmentPass& pass, const Decoding& decoding) {
  if (decoding.num_steps < 1) return "num_steps: below 1";
  if (pass.num_rows != pass.num_segments + pass.num_nodes) return "segments: not one row each before their trees";
  int64_t num_rows = pass.num_segments;
  for (int i = 0; i < pass.num_segments; ++i) {
    const Drafter& drafter = decoding.drafters[i];
    if (drafter.tokens_left < 1) return "tokens_left: below 1";
    if (drafter.max_nodes < 0 || drafter.max_depth < 0) return "max_nodes, max_depth: below 0";
    num_rows += drafter.max_nodes;
  }
  const int64_t most = std::max<int64_t>(num_rows, pass.num_rows);
  if (most > std::min(decoding.max_logits, kMaxPassRows)) return "max_logits: fewer than the rows of a pass";
  return model.shape.vocab_size < 1 ? "the model has no vocabulary" : nullptr;
}

// The steps of one call.
class Steps {
 public:
  Steps(Model& model, const SegmentPass& first, Decoding& decoding)
      : model_(model), pass_(first), decoding_(decoding), count_(first.num_segments),
        segments_(first.segments, first.segments + count_), committed_(count_) {
    for (int i = 0; i < count_; ++i) tokens_left_.push_back(decoding.drafters[i].tokens_left);
    pass_.segments = segments_.data();
  }

  // Make the next step and grow the trees of the one after it; return what is wrong, or null.
  const char* make() {
    const auto began = Clock::now();
    pass_.num_threads = decoding_.num_threads[bits_of(pass_.num_rows)];
    const Pass pass = model_.segment_rows.fill(pass_);
    if (const char* wrong = model_.refusal(pass)) return wrong;
    model_.forward(pass);
    const auto computed = Clock::now();
    if (const char* wrong = verify()) return wrong;
    settle();
    const auto settled = Clock::now();
    const int step = decoding_.num_made++;
    is_over_ = is_over_ || decoding_.num_made == decoding_.num_steps || *decoding_.interrupt ||
               us_between(began_, settled) >= decoding_.limit_us;
    grow();
    int32_t* times_us = decoding_.times_us + 3 * step;
    times_us[0] = us_between(began, computed);
    times_us[1] = us_between(computed, settled);
    times_us[2] = us_between(settled, Clock::now());
    return nullptr;
  }

  bool is_over() const { return is_over_; }

 private:
  const char* verify() {
    const int32_t *tokens = pass_.ids, *parents = pass_.parents;
    const float* logits = pass_.logits;
    int32_t* path = paths_.data();
    for (int i = 0; i < count_; ++i) {
      sampling::Request& request = decoding_.requests[i];
      const int32_t num_nodes = segments_[i].num_nodes;
      request.logits = logits, request.parents = parents, request.tokens = tokens + 1, request.path = path;
      request.prefix_len = segments_[i].last, request.num_nodes = num_nodes;
      logits += size_t(num_nodes + 1) * model_.shape.vocab_size;
      tokens += num_nodes + 1, parents += num_nodes, path += num_nodes;
    }
    return decoding_.verify(decoding_.requests, size_t(count_), size_t(model_.shape.vocab_size), 1);
  }

  // Commit what is accepted: write it, and move keys, values and features of the paths behind those of the roots.
  void settle() {
    const size_t at = size_t(decoding_.num_made) * count_;
    const int32_t* blocks = pass_.blocks;
    std::vector<int32_t> sources, destinations;
    for (int i = 0; i < count_; ++i) {
      const sampling::Request& request = decoding_.requests[i];
      Segment& segment = segments_[i];
      decoding_.num_nodes[at + i] = segment.num_nodes;
      decoding_.path_lens[at + i] = request.path_len;
      decoding_.next_tokens[at + i] = request.next_token;
      committed_[i].clear();
      const auto slot = [&](int place) {
        return blocks[place / pass_.block_tokens] * pass_.block_tokens + place % pass_.block_tokens;
      };
      for (int level = 0; level < request.path_len; ++level) {
        const int32_t node = request.path[level];
        *path_out_++ = node;
        committed_[i].push_back(request.tokens[node - 1]);
        if (node == level + 1) continue;
        sources.push_back(slot(segment.last + node - 1)), destinations.push_back(slot(segment.last + level));
      }
      committed_[i].push_back(request.next_token);
      tokens_left_[i] -= request.path_len + 1;
      segment.first = segment.last + request.path_len, segment.last = segment.first + 1;
      is_over_ |= tokens_left_[i] <= 0 || segment.last > num_slots(segment);
      blocks += segment.num_blocks;
    }
    if (!sources.empty()) move(sources, destinations);
  }

  void move(const std::vector<int32_t>& sources, const std::vector<int32_t>& destinations) {
    const Shape& shape = model_.shape;
    move_slots(pass_.cache, shape.num_layers * shape.num_kv_heads, shape.num_kv_heads, pass_.num_slots, shape.head_dim,
               sources.data(), destinations.data(), int(sources.size()));
    const size_t width = size_t(pass_.feature_width);
    // The nodes of a path ascend, so that no feature is overwritten before it is read.
    for (size_t i = 0; width && i < sources.size(); ++i)
      std::copy_n(pass_.features + sources[i] * width, width, pass_.features + destinations[i] * width);
  }

  // Grow the trees of the next pass; those behind the last one are empty, but their sequences learn.
  void grow() {
    ids_.clear(), parents_.clear();
    pass_.num_nodes = 0;
    for (int i = 0; i < count_; ++i) {
      const Drafter& drafter = decoding_.drafters[i];
      Segment& segment = segments_[i];
      ids_.push_back(committed_[i].back());
      segment.num_nodes = drafter.growth ? grow(drafter, segment, i) : 0;
      pass_.num_nodes += segment.num_nodes;
    }
    pass_.num_rows = pass_.num_logits = count_ + pass_.num_nodes;
    pass_.ids = ids_.data(), pass_.parents = parents_.data();
    paths_.resize(size_t(pass_.num_nodes));
  }

  int grow(const Drafter& drafter, const Segment& segment, int i) {
    const int max_nodes = is_over_ ? 0 : std::min(drafter.max_nodes, num_slots(segment) - segment.last);
    const int max_depth = std::min(drafter.max_depth, tokens_left_[i] - 1);
    chances_.resize(size_t(drafter.max_nodes) + 1);
    const drafts::Tree tree{tokens_out_, parents_out_, names_out_, chances_.data()};
    const int size = decoding_.next(drafter.growth, committed_[i].data(), committed_[i].size(), max_nodes,
                                    std::max(max_depth, 0), &drafter.costs, &tree);
    ids_.insert(ids_.end(), tokens_out_, tokens_out_ + size);
    parents_.insert(parents_.end(), parents_out_, parents_out_ + size);
    tokens_out_ += size, parents_out_ += size, names_out_ += size;
    return size;
  }

  int num_slots(const Segment& segment) const { return segment.num_blocks * pass_.block_tokens; }

  Model& model_;
  SegmentPass pass_;
  Decoding& decoding_;
  const int count_;
  const Clock::time_point began_ = Clock::now();
  std::vector<Segment> segments_;
  std::vector<std::vector<int32_t>> committed_;  // by each sequence's last step
  std::vector<int32_t> tokens_left_, ids_, parents_;
  std::vector<int32_t> paths_ = std::vector<int32_t>(size_t(pass_.num_nodes));
  std::vector<double> chances_;
  int32_t *tokens_out_ = decoding_.node_tokens, *parents_out_ = decoding_.node_parents,
          *names_out_ = decoding_.node_names, *path_out_ = decoding_.paths;
  bool is_over_ = false;
};

}  // namespace
}  // namespace native

extern "C" {

// Make the steps; the pass has one row of each segment before its tree. Returns null, or what is wrong with the
// arguments; then the steps before num_made are sound.
const char* native_decode(Model* model, const SegmentPass* first, native::Decoding* decoding) {
  decoding->num_made = 0;
  if (const char* wrong = SegmentRows::refusal(*first)) return wrong;
  if (const char* wrong = native::refusal(*model, *first, *decoding)) return wrong;
  const native::Pool::Awake awake(*model->pool, first->num_threads);
  native::Steps steps(*model, *first, *decoding);
  while (!steps.is_over())
    if (const char* wrong = steps.make()) return wrong;
  return nullptr;
}

}  // extern "C"
