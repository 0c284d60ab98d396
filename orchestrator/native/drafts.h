// What a call that grows a tree exchanges: the costs by which it is sized, and where it is written.
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

// Learns from the tokens that a step has committed and grows the tree behind them; returns its number of nodes.
using Next = int (*)(void* growth, const int32_t* committed, size_t count, int max_nodes, int max_depth,
                     const Costs* costs, const Tree* tree);

}  // namespace drafts
