#include "decode/decode.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include "guarded.h"
#include "drafts/united.h"
#include "decode/decode_arguments.h"

namespace native {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kFailed = "a proposer has failed";

int32_t us_between(Clock::time_point from, Clock::time_point to) {
  return int32_t(std::chrono::duration_cast<std::chrono::microseconds>(to - from).count());
}

int bits_of(int number) {
  int bits = 0;
  for (; number; number >>= 1) ++bits;
  return bits;
}

// The steps of one call.
class Steps {
 public:
  Steps(Model& model, const SegmentPass& first, Decoding& decoding, Pool::Awake& awake)
      : model_(model), pass_(first), decoding_(decoding), awake_(awake), count_(first.num_segments),
        segments_(first.segments, first.segments + count_), committed_(count_), trees_(count_), turns_(count_),
        num_tokens_(count_),
        drafters_(decoding.drafters, decoding.num_drafters, uses_of(decoding, count_), first) {
    pass_.segments = segments_.data();
    for (int i = 0; i < count_; ++i) decoding_.num_read[i] = decoding_.continuations[i].use.num_read;
  }

  const char* refusal() const { return drafters_.refusal(); }

  // Run the next step and draft for the one after it; return what is wrong, or null.
  const char* run() {
    const auto began = Clock::now();
    pass_.num_threads = take_threads(bits_of(pass_.num_rows));
    const Pass pass = model_.segment_rows.fill(pass_);
    if (const char* wrong = model_.refusal(pass)) return wrong;
    model_.forward(pass);
    const auto computed = Clock::now();
    if (const char* wrong = verify()) return wrong;
    settle();
    const auto settled = Clock::now();
    const int step = decoding_.num_made++;
    is_over_ = is_over_ || decoding_.num_made == decoding_.num_steps || *decoding_.interrupt ||
               us_between(began_, settled) >= decoding_.limit_us;
    if (const char* wrong = draft()) return wrong;
    fill_next(decoding_.num_nodes + size_t(step) * count_);
    int32_t* figures = decoding_.figures + 4 * step;
    figures[0] = us_between(began, computed);
    figures[1] = us_between(computed, settled);
    figures[2] = us_between(settled, Clock::now());
    figures[3] = pass.num_threads;
    return nullptr;
  }

  bool is_over() const { return is_over_; }

 private:
  static std::vector<const DrafterUse*> uses_of(const Decoding& decoding, int count) {
    std::vector<const DrafterUse*> uses;
    for (int i = 0; i < count; ++i) uses.push_back(&decoding.continuations[i].use);
    return uses;
  }

  int32_t take_threads(int bits) {
    const bool is_first = !(sizes_seen_ >> bits & 1);
    sizes_seen_ |= 1u << bits;
    return (is_first ? decoding_.first_threads : decoding_.num_threads)[bits];
  }

  const char* verify() {
    const int32_t *tokens = pass_.ids, *parents = pass_.parents;
    const float* logits = pass_.logits;
    int32_t* path = paths_.data();
    for (int i = 0; i < count_; ++i) {
      sampling::Request& request = decoding_.requests[i];
      const int32_t num_nodes = segments_[i].num_nodes;
      request.logits = logits, request.parents = parents, request.tokens = tokens + 1, request.path = path;
      request.prefix_len = segments_[i].last, request.num_nodes = num_nodes;
      logits += size_t(num_nodes + 1) * model_.shape.vocab_size;
      tokens += num_nodes + 1, parents += num_nodes, path += num_nodes;
    }
    return sampling_verify(decoding_.requests, size_t(count_), size_t(model_.shape.vocab_size), 1);
  }

