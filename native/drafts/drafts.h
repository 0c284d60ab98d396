// The interfaces of proposers in native code, and the arrays that they write trees to.
#pragma once

#include <cstddef>
#include <cstdint>

namespace drafts {

// The arrays that a tree is written to, by node 1…m: token, parent, and the number of its source.
struct Tree {
  int32_t *tokens, *parents, *names;
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
