// The C interface of drafting heads: a head is created empty, given its weights, and then drafts. Called from Python
// (head_weights.py, heads.py). A function that makes an object returns null if it fails. The others that can fail return
// null, or a text that says what is wrong.

#include <string>

#include "guarded.h"
#include "heads/eagle.h"
#include "heads/small_heads.h"

using native::Drafting;
using native::Eagle;
using native::guarded;
using native::make;
using native::Head;
using native::Linear;
using native::Model;
using native::Shape;

namespace {

// The vector or table of a head, null for an unknown name; the norms are EAGLE-3's.
std::vector<float>* find_vector(Head& head, const std::string& name) {
  if (name == "embedding") return &head.embedding;
  Eagle* eagle = dynamic_cast<Eagle*>(&head);
  if (!eagle) return nullptr;
  if (name == "input_norm") return &eagle->input_norm;
  if (name == "feature_norm") return &eagle->feature_norm;
  return name == "hidden_norm" ? &eagle->hidden_norm : nullptr;
}

}  // namespace

extern "C" {

Head* native_medusa_new(int hidden_size, int vocab_size, int num_heads, int num_blocks, int max_threads) {
  return make<native::Medusa>(hidden_size, vocab_size, num_heads, num_blocks, max_threads);
}

Head* native_redrafter_new(int hidden_size, int vocab_size, int exit_dim, int is_recurrent, int max_threads) {
  return make<native::Redrafter>(hidden_size, vocab_size, exit_dim, is_recurrent, max_threads);
}

Head* native_eagle_new(const Shape* shape, int feature_width, int vocab_size, int fuses, int reads_token,
                       int max_threads) {
  return make<Eagle>(*shape, feature_width, vocab_size, fuses, reads_token, max_threads);
}

void native_head_delete(Head* head) { delete head; }

// The decoder layer of an EAGLE head, which owns it; its weights are set like those of a model.
Model* native_eagle_layer(Head* head) { return &static_cast<Eagle*>(head)->layer; }

// Append a linear layer, W (num_outputs, num_inputs) and a bias or null, in the order that the head's class documents.
const char* native_head_add_linear(Head* head, const float* weight, const float* bias, int num_outputs, int num_inputs,
                                   int rounds_inputs) {
  return guarded([&] {
    head->linears.push_back({Linear(weight, num_outputs, num_inputs, rounds_inputs), {}});
    if (bias) head->linears.back().bias.assign(bias, bias + num_outputs);
    return nullptr;
  });
}

// The same for a matrix of quantised blocks, (num_outputs, num_inputs / 32). kind: a native::Quantization.
const char* native_head_add_quantized(Head* head, int kind, const uint8_t* blocks, const float* bias, int num_outputs,
                                      int num_inputs) {
  return guarded([&] {
    const char* wrong = Linear::refusal(kind, blocks, num_outputs, num_inputs);
    if (wrong) return wrong;
    head->linears.push_back({Linear(native::Quantization(kind), blocks, num_outputs, num_inputs), {}});
    if (bias) head->linears.back().bias.assign(bias, bias + num_outputs);
    return wrong;
  });
}

// Set a vector or table of a head.
const char* native_head_set_vector(Head* head, const char* name, const float* values, int count) {
  return guarded([&] {
    std::vector<float>* own = find_vector(*head, name);
    if (!own) return "there is no such vector";
    own->assign(values, values + count);
    return static_cast<const char*>(nullptr);
  });
}

// Set the target's ids of an EAGLE head's draft vocabulary.
const char* native_eagle_set_ids(Head* head, const int32_t* ids, int count) {
  return guarded([&] { return static_cast<Eagle*>(head)->ids.assign(ids, ids + count), nullptr; });
}

// Set which norms of EAGLE-3.1 an EAGLE-3 head has; num_feature_norms: how many norms the vector "feature_norm" is.
void native_eagle_set_norms(Head* head, int num_feature_norms, int norms_residual, int norms_output) {
  Eagle* eagle = static_cast<Eagle*>(head);
  eagle->num_feature_norms = num_feature_norms;
  eagle->norms_residual = norms_residual;
  if (norms_output) eagle->keep_normed_outputs();
}

// Draft. If the arguments are wrong, nothing was drafted.
const char* native_head_draft(Head* head, const Drafting* drafting) {
  return guarded([&] {
    const char* wrong = head->refusal(*drafting);
    if (!wrong) head->draft(*drafting);
    return wrong;
  });
}

}  // extern "C"
