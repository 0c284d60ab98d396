// EAGLE-1/2 (arXiv:2401.15077, 2406.16858) and EAGLE-3 (arXiv:2503.01840): trees of predicted features.
#pragma once

#include "heads/heads.h"
#include "forward/model.h"

namespace native {

// Row i reads the target's feature of position i and the embedding of token i + 1, and has position i. Its output
// predicts the feature of position i + 1; a drafted row reads it in place of the target's. The outputs are kept in
// Drafting::states, in the slots of their rows.
//
// linears: fc. EAGLE-1: fc(cat(embedding, feature)) enters the layer. EAGLE-3 (`fuses`): fc(features of three layers)
// does, and its attention reads cat(norm(embedding), norm(state)). EAGLE-3.1 (arXiv:2605.09992) norms more of it.
class Eagle : public Head {
 public:
  // shape: that of the layer, with num_layers 1; its vocab_size is the size of the draft vocabulary.
  Eagle(const Shape& shape, int feature_width, int vocab_size, bool fuses, bool reads_token, int max_threads);

  const char* refusal(const Drafting& drafting) const override;

  // Keep the outputs after the final norm, so that drafted rows read these.
  void keep_normed_outputs();

  Model layer;
  std::vector<float> input_norm, hidden_norm;  // EAGLE-3: the norms of its attention's input
  // EAGLE-3.1: the weights of the norms before fc, (feature_width), empty if there are none; and how many norms they
  // are.
  std::vector<float> feature_norm;
  int num_feature_norms = 1;
  bool norms_residual = false;  // the residual is the normed state
  std::vector<int32_t> ids;     // the target's ids of the draft vocabulary; empty: the vocabularies are the same

 protected:
  void begin(const Drafting& drafting, const Drafts& drafts) override;
  const float* logits(const Drafts&) override { return logits_.data(); }  // begin and advance compute them
  void advance(const Drafting& drafting, const Drafts& drafts) override;
  int num_logits() const override { return layer.shape.vocab_size; }
  const int32_t* draft_ids() const override { return ids.empty() ? nullptr : ids.data(); }

 private:
  // The rows of a pass through the layer, as in native::Pass. states: what each row reads besides its token: the
  // target's features, or the output of the row before it.
  struct Rows {
    std::vector<int32_t> tokens, positions, slots, context_starts, context_lens, extra_starts{0}, extra_slots, logit_rows;
    std::vector<const float*> states;

    void add(int32_t token, int64_t position, int slot, int context_start, int context_len, const float* state);
    int count() const { return int(tokens.size()); }
  };

  const char* refusal_of(const Drafting& drafting, const DraftCall& call) const;
  void forward(const Drafting& drafting, const Rows& rows);
  void compute_inputs(const Rows& rows);
  void copy_rotations(const Drafting& drafting, const Rows& rows);

  const bool fuses_, reads_token_;
  std::vector<int32_t> context_slots_, context_starts_, context_lens_;  // the context rows of each call
  std::vector<float> fused_, both_, inputs_, cosines_, sines_, logits_;
};

}  // namespace native
