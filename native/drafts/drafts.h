// The interfaces of proposers in native code, the costs that size their trees, and the arrays that they write trees to.
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

// Curve of orchestrator/core/cost_model.py.
struct Curve {
  const double *rows, *seconds;
  double row_s;
  int32_t num_points;
};

// A pass whose trees grow together. contexts_s: what the contexts of its requests add to the curve. tokens: those that it
// is expected to give without these trees. num_rows: its rows without these trees.
struct SharedPass {
  Curve curve;
  double contexts_s, tokens;
  int32_t num_requests, num_rows;
};

// One request's part in a pass whose trees grow together. context_row_s: seconds that its context adds to each node.
// num_nodes: written, how many nodes of its tree are worth sending.
struct JointTree {
  void* growth;
  const int32_t* committed;
  size_t num_committed;
  double context_row_s;
  Tree tree;
  int32_t max_nodes, max_depth, num_nodes;
};

// Drafts for one request; one thread at a time may use it.
class Proposer {
 public:
  virtual ~Proposer() = default;

  // Learn from the tokens that a step has committed, and write the tree after them; return its number of nodes.
  virtual int next(const int32_t* committed, size_t count, int max_nodes, int max_depth, const Tree& tree) = 0;
};

// A proposer that follows the output through the client's prediction, and therefore tells the prompt from the output.
class PredictionProposer : public Proposer {
 public:
  // Read a part of the output that the client expects, before any output.
  virtual void read_prediction(const int32_t* tokens, size_t count) = 0;

  // Read a part of the prompt, before the first tree.
  virtual void read_prompt(const int32_t* tokens, size_t count) = 0;
};

}  // namespace drafts
