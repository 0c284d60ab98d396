// The interface of a proposer in native code, the costs that size its trees, and the arrays that it writes a tree to.
#pragma once

#include <cstddef>
#include <cstdint>

namespace drafts {

// CostModel of orchestrator/core/cost_model.py.
struct Costs {
  const double *seconds, *row_s;
  double others_tokens, rate_to_beat;
};

// The arrays that a tree is written to, by node 1…m: token, parent, the names of the sources as bits, probability.
struct Tree {
  int32_t *tokens, *parents, *names;
  double* probabilities;
};

// Drafts for one request; one thread at a time may use it.
class Proposer {
 public:
  virtual ~Proposer() = default;

  // Learn from the tokens that a step has committed, and write the tree after them; return its number of nodes.
  // costs: null or empty for a method that does not size its trees by them.
  virtual int next(const int32_t* committed, size_t count, int max_nodes, int max_depth, const Costs* costs,
                   const Tree& tree) = 0;
};

// A proposer that follows the output through the client's prediction, and therefore tells the prompt from the output.
class PredictionProposer : public Proposer {
 public:
  // Read a part of the output that the client expects, before any output.
  virtual void read_prediction(const int32_t* tokens, size_t count) = 0;

  // Read a part of the prompt, before the first tree.
  virtual void read_prompt(const int32_t* tokens, size_t count) = 0;
};

// Calls `next` of a Proposer, and returns -1 if it fails: `drafts_next` of orchestrator/native/drafts.cpp.
using Next = int (*)(void* proposer, const int32_t* committed, size_t count, int max_nodes, int max_depth,
                     const Costs* costs, const Tree* tree);

}  // namespace drafts
