// How a draft tree grows level by level from ranked guesses; runtime/models/heads/engines/trees.py is the reference.
#pragma once

#include <cstdint>
#include <vector>

namespace native {

// A guess for the token after a candidate. score: its log-confidence. bound: an upper bound of the score that is known
// before the token is sampled; for tokens that are not sampled, the score itself.
struct Guess {
  int32_t token;
  double score, bound;
};

// The guesses after each candidate of a frontier, the best first: row i has counts[i] of them at guesses[i * stride].
struct GuessRows {
  const Guess* guesses;
  const int32_t* counts;
  int stride;
};

// A dynamic tree expands `width` candidates per level. A static tree has num_choices nodes: node i + 1 is the guess of
// rank choice_ranks[i] below node choice_parents[i]; parents come before their children. No candidate has a bound below
// min_score; in a static tree that draws, it is the parent's score instead that is not below it.
struct TreeShape {
  int32_t max_nodes, max_depth, width, beam_search, num_choices;
  const int32_t *choice_parents, *choice_ranks;
  double min_score;
  int32_t draws;
};

// Candidates for a draft, numbered in the order in which they are added; candidate 0 is the root. A score is the
// log-confidence of the whole path, so no candidate scores above its ancestors; a bound is the score's upper bound
// before the candidate's own token was sampled.
class GrowingTree {
 public:
  struct Candidate {
    int32_t token, parent, depth;
    double score, bound;
  };

  explicit GrowingTree(const TreeShape& shape);

  // Add the guesses after the candidates of the frontier, and choose the next frontier. shares_row: the first row has
  // the guesses of all of them.
  void add_children(const GuessRows& rows, bool shares_row);

  // The candidates that make up the draft, in its order, parents before their children.
  std::vector<int> drafted() const;

  std::vector<Candidate> candidates;
  std::vector<int> frontier;  // the candidates to expand next, all at one depth; empty: the tree is complete
  int fan_out;                // how many children each of them may get

 private:
  bool is_likely(int parent, const Guess& guess) const;
  int add(int parent, const Guess& guess);
  void grow_dynamic(const GuessRows& rows, bool shares_row);
  void grow_static(const GuessRows& rows, bool shares_row);
  std::vector<int> best(std::vector<int> nodes, int count, double Candidate::*value) const;

  const TreeShape shape_;
  int levels_left_;
  std::vector<int> last_level_;
  std::vector<std::vector<int>> choice_children_;  // the children of each choice
  std::vector<int> candidate_of_choice_;           // 0: the choice has no candidate, or is the root
  std::vector<int> choices_to_expand_;             // the choices of the frontier's candidates
};

}  // namespace native
