// The heads that keep nothing between calls: Medusa (arXiv:2401.10774) and ReDrafter (arXiv:2403.09919).
#pragma once

#include "heads/heads.h"

namespace native {

// Head k predicts the token k + 1 places after the root from the target's newest state.
// linears: the residual blocks of each head, head by head, then its LM heads: one for each head, or one for all.
class Medusa : public Head {
 public:
  Medusa(int hidden_size, int vocab_size, int num_heads, int num_blocks, int max_threads)
      : Head(hidden_size, hidden_size, vocab_size, max_threads), num_heads_(num_heads), num_blocks_(num_blocks) {}

  const char* refusal(const Drafting& drafting) const override;

 protected:
  void begin(const Drafting& drafting, const Drafts& drafts) override;
  const float* logits(const Drafts& drafts) override;
  void advance(const Drafting& drafting, const Drafts& drafts) override;
  int num_logits() const override { return vocab_size; }
  bool shares_row() const override { return true; }

 private:
  const int num_heads_, num_blocks_;
  std::vector<float> newest_, x_, logits_;  // newest_: (calls, hidden_size)
};

// s_i = silu(W e(y_{i−1}) + U s_{i−1} + b), or e + s without recurrence; the LM head reads cat(h, s_i).
// linears: (W | U), if recurrent; the projection to exit_dim, if that is not 2 · hidden_size; the residual blocks; the
// LM head.
class Redrafter : public Head {
 public:
  Redrafter(int hidden_size, int vocab_size, int exit_dim, bool is_recurrent, int max_threads)
      : Head(hidden_size, hidden_size, vocab_size, max_threads), exit_dim_(exit_dim), is_recurrent_(is_recurrent) {}

  const char* refusal(const Drafting& drafting) const override;

 protected:
  void begin(const Drafting& drafting, const Drafts& drafts) override;
  const float* logits(const Drafts& drafts) override;
  void advance(const Drafting& drafting, const Drafts& drafts) override;
  int num_logits() const override { return vocab_size; }
  bool is_beam_search() const override { return true; }

 private:
  void read(const std::vector<int>& tokens, const std::vector<int>& before);

  const int exit_dim_;
  const bool is_recurrent_;
  std::vector<float> newest_;                     // (calls, hidden_size)
  std::vector<float> states_;                     // (candidates read so far, hidden_size)
  std::vector<float> both_, x_, logits_;
  int num_states_ = 0;
};

// Copy the target's newest state of each call to `target`, (calls, width), in the order of the calls.
void copy_newest(const Drafting& drafting, int width, std::vector<float>& target);

}  // namespace native
