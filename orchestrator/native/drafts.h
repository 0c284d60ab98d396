// What drafts in native code: its interface, the costs by which a tree is sized, and where the tree is written.
#pragma once

#include <cstddef>
#include <cstdint>

namespace drafts {

// orchestrator/core/step_costs.py, Surface. node_s: time to draft a node.
struct Costs {
  const double *seconds, *row_s;
  double others_tokens, rate, node_s;
};

// Where a tree is written, by node 1…m: its token, its parent, the names of its sources as bits, its chance.
struct Tree {
  int32_t *tokens, *parents, *names;
  double* chances;
};

// The drafts of one request, which one thread at a time may use.
class Proposer {
 public:
  virtual ~Proposer() = default;

  // Learn from the tokens that are new, those that a step has committed, and write the tree behind them; return its number
  // of nodes. costs: null or empty for a method that does not size its trees by them.
  virtual int next(const int32_t* committed, size_t count, int max_nodes, int max_depth, const Costs* costs,
                   const Tree& tree) = 0;
};

// Calls `next` of a Proposer; the function of orchestrator/native/drafts.cpp.
using Next = int (*)(void* proposer, const int32_t* committed, size_t count, int max_nodes, int max_depth,
                     const Costs* costs, const Tree* tree);

}  // namespace drafts