  // Write what was accepted, and move the keys, values and features of the paths to the slots after the roots'.
  void settle() {
    const size_t at = size_t(decoding_.num_made) * count_;
    const int32_t* blocks = pass_.blocks;
    std::vector<int32_t> sources, destinations;
    for (int i = 0; i < count_; ++i) {
      const sampling::Request& request = decoding_.requests[i];
      Segment& segment = segments_[i];
      decoding_.path_lens[at + i] = request.path_len;
      decoding_.next_tokens[at + i] = request.next_token;
      committed_[i].clear();
      const auto slot = [&](int place) { return slot_of(blocks, pass_.block_tokens, place); };
      for (int level = 0; level < request.path_len; ++level) {
        const int32_t node = request.path[level];
        *path_out_++ = node;
        committed_[i].push_back(request.tokens[node - 1]);
        if (node == level + 1) continue;
        sources.push_back(slot(segment.last + node - 1)), destinations.push_back(slot(segment.last + level));
      }
      committed_[i].push_back(request.next_token);
      segment.first = segment.last + request.path_len, segment.last = segment.first + 1;
      bool has_slots = segment.last + decoding_.continuations[i].max_nodes <= segment.num_blocks * pass_.block_tokens;
      if (drafters_.has_use(i)) {
        drafters_.commit(i, committed_[i]);
        has_slots = has_slots && drafters_.has_room(i);
      }
      decoding_.is_over[i] = has_ended(i) || !has_slots;
      is_over_ |= decoding_.is_over[i] != 0;
      blocks += segment.num_blocks;
    }
    if (!sources.empty()) move(sources, destinations);
  }

  // Count the tokens that a sequence has got; return whether it ends.
  bool has_ended(int i) {
    const Continuation& each = decoding_.continuations[i];
    const int32_t* stop_ids_end = each.stop_ids + each.num_stop_ids;
    for (const int32_t token : committed_[i])
      if (++num_tokens_[i] > each.min_tokens && std::find(each.stop_ids, stop_ids_end, token) != stop_ids_end) return true;
    return num_tokens_[i] >= each.max_tokens;
  }

  void move(const std::vector<int32_t>& sources, const std::vector<int32_t>& destinations) {
    const Shape& shape = model_.shape;
    move_slots(pass_.cache, shape.num_layers * shape.num_kv_heads, shape.num_kv_heads, pass_.num_slots, shape.head_dim,
               sources.data(), destinations.data(), int(sources.size()));
    const size_t width = size_t(pass_.feature_width);
    // Node numbers ascend along a path, so no feature is overwritten before it is read.
    for (size_t i = 0; width && i < sources.size(); ++i)
      std::copy_n(pass_.features + sources[i] * width, width, pass_.features + destinations[i] * width);
  }

  // Draft the next trees: the members of each sequence take turns, and the drafters of all sequences draft together.
  const char* draft() {
    for (int i = 0; i < count_; ++i) {
      trees_[i].clear(), turns_[i] = 0;
      if (!propose(i)) return kFailed;
    }
    return decoding_.num_drafters ? draft_by_drafters() : nullptr;
  }

  const char* draft_by_drafters() {
    if (const char* wrong = call_drafters()) return wrong;
    for (int i = 0; i < count_; ++i) {
      if (!drafters_.has_use(i)) continue;
      const std::vector<int32_t>& tokens = drafters_.tokens(i);
      decoding_.num_read[i] = drafters_.num_read(i);
      trees_[i].merge(turns_[i]++, int(tokens.size()), tokens.data(), drafters_.parents(i).data(), nullptr);
      if (!propose(i)) return kFailed;
    }
    return nullptr;
  }

  // Call the heads and draft models of the sequences. The target's workers sleep meanwhile, so that the drafters' workers
  // have the processors.
  const char* call_drafters() {
    for (int i = 0; i < count_; ++i)
      if (drafters_.has_use(i)) drafters_.ask(i, share(i), max_depth(i));
    awake_.end();
    const char* wrong = drafters_.draft(pass_.features);
    awake_.begin();
    return wrong;
  }

  // Merge the trees of a sequence's next members, up to a drafter; return false if a proposer fails. If the sequence is
  // over, the proposers learn but draft nothing.
  bool propose(int i) {
    const Continuation& each = decoding_.continuations[i];
    for (int& turn = turns_[i]; turn < each.num_members && each.members[turn].proposer; ++turn) {
      const size_t room = size_t(each.max_nodes) + 1;
      drafted_.resize(3 * room);
      int32_t* drafted = drafted_.data();
      const drafts::Tree tree{drafted, drafted + room, drafted + 2 * room};
      const std::vector<int32_t>& committed = committed_[i];
      const int size = guarded_or(-1, [&] {
        return each.members[turn].proposer->next(committed.data(), committed.size(), share(i), max_depth(i), tree);
      });
      if (size < 0) return false;
      trees_[i].merge(turn, size, tree.tokens, tree.parents, tree.names);
    }
    return true;
  }

