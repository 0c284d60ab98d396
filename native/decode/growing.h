// The trees of a burst that grow together, sized by the rows of all its sequences.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "decode/decode.h"
#include "drafts/joint_growth.h"

namespace native {

class GrowingTrees {
 public:
  GrowingTrees(const Decoding& decoding, int count) : decoding_(decoding) {
    size_t room = 0;
    for (int i = 0; i < count; ++i)
      if (decoding.continuations[i].is_grown) room += size_t(decoding.continuations[i].max_nodes);
    nodes_.resize(3 * room), probabilities_.resize(room);
    int32_t* nodes = nodes_.data();
    double* probabilities = probabilities_.data();
    for (int i = 0; i < count; ++i) {
      const Continuation& each = decoding.continuations[i];
      if (!each.is_grown) continue;
      const drafts::Tree tree{nodes, nodes + each.max_nodes, nodes + 2 * each.max_nodes, probabilities};
      joint_trees_.push_back({each.members->proposer, nullptr, 0, each.node_s, tree, 0, 0, 0});
      nodes += 3 * each.max_nodes, probabilities += each.max_nodes;
    }
  }

  void begin() { pass_ = {decoding_.curve, 0.0, 0.0, 0, 0}, num_asked_ = 0; }

  // Add a sequence to the next pass; num_rows: its root, and its nodes that do not grow here.
  void add(const Continuation& sequence, int num_rows) {
    ++pass_.num_requests, pass_.num_rows += num_rows;
    pass_.contexts_s += sequence.root_s, pass_.tokens += sequence.is_grown ? 1.0 : decoding_.mean_tokens;
  }

  // Ask for the tree of the next sequence that has one here; committed: the tokens of its last step.
  void ask(const std::vector<int32_t>& committed, int max_nodes, int max_depth) {
    drafts::JointTree& joint = joint_trees_[num_asked_++];
    joint.committed = committed.data(), joint.num_committed = committed.size();
    joint.max_nodes = max_nodes, joint.max_depth = max_depth;
  }

  // Let the trees grow; return what is wrong, or null.
  const char* grow() {
    if (!joint_trees_.empty()) drafts::grow_jointly(joint_trees_.data(), joint_trees_.size(), pass_);
    return nullptr;
  }

  // The trees, in the order in which they were asked for.
  const std::vector<drafts::JointTree>& grown() const { return joint_trees_; }

 private:
  const Decoding& decoding_;
  drafts::SharedPass pass_{};
  std::vector<drafts::JointTree> joint_trees_;
  std::vector<int32_t> nodes_;
  std::vector<double> probabilities_;
  size_t num_asked_ = 0;
};

}  // namespace native
