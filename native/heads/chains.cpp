#include "heads/chains.h"

#include <algorithm>
#include <vector>

#include "guarded.h"

namespace native {
namespace {

const char* refusal(const Model& model, const SegmentPass& pass, const Chains& chains) {
  if (pass.num_nodes) return "num_nodes: a chain begins after a context";
  for (int i = 0; i < chains.num_chains; ++i) {
    const Chain& chain = chains.chains[i];
    if (chain.segment < 0 || chain.segment >= pass.num_segments) return "segment: no such segment";
    if (chain.length < 1 || chain.length > chains.max_length) return "length: beyond the array of tokens";
    const Segment& segment = pass.segments[chain.segment];
    if (int64_t(segment.last) + chain.length - 1 > int64_t(segment.num_blocks) * pass.block_tokens)
      return "length: beyond the segment's blocks";
  }
  return model.shape.vocab_size < 1 ? "the model has no vocabulary" : nullptr;
}

// A pass over the newest token of every chain that is not complete.
struct NextRows {
  std::vector<Segment> segments;
  std::vector<int32_t> ids, blocks;
  std::vector<int> chains;
  std::vector<float> logits;

  NextRows(const Model& model, const SegmentPass& first, const Chains& chains, int num_drafted) {
    std::vector<int> starts;
    for (int i = 0, start = 0; i < first.num_segments; start += first.segments[i++].num_blocks) starts.push_back(start);
    for (int i = 0; i < chains.num_chains; ++i) {
      const Chain& chain = chains.chains[i];
      if (chains.lengths[i] <= num_drafted) continue;
      const Segment& own = first.segments[chain.segment];
      const int last = own.last + num_drafted;
      segments.push_back({last - 1, last, 0, own.num_blocks});
      ids.push_back(chains.tokens[size_t(i) * chains.max_length + num_drafted - 1]);
      blocks.insert(blocks.end(), first.blocks + starts[chain.segment],
                    first.blocks + starts[chain.segment] + own.num_blocks);
      this->chains.push_back(i);
    }
    logits.resize(segments.size() * size_t(model.shape.vocab_size));
  }

  SegmentPass pass(const SegmentPass& first) {
    SegmentPass next = first;
    next.num_segments = next.num_rows = next.num_logits = int(segments.size());
    next.num_blocks = int(blocks.size());
    next.segments = segments.data();
    next.ids = ids.data();
    next.blocks = blocks.data();
    next.logits = logits.data();
    return next;
  }
};

const char* draft_chains(Model& model, const SegmentPass& first, const Chains& chains) {
  if (const char* wrong = SegmentRows::refusal(first)) return wrong;
  if (const char* wrong = refusal(model, first, chains)) return wrong;
  const Pass pass = model.segment_rows.fill(first);
  if (const char* wrong = model.refusal(pass)) return wrong;
  const Pool::Awake awake(*model.pool, pass.num_threads);
  model.forward(pass);

  const int vocab_size = model.shape.vocab_size;
  Ranker ranker;
  std::vector<double> scores(chains.num_chains, 0.0);
  const auto draft = [&](int number, int place, const float* logits) {
    const Chain& chain = chains.chains[number];
    Guess best{0, 0.0, 0.0};  // stays token 0 if the logits are NaN
    const int64_t position = int64_t(first.segments[chain.segment].last) + place;
    ranker.rank(logits, vocab_size, nullptr, chain.ranking, position, 1, &best);
    chains.tokens[size_t(number) * chains.max_length + place] = best.token;
    scores[number] += best.score;
    chains.lengths[number] = scores[number] < chain.min_score ? place + 1 : chain.length;
  };
  for (int i = 0; i < chains.num_chains; ++i)
    draft(i, 0, first.logits + size_t(chains.chains[i].segment) * vocab_size);
  for (int place = 1;; ++place) {
    NextRows next(model, first, chains, place);
    if (next.segments.empty()) return nullptr;
    const SegmentPass segments = next.pass(first);
    model.forward(model.segment_rows.fill(segments));
    for (size_t row = 0; row < next.chains.size(); ++row)
      draft(next.chains[row], place, next.logits.data() + row * vocab_size);
  }
}

}  // namespace
}  // namespace native

extern "C" {

const char* native_draft_chains(native::Model* model, const native::SegmentPass* first, const native::Chains* chains) {
  return native::guarded([&] { return native::draft_chains(*model, *first, *chains); });
}

}  // extern "C"
