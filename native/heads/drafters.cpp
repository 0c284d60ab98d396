#include "heads/drafters.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "heads/chains.h"

namespace native {

namespace {

constexpr int kMaxWidth = 1024;  // more than any request may ask for

}  // namespace

Drafters::Drafters(const Drafter* drafters, int num_drafters, std::vector<const DrafterUse*> uses,
                   const SegmentPass& pass)
    : drafters_(drafters), num_drafters_(num_drafters), block_tokens_(pass.block_tokens),
      feature_width_(pass.feature_width) {
  const int32_t* blocks = pass.blocks;
  for (size_t i = 0; i < uses.size(); ++i) {
    const Segment& segment = pass.segments[i];
    sequences_.emplace_back();
    Sequence& sequence = sequences_.back();
    sequence.use = uses[i], sequence.target_blocks = blocks;
    sequence.num_tokens = segment.last, sequence.num_read = uses[i]->num_read;
    blocks += segment.num_blocks;
  }
}

const char* Drafters::refusal() const {
  for (const Sequence& sequence : sequences_) {
    const DrafterUse& use = *sequence.use;
    if (use.drafter >= num_drafters_) return "drafter: there is no such drafter";
    if (use.drafter < 0) continue;
    const Drafter& drafter = drafters_[use.drafter];
    if (!drafter.head == !drafter.model) return "drafters: each is a head or a draft model";
    if (use.num_read < sequence.num_tokens || (drafter.head && use.num_read > sequence.num_tokens))
      return "num_read: not up to the root";
    if (use.call.max_depth < 1) return "max_depth: below 1";
    if (drafter.head && use.call.width > kMaxWidth) return "width: beyond the widest level";
    if (!is_within(use.call.first_choice, use.call.num_choices, drafter.num_choices))
      return "first_choice: beyond the choices";
    if (!is_within(use.call.first_block, use.call.num_blocks, drafter.num_blocks)) return "first_block: beyond the blocks";
    if (drafter.head && (drafter.first_column < 0 || drafter.first_column + drafter.head->feature_width > feature_width_))
      return "first_column: beyond the features";
  }
  return nullptr;
}

// A draft model has already read the first drafts of its chain; those that were accepted need not be read again. In a
// union, the accepted path may be another method's. The chain of the first tree is not known here, and was accepted as
// far as it was read.
void Drafters::commit(int number, const std::vector<int32_t>& tokens) {
  Sequence& sequence = sequences_[number];
  int num_known = std::clamp(sequence.num_read - sequence.num_tokens, 0, int(tokens.size()) - 1);
  if (!sequence.tokens.empty())
    num_known = int(std::mismatch(tokens.begin(), tokens.begin() + num_known, sequence.tokens.begin()).first - tokens.begin());
  if (sequence.unread.empty()) sequence.num_read = sequence.num_tokens + num_known;
  sequence.unread.insert(sequence.unread.end(), tokens.begin() + num_known, tokens.end());
  sequence.num_tokens += int(tokens.size());
}

bool Drafters::has_room(int number) const {
  const Sequence& sequence = sequences_[number];
  const Drafter& drafter = drafter_of(sequence);
  const DraftCall& call = sequence.use->call;
  if (!drafter.cache) return true;
  // A head may keep a row for every node that it expands, a draft model for every draft but the last.
  const int64_t num_kept = drafter.model ? call.max_depth - 1
                           : call.num_choices ? std::min(call.num_choices, call.max_nodes)
                                              : int64_t(call.width) * (call.max_depth - 1);
  return sequence.num_tokens + num_kept <= int64_t(call.num_blocks) * drafter.block_tokens;
}

void Drafters::ask(int number, int max_nodes, int max_depth) {
  Sequence& sequence = sequences_[number];
  sequence.tokens.clear(), sequence.parents.clear();
  const int depth = std::min({max_depth, sequence.use->call.max_depth,
                              drafter_of(sequence).max_positions - sequence.num_tokens});
  const bool has_nodes = max_nodes > 0 && depth > 0;
  sequence.max_nodes = has_nodes ? max_nodes : 0, sequence.max_depth = has_nodes ? depth : 0;
}

const char* Drafters::draft(const float* features) {
  for (int number = 0; number < num_drafters_; ++number) {
    std::vector<Sequence*> asking;
    for (Sequence& sequence : sequences_)
      if (sequence.use->drafter == number && sequence.max_nodes) asking.push_back(&sequence);
    if (asking.empty()) continue;
    const Drafter& drafter = drafters_[number];
    if (const char* wrong = drafter.head ? draft_trees(drafter, asking, features) : draft_chains(drafter, asking))
      return wrong;
    for (Sequence* sequence : asking) {
      const int num_drafts_read = drafter.head ? 0 : int(sequence->tokens.size()) - 1;
      sequence->num_read = sequence->num_tokens + num_drafts_read;
      sequence->unread.clear();
      sequence->max_nodes = 0;
    }
  }
  return nullptr;
}

const char* Drafters::draft_trees(const Drafter& drafter, const std::vector<Sequence*>& asking, const float* features) {
  calls_.clear(), tokens_.clear(), choice_parents_.clear(), choice_ranks_.clear(), features_.clear();
  int32_t max_tree = 1;
  for (const Sequence* sequence : asking) {
    add_call(drafter, *sequence, features);
    max_tree = std::max({max_tree, calls_.back().max_nodes, calls_.back().width});
  }
  std::vector<int32_t> sizes(asking.size()), nodes(2 * asking.size() * max_tree);
  int32_t *tokens = nodes.data(), *parents = tokens + asking.size() * max_tree;
  double selection_s = 0.0;
  Drafting drafting = {};
  drafting.num_calls = int32_t(asking.size()), drafting.num_threads = drafter.num_threads;
  drafting.num_rows = int32_t(tokens_.size()), drafting.num_choices = int32_t(choice_ranks_.size());
  drafting.num_blocks = drafter.num_blocks, drafting.max_tree = max_tree;
  drafting.calls = calls_.data(), drafting.tokens = tokens_.data();
  drafting.choice_parents = choice_parents_.data(), drafting.choice_ranks = choice_ranks_.data();
  drafting.blocks = drafter.blocks, drafting.features = features_.data();
  drafting.cosines = drafter.cosines, drafting.sines = drafter.sines;
  drafting.cache = drafter.cache, drafting.states = drafter.states;
  drafting.num_positions = drafter.num_positions, drafting.num_slots = drafter.num_slots;
  drafting.block_tokens = drafter.block_tokens;
  drafting.tree_sizes = sizes.data(), drafting.tree_tokens = tokens, drafting.tree_parents = parents;
  drafting.selection_s = &selection_s;
  if (const char* wrong = drafter.head->refusal(drafting)) return wrong;
  drafter.head->draft(drafting);
  for (size_t i = 0; i < asking.size(); ++i) {
    asking[i]->tokens.assign(tokens + i * max_tree, tokens + i * max_tree + sizes[i]);
    asking[i]->parents.assign(parents + i * max_tree, parents + i * max_tree + sizes[i]);
  }
  return nullptr;
}

// Add a head's call with the rows that it reads. Row j is made of token j and the target's feature of position j − 1; a
// head that keeps nothing between calls reads only the newest row.
void Drafters::add_call(const Drafter& drafter, const Sequence& sequence, const float* features) {
  DraftCall call = sequence.use->call;
  call.position = sequence.num_tokens, call.root = sequence.unread.back();
  call.max_nodes = sequence.max_nodes, call.max_depth = sequence.max_depth;
  call.first_slot = drafter.cache ? sequence.num_read : sequence.num_tokens - 1;
  call.first_row = int32_t(tokens_.size()), call.num_rows = sequence.num_tokens - call.first_slot;
  call.first_choice = int32_t(choice_ranks_.size()), call.num_choices = add_choices(drafter, sequence);
  calls_.push_back(call);
  tokens_.insert(tokens_.end(), sequence.unread.end() - call.num_rows, sequence.unread.end());
  for (int position = call.first_slot - 1; position < sequence.num_tokens - 1; ++position) {
    const size_t slot = slot_of(sequence.target_blocks, block_tokens_, position);
    const float* feature = features + slot * feature_width_ + drafter.first_column;
    features_.insert(features_.end(), feature, feature + drafter.head->feature_width);
  }
}

// Add the shape of a static tree, cut to the draft's limits like `TokenTree.within`; return its number of nodes.
int Drafters::add_choices(const Drafter& drafter, const Sequence& sequence) {
  const DraftCall& call = sequence.use->call;
  const int32_t *parents = drafter.choice_parents + call.first_choice, *ranks = drafter.choice_ranks + call.first_choice;
  std::vector<int32_t> depths(call.num_choices + 1, 0), numbers(call.num_choices + 1, 0);
  int count = 0;
  for (int node = 1; node <= call.num_choices && count < sequence.max_nodes; ++node) {
    const int parent = std::clamp(parents[node - 1], 0, node - 1);
    depths[node] = depths[parent] + 1;
    if (depths[node] > sequence.max_depth) continue;
    numbers[node] = ++count;
    choice_parents_.push_back(numbers[parent]), choice_ranks_.push_back(ranks[node - 1]);
  }
  return count;
}

const char* Drafters::draft_chains(const Drafter& drafter, const std::vector<Sequence*>& asking) {
  std::vector<Segment> segments;
  std::vector<Chain> chains;
  std::vector<int32_t> ids, blocks, lengths(asking.size());
  int32_t max_length = 1;
  for (const Sequence* sequence : asking) {
    const DraftCall& call = sequence->use->call;
    const int32_t length = std::min(sequence->max_nodes, sequence->max_depth);
    chains.push_back({call.ranking, call.min_score, int32_t(segments.size()), length});
    segments.push_back({sequence->num_read, sequence->num_tokens, 0, call.num_blocks});
    ids.insert(ids.end(), sequence->unread.begin(), sequence->unread.end());
    blocks.insert(blocks.end(), drafter.blocks + call.first_block, drafter.blocks + call.first_block + call.num_blocks);
    max_length = std::max(max_length, length);
  }
  std::vector<int32_t> tokens(asking.size() * max_length);
  std::vector<float> logits(asking.size() * size_t(drafter.model->shape.vocab_size));
  SegmentPass pass = {};
  pass.num_segments = pass.num_logits = int32_t(segments.size()), pass.num_rows = int32_t(ids.size());
  pass.num_blocks = int32_t(blocks.size()), pass.block_tokens = drafter.block_tokens, pass.num_slots = drafter.num_slots;
  pass.num_threads = drafter.num_threads;
  pass.segments = segments.data(), pass.ids = ids.data(), pass.blocks = blocks.data();
  pass.cache = drafter.cache, pass.logits = logits.data();
  const Chains request{int32_t(chains.size()), max_length, chains.data(), tokens.data(), lengths.data()};
  if (const char* wrong = native_draft_chains(drafter.model, &pass, &request)) return wrong;
  for (size_t i = 0; i < asking.size(); ++i) {
    asking[i]->tokens.assign(tokens.data() + i * max_length, tokens.data() + i * max_length + lengths[i]);
    asking[i]->parents.resize(lengths[i]);
    std::iota(asking[i]->parents.begin(), asking[i]->parents.end(), 0);
  }
  return nullptr;
}

}  // namespace native
