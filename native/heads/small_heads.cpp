#include "heads/small_heads.h"

#include <algorithm>

namespace native {

void copy_newest(const Drafting& drafting, int width, std::vector<float>& target) {
  target.resize(size_t(drafting.num_calls) * width);
  for (int call = 0; call < drafting.num_calls; ++call) {
    const DraftCall& c = drafting.calls[call];
    const float* newest = drafting.features + size_t(c.first_row + c.num_rows - 1) * width;
    std::copy(newest, newest + width, target.data() + size_t(call) * width);
  }
}

const char* Medusa::refusal(const Drafting& drafting) const {
  if (int(linears.size()) <= num_heads_ * num_blocks_) return "the head lacks weights";
  for (int call = 0; call < drafting.num_calls; ++call)
    if (drafting.calls[call].max_depth > num_heads_) return "max_depth: there are fewer heads";
  return Head::refusal(drafting);
}

void Medusa::begin(const Drafting& drafting, const Drafts& drafts) {
  copy_newest(drafting, hidden_size, newest_);
  for (Draft* draft : drafts) draft->states[0] = draft->number;
}

const float* Medusa::logits(const Drafts& drafts) {
  const GrowingTree& first = drafts[0]->tree;  // all frontiers are at the same depth
  const int head = first.candidates[first.frontier[0]].depth, num_rows = int(drafts.size());
  x_.resize(size_t(num_rows) * hidden_size);
  logits_.resize(size_t(num_rows) * vocab_size);
  for (int row = 0; row < num_rows; ++row) {
    const float* state = newest_.data() + size_t(drafts[row]->states[0]) * hidden_size;
    std::copy(state, state + hidden_size, x_.data() + size_t(row) * hidden_size);
  }
  for (int block = 0; block < num_blocks_; ++block) apply_block(linears[head * num_blocks_ + block], num_rows, x_.data());
  const int first_output = num_heads_ * num_blocks_, num_outputs = int(linears.size()) - first_output;
  multiply_rows(linears[first_output + std::min(head, num_outputs - 1)], num_rows, x_.data(), logits_.data());
  return logits_.data();
}

void Medusa::advance(const Drafting&, const Drafts&) {}

const char* Redrafter::refusal(const Drafting& drafting) const {
  const int num_others = int(is_recurrent_) + int(exit_dim_ != 2 * hidden_size) + 1;
  return int(linears.size()) < num_others ? "the head lacks weights" : Head::refusal(drafting);
}

void Redrafter::begin(const Drafting& drafting, const Drafts& drafts) {
  copy_newest(drafting, hidden_size, newest_);
  states_.assign(hidden_size, 0.0f);  // before the root
  num_states_ = 1;
  std::vector<int> tokens;
  for (Draft* draft : drafts) tokens.push_back(draft->call.root);
  read(tokens, std::vector<int>(tokens.size(), 0));
  for (Draft* draft : drafts) draft->states[0] = 1 + draft->number;
}

// Append the states after these tokens; before: the index of the state before each token.
void Redrafter::read(const std::vector<int>& tokens, const std::vector<int>& before) {
  const int num_rows = int(tokens.size()), d = hidden_size;
  both_.resize(size_t(num_rows) * 2 * d);
  states_.resize(size_t(num_states_ + num_rows) * d);
  float* after = states_.data() + size_t(num_states_) * d;
  for (int row = 0; row < num_rows; ++row) {
    const float *embedded = embedding_of(tokens[row]), *state = states_.data() + size_t(before[row]) * d;
    std::copy(embedded, embedded + d, both_.data() + size_t(row) * 2 * d);
    std::copy(state, state + d, both_.data() + size_t(row) * 2 * d + d);
    for (int i = 0; i < d; ++i) after[size_t(row) * d + i] = embedded[i] + state[i];
  }
  if (is_recurrent_) {
    multiply_rows(linears[0], num_rows, both_.data(), after);
    for (size_t i = 0; i < size_t(num_rows) * d; i += kLanes) store16(after + i, silu16(load16(after + i)));
  }
  num_states_ += num_rows;
}

const float* Redrafter::logits(const Drafts& drafts) {
  const int d = hidden_size;
  std::vector<int> calls, states;
  for (const Draft* draft : drafts)
    for (const int node : draft->tree.frontier) {
      calls.push_back(draft->number);
      states.push_back(draft->states[node]);
    }
  const int num_rows = int(states.size());
  x_.resize(size_t(num_rows) * 2 * d);
  for (int row = 0; row < num_rows; ++row) {
    const float *newest = newest_.data() + size_t(calls[row]) * d, *state = states_.data() + size_t(states[row]) * d;
    std::copy(newest, newest + d, x_.data() + size_t(row) * 2 * d);
    std::copy(state, state + d, x_.data() + size_t(row) * 2 * d + d);
  }
  size_t next = is_recurrent_;
  if (exit_dim_ != 2 * d) {
    both_.resize(size_t(num_rows) * exit_dim_);
    multiply_rows(linears[next++], num_rows, x_.data(), both_.data());
    std::swap(both_, x_);
  }
  for (; next + 1 < linears.size(); ++next) apply_block(linears[next], num_rows, x_.data());
  logits_.resize(size_t(num_rows) * vocab_size);
  multiply_rows(linears.back(), num_rows, x_.data(), logits_.data());
  return logits_.data();
}

void Redrafter::advance(const Drafting&, const Drafts& drafts) {
  std::vector<int> tokens, before;
  int next = num_states_;
  for (Draft* draft : drafts)
    for (const int node : draft->tree.frontier) {
      tokens.push_back(draft->tree.candidates[node].token);
      before.push_back(draft->states[draft->tree.candidates[node].parent]);
      draft->states[node] = next++;
    }
  read(tokens, before);
}

}  // namespace native