  // The maximum number of nodes that the member whose turn it is may add, as in `Union.propose`.
  int share(int i) const {
    const Continuation& each = decoding_.continuations[i];
    const int num_left = each.num_members - turns_[i], max_nodes = each.max_nodes - trees_[i].size();
    return decoding_.is_over[i] ? 0 : std::min((max_nodes + num_left - 1) / num_left, each.members[turns_[i]].max_nodes);
  }

  // The maximum levels of a sequence's next tree, none of them beyond its last token.
  int max_depth(int i) const {
    const Continuation& each = decoding_.continuations[i];
    return std::clamp(each.max_tokens - num_tokens_[i] - 1, 0, each.max_depth);
  }

  // Fill in the next pass, and write its trees. num_nodes: (num_segments), written.
  void fill_next(int32_t* num_nodes) {
    ids_.clear(), parents_.clear();
    pass_.num_nodes = 0;
    for (int i = 0; i < count_; ++i) {
      const drafts::UnitedTree& tree = trees_[i];
      ids_.push_back(committed_[i].back());
      ids_.insert(ids_.end(), tree.tokens().begin(), tree.tokens().end());
      parents_.insert(parents_.end(), tree.parents().begin(), tree.parents().end());
      tokens_out_ = std::copy(tree.tokens().begin(), tree.tokens().end(), tokens_out_);
      parents_out_ = std::copy(tree.parents().begin(), tree.parents().end(), parents_out_);
      names_out_ = std::copy(tree.names().begin(), tree.names().end(), names_out_);
      segments_[i].num_nodes = num_nodes[i] = tree.size();
      pass_.num_nodes += tree.size();
    }
    pass_.num_rows = pass_.num_logits = count_ + pass_.num_nodes;
    pass_.ids = ids_.data(), pass_.parents = parents_.data();
    paths_.resize(size_t(pass_.num_nodes));
  }

  Model& model_;
  SegmentPass pass_;
  Decoding& decoding_;
  Pool::Awake& awake_;
  const int count_;
  const Clock::time_point began_ = Clock::now();
  std::vector<Segment> segments_;
  std::vector<std::vector<int32_t>> committed_;  // the tokens of each sequence's last step
  std::vector<drafts::UnitedTree> trees_;        // the next tree of each sequence, and the member whose turn it is
  std::vector<int> turns_;
  std::vector<int32_t> num_tokens_, ids_, parents_, drafted_;
  Drafters drafters_;
  std::vector<int32_t> paths_ = std::vector<int32_t>(size_t(pass_.num_nodes));
  int32_t *tokens_out_ = decoding_.node_tokens, *parents_out_ = decoding_.node_parents,
          *names_out_ = decoding_.node_names, *path_out_ = decoding_.paths;
  uint32_t sizes_seen_ = 0;  // bit n is set once a pass has had a number of rows with n bits
  bool is_over_ = false;
};

const char* decode(Model& model, const SegmentPass& first, Decoding& decoding) {
  decoding.num_made = 0;
  if (const char* wrong = SegmentRows::refusal(first)) return wrong;
  if (const char* wrong = refusal(model, first, decoding)) return wrong;
  const int most_bits = bits_of(std::min(decoding.max_logits, kMaxPassRows));
  const int32_t most_threads = std::max(*std::max_element(decoding.num_threads, decoding.num_threads + most_bits + 1),
                                        *std::max_element(decoding.first_threads, decoding.first_threads + most_bits + 1));
  Pool::Awake awake(*model.pool, most_threads);
  Steps steps(model, first, decoding, awake);
  if (const char* wrong = steps.refusal()) return wrong;
  while (!steps.is_over())
    if (const char* wrong = steps.run()) return wrong;
  return nullptr;
}

}  // namespace
}  // namespace native

extern "C" {

const char* native_decode(native::Model* model, const native::SegmentPass* first, native::Decoding* decoding) {
  return native::guarded([&] { return native::decode(*model, *first, *decoding); });
}

}  // extern "C"
