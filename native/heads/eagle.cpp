#include "heads/eagle.h"

#include <algorithm>

namespace native {

namespace {

int slot_of(const Drafting& d, const DraftCall& c, int index) {
  return native::slot_of(d.blocks + c.first_block, d.block_tokens, index);
}

bool holds_row(const DraftCall& c, int index) { return index >= 1 && !(c.gap_start <= index && index < c.gap_stop); }

}  // namespace

Eagle::Eagle(const Shape& shape, int feature_width, int vocab_size, bool fuses, bool reads_token, int max_threads)
    : Head(shape.hidden_size, feature_width, vocab_size, max_threads), layer(shape, pool_), fuses_(fuses),
      reads_token_(reads_token) {
  layer.output_feature_column = 0;
}

void Eagle::keep_normed_outputs() {
  layer.output_feature_column = -1;
  layer.final_feature_column = 0;
}

const char* Eagle::refusal(const Drafting& d) const {
  if (!feature_norm.empty() && (feature_norm.size() != size_t(feature_width) || num_feature_norms < 1 ||
                                feature_width % num_feature_norms))
    return "feature_norm: not of the features' width";
  if (linears.size() != 1 || embedding.size() != size_t(vocab_size) * hidden_size) return "the head lacks weights";
  if (d.block_tokens < 1 || d.num_slots < 1) return "block_tokens: there are no slots";
  for (int i = 0; i < d.num_blocks; ++i)
    if (d.blocks[i] < 0 || (int64_t(d.blocks[i]) + 1) * d.block_tokens > d.num_slots)
      return "blocks: a block outside the cache";
  if (const char* wrong = Head::refusal(d)) return wrong;
  for (int call = 0; call < d.num_calls; ++call)
    if (const char* wrong = refusal_of(d, d.calls[call])) return wrong;
  return nullptr;
}

// A call needs slots for its context and for each candidate that it may expand.
const char* Eagle::refusal_of(const Drafting& d, const DraftCall& c) const {
  const int64_t num_expanded = c.num_choices ? c.num_choices : int64_t(c.width) * (c.max_depth - 1);
  if (!is_within(c.first_block, c.num_blocks, d.num_blocks)) return "first_block: beyond the blocks";
  if (c.first_slot < 1 || int64_t(c.first_slot) + c.num_rows != c.position) return "first_slot: not the context's end";
  if (c.position + num_expanded > int64_t(c.num_blocks) * d.block_tokens) return "num_blocks: too few for the draft";
  if (c.position + c.max_depth > d.num_positions) return "position: beyond the rotations";
  if (holds_row(c, int(c.position) - 1)) return nullptr;
  return "gap_stop: the newest row is missing";
}

void Eagle::Rows::add(int32_t token, int64_t position, int slot, int context_start, int context_len,
                      const float* state) {
  tokens.push_back(token);
  positions.push_back(int32_t(position));
  slots.push_back(slot);
  context_starts.push_back(context_start);
  context_lens.push_back(context_len);
  states.push_back(state);
  extra_starts.push_back(int32_t(extra_slots.size()));
}

// Row j of the context is made of token j and the feature of position j − 1; it has slot j and position j − 1.
void Eagle::begin(const Drafting& d, const Drafts& drafts) {
  context_slots_.clear();
  context_starts_.clear();
  context_lens_.clear();
  Rows rows;
  for (Draft* draft : drafts) {
    const DraftCall& c = draft->call;
    const int start = int(context_slots_.size());
    for (int index = 1; index < c.position; ++index) {
      if (!holds_row(c, index)) continue;
      context_slots_.push_back(slot_of(d, c, index));
      const int row = c.first_row + index - c.first_slot;
      if (index >= c.first_slot)
        rows.add(d.tokens[row], index - 1, context_slots_.back(), start, int(context_slots_.size()) - start,
                 d.features + size_t(row) * feature_width);
    }
    context_starts_.push_back(start);
    context_lens_.push_back(int(context_slots_.size()) - start);
    rows.logit_rows.push_back(rows.count() - 1);
    draft->states[0] = context_slots_.back();
  }
  if (fuses_) {
    std::vector<float> features(size_t(rows.count()) * feature_width);
    const int part = feature_width / num_feature_norms;
    for (int row = 0; row < rows.count(); ++row) {
      float* target = features.data() + size_t(row) * feature_width;
      if (feature_norm.empty()) std::copy(rows.states[row], rows.states[row] + feature_width, target);
      else
        for (int start = 0; start < feature_width; start += part)
          rms_norm(rows.states[row] + start, feature_norm.data() + start, part, layer.shape.norm_eps, target + start);
    }
    fused_.resize(size_t(rows.count()) * hidden_size);
    multiply_rows(linears[0], rows.count(), features.data(), fused_.data());
    for (int row = 0; row < rows.count(); ++row) rows.states[row] = fused_.data() + size_t(row) * hidden_size;
  }
  forward(d, rows);
}

void Eagle::advance(const Drafting& d, const Drafts& drafts) {
  Rows rows;
  for (Draft* draft : drafts) {
    const GrowingTree& tree = draft->tree;
    for (const int node : tree.frontier) {
      const GrowingTree::Candidate& candidate = tree.candidates[node];
      draft->states[node] = slot_of(d, draft->call, int(draft->call.position) + draft->num_read++);
      const auto path_start = rows.extra_slots.size();
      for (int ancestor = node; ancestor; ancestor = tree.candidates[ancestor].parent)
        rows.extra_slots.push_back(draft->states[ancestor]);
      std::reverse(rows.extra_slots.begin() + path_start, rows.extra_slots.end());
      rows.logit_rows.push_back(rows.count());
      rows.add(candidate.token, draft->call.position - 2 + candidate.depth, draft->states[node],
               context_starts_[draft->number], context_lens_[draft->number],
               d.states + size_t(draft->states[candidate.parent]) * hidden_size);
    }
  }
  forward(d, rows);
}

void Eagle::forward(const Drafting& d, const Rows& rows) {
  compute_inputs(rows);
  copy_rotations(d, rows);
  logits_.resize(rows.logit_rows.size() * layer.shape.vocab_size);
  Pass pass = {};
  pass.num_rows = rows.count();
  pass.num_logits = int(rows.logit_rows.size());
  pass.num_context_slots = int(context_slots_.size());
  pass.num_extra_slots = int(rows.extra_slots.size());
  pass.num_slots = d.num_slots;
  pass.feature_width = hidden_size;
  pass.num_threads = d.num_threads;
  pass.slots = rows.slots.data();
  pass.context_starts = rows.context_starts.data();
  pass.context_lens = rows.context_lens.data();
  pass.context_slots = context_slots_.data();
  pass.extra_starts = rows.extra_starts.data();
  pass.extra_slots = rows.extra_slots.data();
  pass.logit_rows = rows.logit_rows.data();
  pass.cosines = cosines_.data();
  pass.sines = sines_.data();
  pass.cache = d.cache;
  pass.features = d.states;
  pass.logits = logits_.data();
  pass.inputs = inputs_.data();
  pass.attention_inputs = fuses_ ? both_.data() : nullptr;
  layer.forward(pass);
}

// Fill inputs_, which the layer reads, and both_, which is cat(embedding, state), normed for EAGLE-3.
void Eagle::compute_inputs(const Rows& rows) {
  const size_t d = hidden_size, count = rows.count();
  both_.resize(count * 2 * d);
  inputs_.resize(count * d);
  for (size_t row = 0; row < count; ++row) {
    const float *embedded = embedding_of(rows.tokens[row]), *state = rows.states[row];
    float* both = both_.data() + row * 2 * d;
    if (fuses_) {
      rms_norm(embedded, input_norm.data(), int(d), layer.shape.norm_eps, both);
      rms_norm(state, hidden_norm.data(), int(d), layer.shape.norm_eps, both + d);
      const float* residual = norms_residual ? both + d : state;
      std::copy(residual, residual + d, inputs_.data() + row * d);
    } else {
      if (reads_token_) std::copy(embedded, embedded + d, both);
      else std::fill(both, both + d, 0.0f);
      std::copy(state, state + d, both + d);
    }
  }
  if (!fuses_) multiply_rows(linears[0], int(count), both_.data(), inputs_.data());
}

void Eagle::copy_rotations(const Drafting& drafting, const Rows& rows) {
  const size_t half = layer.shape.head_dim / 2;
  cosines_.resize(rows.count() * half);
  sines_.resize(rows.count() * half);
  for (int row = 0; row < rows.count(); ++row) {
    const size_t first = size_t(rows.positions[row]) * half;
    std::copy(drafting.cosines + first, drafting.cosines + first + half, cosines_.data() + row * half);
    std::copy(drafting.sines + first, drafting.sines + first + half, sines_.data() + row * half);
  }
}

}  // namespace native
