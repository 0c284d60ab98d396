// The tree of several methods in a burst, merged as orchestrator/drafting/union.py merges proposals.
#pragma once

#include <cstdint>
#include <vector>

namespace drafts {

// Bits of a node's names that belong to each method: 0 if the method has not proposed the node, else its number for the
// source of the node plus 1 (`NativeDrafts.source_of` of orchestrator/core/proposal.py).
constexpr int kNameBits = 8;

// The methods' trees, one after the other; a path that several methods propose is there once.
class UnitedTree {
 public:
  void clear() { tokens_.clear(), parents_.clear(), names_.clear(); }

  int size() const { return int(tokens_.size()); }
  const std::vector<int32_t>& tokens() const { return tokens_; }
  const std::vector<int32_t>& parents() const { return parents_; }
  const std::vector<int32_t>& names() const { return names_; }

  // Add the tree of the next method. place: the method's. sources: its numbers of the nodes' sources; null = all are 0.
  void merge(int place, int count, const int32_t* tokens, const int32_t* parents, const int32_t* sources) {
    const int num_known = size();  // a method proposes no path twice
    nodes_.assign(1, 0);
    for (int i = 0; i < count; ++i) {
      const int parent = nodes_[parents[i]];
      int node = 0;
      while (node < num_known && !(parents_[node] == parent && tokens_[node] == tokens[i])) ++node;
      if (node == num_known) {
        node = size();
        tokens_.push_back(tokens[i]), parents_.push_back(parent), names_.push_back(0);
      }
      names_[node] |= ((sources ? sources[i] : 0) + 1) << kNameBits * place;
      nodes_.push_back(node + 1);
    }
  }

 private:
  std::vector<int32_t> tokens_, parents_, names_;
  std::vector<int32_t> nodes_;  // the node that each node of the method's tree has become
};

}  // namespace drafts
