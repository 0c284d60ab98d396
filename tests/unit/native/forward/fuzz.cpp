// Random models and passes, sound and damaged, through the C interface; built with sanitizers by test_sanitizers.py.
// Exits with 1 when a sound pass is refused, when nothing damaged was refused, or when threads change a bit.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "decode/decode.h"
#include "heads/small_heads.h"

extern "C" {
native::Model* native_new(const native::Shape*, int);
void native_delete(native::Model*);
const char* native_set_linear(native::Model*, int, const char*, const float*, int, int);
const char* native_set_quantized(native::Model*, int, const char*, int, const uint8_t*, int, int);
const char* native_set_vector(native::Model*, int, const char*, const float*, int);
void native_set_layer(native::Model*, int, int, int);
const char* native_add_rotation(native::Model*, const float*, int, float);
const char* native_forward(native::Model*, const native::Pass*);
const char* native_forward_segments(native::Model*, const native::SegmentPass*);
}

namespace {

std::mt19937 rng;

int below(int limit) { return int(rng() % unsigned(limit)); }

std::vector<float> random_floats(size_t count) {
  std::normal_distribution<float> normal(0.0f, 0.2f);
  std::vector<float> values(count);
  for (float& value : values) value = normal(rng);
  return values;
}

// Random blocks of a quantisation, whose scales are at most 0.03; some are not finite.
std::vector<uint8_t> random_blocks(int kind, size_t count) {
  const int size = native::block_bytes(native::Quantization(kind));
  std::vector<uint8_t> blocks(count * size);
  for (uint8_t& byte : blocks) byte = uint8_t(rng());
  for (size_t i = 0; i < count; ++i)
    for (int at = 1; at < (kind == int(native::Quantization::q4_1) ? 4 : 2); at += 2) blocks[i * size + at] &= 0xa3;
  if (count && !below(20)) blocks[below(int(count)) * size + 1] = 0x7c;
  return blocks;
}

native::Shape random_shape() {
  const int kv_heads = 1 + below(2), group = 1 + below(3);
  return {1 + below(2), 16 * (1 + below(3)), kv_heads * group, kv_heads, 16 * (1 + below(6)), 1 + below(70), 5 + below(60), 1e-6f, 0.25f,
          below(2) * 2.0f, below(2) * 3.0f, below(2) * 4.0f, below(2), 0, below(2)};
}

native::Model* random_model(const native::Shape& s, int feature_column) {
  native::Model* model = native_new(&s, 3);
  const int heads = s.num_heads + 2 * s.num_kv_heads, mlp = (s.mlp_size + 31) / 32 * 64;
  const int quantized = below(4);  // 3: no matrix is
  const auto linear = [&](int layer, const char* name, int outputs, int inputs) {
    const std::vector<uint8_t> blocks = random_blocks(quantized % 3, size_t(outputs) * (inputs / 32));
    if (quantized < 3 && !native_set_quantized(model, layer, name, quantized, blocks.data(), outputs, inputs)) return;
    native_set_linear(model, layer, name, random_floats(size_t(outputs) * inputs).data(), outputs, inputs);
  };
  const auto vector = [&](int layer, const char* name, int count) {
    native_set_vector(model, layer, name, random_floats(count).data(), count);
  };
  for (int layer = 0; layer < s.num_layers; ++layer) {
    linear(layer, "qkv", heads * s.head_dim, s.hidden_size);
    linear(layer, "output", s.hidden_size, s.num_heads * s.head_dim);
    linear(layer, "gate_up", mlp, s.hidden_size);
    linear(layer, "down", s.hidden_size, s.mlp_size);
    vector(layer, "input_norm", s.hidden_size);
    vector(layer, "mlp_norm", s.hidden_size);
    if (below(2)) vector(layer, "qkv_bias", heads * s.head_dim);
    if (below(2)) vector(layer, "post_attention_norm", s.hidden_size), vector(layer, "post_mlp_norm", s.hidden_size);
    if (below(2)) vector(layer, "query_norm", s.head_dim), vector(layer, "key_norm", s.head_dim);
    native_set_layer(model, layer, below(2) ? 1 + below(9) : 0, -1);
  }
  if (below(2)) linear(-1, "embedding", s.vocab_size, s.hidden_size);
  vector(-1, "final_norm", s.hidden_size);
  linear(-1, "lm_head", s.vocab_size, s.hidden_size);
  native_set_layer(model, -1, 0, feature_column);
  native_add_rotation(model, random_floats(s.head_dim / 2).data(), s.head_dim / 2, 1.0f);
  return model;
}

// The arrays of a pass, which point into it.
struct Arrays {
  std::vector<int32_t> ids, slots, context_starts, context_lens, context_slots, extra_starts{0}, extra_slots, logit_rows;
  std::vector<float> cosines, sines, cache, features, logits;
};

native::Pass random_pass(const native::Shape& s, int feature_width, Arrays& a) {
  const int rows = 1 + below(40), slots = 16 * (3 + below(4));
  for (int row = 0; row < rows; ++row) {
    a.ids.push_back(below(s.vocab_size));
    a.slots.push_back(row);
    a.context_starts.push_back(int(a.context_slots.size()));
    const int length = below(20);
    for (int i = 0; i < length; ++i) a.context_slots.push_back(below(slots));
    a.context_lens.push_back(length);
    for (int i = below(4); i > 0; --i) a.extra_slots.push_back(below(slots));
    a.extra_slots.push_back(row);
    a.extra_starts.push_back(int(a.extra_slots.size()));
    if (below(2)) a.logit_rows.push_back(row);
  }
  a.cosines = random_floats(size_t(rows) * s.head_dim / 2);
  a.sines = random_floats(size_t(rows) * s.head_dim / 2);
  a.cache = random_floats(size_t(s.num_layers) * 2 * s.num_kv_heads * slots * s.head_dim);
  a.features.resize(size_t(slots) * feature_width);
  a.logits.resize(a.logit_rows.size() * s.vocab_size);
  return {rows, int(a.logit_rows.size()), int(a.context_slots.size()), int(a.extra_slots.size()), slots, feature_width, 1,
          a.ids.data(), a.slots.data(), a.context_starts.data(), a.context_lens.data(), a.context_slots.data(),
          a.extra_starts.data(), a.extra_slots.data(), a.logit_rows.data(), a.cosines.data(), a.sines.data(),
          a.cache.data(), a.features.data(), a.logits.data(), nullptr, nullptr};
}

// Put a random number somewhere into one of the arrays of indices.
void damage(Arrays& a) {
  std::vector<int32_t>* arrays[] = {&a.ids, &a.slots, &a.context_starts, &a.context_lens, &a.context_slots,
                                    &a.extra_starts, &a.extra_slots, &a.logit_rows};
  std::vector<int32_t>& array = *arrays[below(8)];
  const int32_t values[] = {-1, 1 << 20, INT32_MAX, INT32_MIN, int32_t(rng())};
  if (!array.empty()) array[below(int(array.size()))] = values[below(5)];
}

// A pass over one to three sequences with trees, whose blocks lie anywhere.
struct Segments {
  std::vector<native::Segment> segments;
  std::vector<int32_t> ids, blocks, parents;
  std::vector<float> logits;

  native::SegmentPass pass(const Arrays& arrays, const native::Pass& rows, int block_tokens) {
    return {int(segments.size()), int(ids.size()), int(logits.size()), int(blocks.size()), int(parents.size()), block_tokens,
            rows.num_slots, rows.feature_width, 2, segments.data(), ids.data(), blocks.data(), parents.data(),
            const_cast<float*>(arrays.cache.data()), const_cast<float*>(arrays.features.data()), logits.data()};
  }
};

Segments random_segments(const native::Shape& s, int num_slots, int block_tokens) {
  Segments all;
  std::vector<int32_t> free_blocks(num_slots / block_tokens);
  for (size_t i = 0; i < free_blocks.size(); ++i) free_blocks[i] = int32_t(i);
  std::shuffle(free_blocks.begin(), free_blocks.end(), rng);
  for (int i = 1 + below(3); i > 0 && !free_blocks.empty(); --i) {
    const int num_blocks = 1 + below(int(free_blocks.size())), slots = num_blocks * block_tokens;
    const int last = 1 + below(slots), first = below(last), nodes = below(slots - last + 1);
    all.segments.push_back({first, last, nodes, num_blocks});
    for (int block = 0; block < num_blocks; ++block) all.blocks.push_back(free_blocks.back()), free_blocks.pop_back();
    for (int node = 0; node < nodes; ++node) all.parents.push_back(below(node + 1));
    for (int row = 0; row < last - first + nodes; ++row) all.ids.push_back(below(s.vocab_size));
  }
  all.logits.resize(all.segments.size() + all.parents.size());
  return all;
}

void damage(Segments& all) {
  int32_t* numbers = reinterpret_cast<int32_t*>(all.segments.data());
  const int32_t values[] = {-1, 1 << 20, INT32_MAX, INT32_MIN, int32_t(rng()), below(9)};
  const int32_t value = values[below(6)];
  switch (below(4)) {
    case 0: numbers[below(int(all.segments.size()) * 4)] = value; break;
    case 1: all.ids[below(int(all.ids.size()))] = value; break;
    case 2: all.blocks[below(int(all.blocks.size()))] = value; break;
    default: if (!all.parents.empty()) all.parents[below(int(all.parents.size()))] = value;
  }
}

// FNV-1a over the bits of logits, which all builds must share.
uint64_t checksum = 14695981039346656037u;

void count(const std::vector<float>& logits) {
  for (const float value : logits) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    checksum = (checksum ^ word) * 1099511628211u;
  }
}

// Decides greedily, as native/sampling/rules.cpp does at temperature 0.
const char* decide(sampling::Request* requests, size_t count, size_t vocab_size, int) {
  for (size_t i = 0; i < count; ++i) {
    sampling::Request& request = requests[i];
    request.path_len = 0;
    for (int node = 0, next = 0; next >= 0; node = next) {
      const float* row = static_cast<const float*>(request.logits) + size_t(node) * vocab_size;
      request.next_token = int32_t(std::max_element(row, row + vocab_size) - row);
      next = -1;
      for (int child = 1; child <= request.num_nodes; ++child)
        if (request.parents[child - 1] == node && request.tokens[child - 1] == request.next_token) next = child;
      if (next > 0) request.path[request.path_len++] = next;
    }
  }
  return nullptr;
}

// A random tree of at most max_nodes nodes. proposer: the size of the vocabulary.
int random_tree(void* proposer, const int32_t*, size_t, int max_nodes, int max_depth, const drafts::Tree* tree) {
  const int num_nodes = max_depth > 0 ? below(max_nodes + 1) : 0;
  std::vector<int> depths(1, 0);
  for (int node = 0; node < num_nodes; ++node) {
    int parent = below(node + 1);
    while (depths[parent] == max_depth) parent = tree->parents[parent - 1];
    depths.push_back(depths[parent] + 1);
    tree->tokens[node] = below(*static_cast<int*>(proposer)), tree->parents[node] = parent;
    tree->names[node] = 1, tree->probabilities[node] = 0.5;
  }
  return num_nodes;
}

// Random trees, as if they grew together.
const char* random_trees(drafts::JointTree* joint_trees, size_t count, const drafts::SharedPass* pass) {
  if (pass->num_requests > int(count) || pass->num_rows != pass->num_requests) return "a pass of growing trees has other rows";
  for (size_t i = 0; i < count; ++i) {
    drafts::JointTree& each = joint_trees[i];
    each.num_nodes = random_tree(each.growth, each.committed, each.num_committed, each.max_nodes, each.max_depth, &each.tree);
  }
  return nullptr;
}

constexpr int kMaxNodes = 12, kSteps = 10;

// A draft model with random weights and a cache of its own, or random Medusa heads, and how the sequences use it.
struct RandomDrafter {
  RandomDrafter(const native::Shape& shape, const native::Pass& rows, const Segments& all, int block_tokens)
      : is_head(rows.feature_width && below(2)), blocks(all.blocks) {
    const int width = shape.hidden_size, vocab_size = shape.vocab_size;
    if (is_head) {
      head = std::make_unique<native::Medusa>(width, vocab_size, 5, 1, 3);
      for (int i = 0; i < 6; ++i) {
        const int outputs = i < 5 ? width : vocab_size;
        const std::vector<float> weights = random_floats(size_t(outputs) * width);
        head->linears.push_back({native::Linear(weights.data(), outputs, width, shape.rounds_inputs), {}});
      }
      for (int node = below(kMaxNodes); node > 0; --node)
        parents.push_back(below(int(parents.size()) + 1)), ranks.push_back(below(vocab_size));
    } else {
      model = random_model(shape, -1);
      cache = random_floats(size_t(shape.num_layers) * 2 * shape.num_kv_heads * rows.num_slots * shape.head_dim);
    }
    drafter = {head.get(), model, is_head ? nullptr : cache.data(), nullptr, nullptr, nullptr, blocks.data(), parents.data(),
               ranks.data(), int(blocks.size()), int(parents.size()), 0, rows.num_slots, block_tokens, 1 << 20, 0, 2};
    int first_block = 0;
    for (const native::Segment& segment : all.segments) {
      native::DrafterUse use{0, segment.last, {}};
      use.call.ranking = {0.0, 1.0, 0.0, 1.0, 1.0, 7, 0, 1, 0, 0};
      use.call.max_s = 1e9, use.call.min_score = -1e9;
      use.call.max_nodes = kMaxNodes, use.call.max_depth = 1 + below(5), use.call.width = 1 + below(3);
      use.call.num_choices = int(parents.size());
      use.call.first_block = first_block, use.call.num_blocks = segment.num_blocks;
      first_block += segment.num_blocks;
      uses.push_back(use);
    }
  }

  ~RandomDrafter() {
    if (model) native_delete(model);
  }

  RandomDrafter(const RandomDrafter&) = delete;
  RandomDrafter& operator=(const RandomDrafter&) = delete;

  // Put a random number somewhere into the uses.
  void damage() {
    native::DrafterUse& use = uses[below(int(uses.size()))];
    int32_t* numbers[] = {&use.drafter, &use.num_read, &use.call.max_depth, &use.call.width, &use.call.first_choice,
                          &use.call.num_choices, &use.call.first_block, &use.call.num_blocks, &use.call.max_nodes};
    const int32_t values[] = {-1, 1 << 20, INT32_MAX, INT32_MIN, int32_t(rng()), below(9)};
    *numbers[below(9)] = values[below(6)];
  }

  bool is_head;
  std::unique_ptr<native::Medusa> head;
  native::Model* model = nullptr;
  std::vector<int32_t> blocks, parents, ranks;
  std::vector<float> cache;
  native::Drafter drafter{};
  std::vector<native::DrafterUse> uses;
};

// The tokens of each sequence after a cache, which is copied; their sequences begin with one row and perhaps a tree.
// num_methods: how many methods propose random trees, with kGrown one whose trees grow together; drafter: what drafts
// between them, null for nothing.
constexpr int kGrown = -1;

std::vector<std::vector<int32_t>> decoded(native::Model* model, Arrays arrays, const native::Pass& rows, Segments all,
                                          int block_tokens, int num_methods, const RandomDrafter* drafter, int num_threads,
                                          const char** wrong) {
  const int count = int(all.segments.size()), nodes = kSteps * kMaxNodes * count + int(all.parents.size());
  int vocab_size = model->shape.vocab_size;
  all.logits.resize(count + std::max(kMaxNodes * count, int(all.parents.size())));
  std::vector<float> logits(all.logits.size() * vocab_size);
  native::SegmentPass pass = all.pass(arrays, rows, block_tokens);
  pass.num_logits = pass.num_rows, pass.logits = logits.data();
  std::vector<sampling::Request> requests(count);
  std::vector<native::Member> members(std::abs(num_methods), native::Member{&vocab_size, kMaxNodes});
  if (drafter) members.insert(members.begin() + members.size() / 2, native::Member{nullptr, kMaxNodes});
  const native::Continuation further{members.data(), 0.0, 0.0, {-1, 0, {}}, nullptr, int(members.size()), 0, 0, 40,
                                     members.empty() ? 0 : kMaxNodes, 5, num_methods == kGrown};
  std::vector<native::Continuation> continuations(count, further);
  for (int i = 0; drafter && i < count; ++i) continuations[i].use = drafter->uses[i];
  std::vector<int32_t> by_segment(3 * kSteps * count), is_over(count), num_read(count), by_node(4 * nodes + 1), figures(4 * kSteps);
  const std::vector<int32_t> threads(14, num_threads);
  const int32_t interrupt = 0;
  const double second = 1.0;
  const auto row = [&](int i) { return by_segment.data() + i * kSteps * count; };
  const auto node = [&](int i) { return by_node.data() + i * nodes; };
  native::Decoding decoding{kSteps, 1 << 30, int(all.logits.size()), &interrupt, requests.data(), decide, random_tree, random_trees,
                            {&second, &second, 0.0, 1}, 1.0, continuations.data(), drafter ? &drafter->drafter : nullptr, threads.data(), threads.data(),
                            row(0), row(1), row(2), is_over.data(), num_read.data(), node(0), node(1), node(2), node(3),
                            figures.data(), drafter ? 1 : 0, 0};
  *wrong = native_decode(model, &pass, &decoding);
  std::vector<std::vector<int32_t>> tokens(count);
  if (*wrong) return tokens;
  const int32_t *path = decoding.paths, *drafted = decoding.node_tokens;
  std::vector<const int32_t*> trees(count);
  for (int i = 0, first = 0; i < count; first += all.segments[i++].num_nodes + 1) trees[i] = all.ids.data() + first + 1;
  for (int step = 0; step < decoding.num_made; ++step)
    for (int i = 0; i < count; ++i) {
      const int at = step * count + i;
      const int32_t* tree = trees[i];
      for (int level = 0; level < decoding.path_lens[at]; ++level) tokens[i].push_back(tree[*path++ - 1]);
      tokens[i].push_back(decoding.next_tokens[at]);
      trees[i] = drafted, drafted += decoding.num_nodes[at];
    }
  for (int i = 0; i < count; ++i)
    if (int(tokens[i].size()) >= further.max_tokens && !is_over[i]) *wrong = "a sequence with all its tokens is not over";
  return tokens;
}

// Compare decoding with random trees, with those of a drafter, and with both to decoding without; return what is wrong, or null.
const char* compare_decoding(native::Model* model, const Arrays& arrays, const native::Pass& rows, Segments all, int block_tokens) {
  Segments rooted = all;
  rooted.ids.clear();
  for (size_t i = 0, at = 0; i < all.segments.size(); ++i) {
    native::Segment& segment = rooted.segments[i];
    at += segment.last - segment.first - 1;  // the row of the last token is the root
    segment.first = segment.last - 1;
    rooted.ids.insert(rooted.ids.end(), all.ids.begin() + at, all.ids.begin() + at + segment.num_nodes + 1);
    at += segment.num_nodes + 1;
  }
  const char* wrong = nullptr;
  const auto drafted = decoded(model, arrays, rows, rooted, block_tokens, 2, nullptr, 2, &wrong);
  if (wrong) return wrong;
  Segments bare = rooted;
  bare.ids.clear(), bare.parents.clear();
  for (size_t i = 0, at = 0; i < rooted.segments.size(); at += rooted.segments[i++].num_nodes + 1)
    bare.ids.push_back(rooted.ids[at]), bare.segments[i].num_nodes = 0;
  const auto plain = decoded(model, arrays, rows, bare, block_tokens, 0, nullptr, 1, &wrong);
  if (wrong) return wrong;
  RandomDrafter drafter(model->shape, rows, bare, block_tokens);
  const auto by_drafter = decoded(model, arrays, rows, bare, block_tokens, 0, &drafter, 2, &wrong);
  if (wrong) return wrong;
  const auto by_union = decoded(model, arrays, rows, bare, block_tokens, 2, &drafter, 2, &wrong);
  if (wrong) return wrong;
  const auto grown = decoded(model, arrays, rows, rooted, block_tokens, kGrown, nullptr, 2, &wrong);
  if (wrong) return wrong;
  for (const auto& texts : {drafted, by_drafter, by_union, grown})
    for (size_t i = 0; i < plain.size(); ++i)
      if (!std::equal(plain[i].begin(), plain[i].begin() + std::min(plain[i].size(), texts[i].size()), texts[i].begin()))
        return "drafts changed a text";
  for (int bad = 0; bad < 10; ++bad) {
    const auto uses = drafter.uses;
    drafter.damage();
    decoded(model, arrays, rows, bare, block_tokens, 2 * below(2), &drafter, 1, &wrong);
    drafter.uses = uses;
  }
  for (int bad = 0; bad < 10; ++bad) {
    Segments damaged = rooted;
    damage(damaged);
    decoded(model, arrays, rows, damaged, block_tokens, below(2) ? 2 : kGrown, nullptr, 1, &wrong);  // two sequences may now write one slot
  }
  return nullptr;
}

int fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  const int num_rounds = argc > 1 ? std::atoi(argv[1]) : 200;
  int num_refused = 0;
  for (int round = 0; round < num_rounds; ++round) {
    rng.seed(round);
    const native::Shape shape = random_shape();
    const int feature_width = below(2) ? shape.hidden_size : 0;
    native::Model* model = random_model(shape, feature_width ? 0 : -1);
    Arrays arrays;
    native::Pass pass = random_pass(shape, feature_width, arrays);
    if (const char* wrong = native_forward(model, &pass)) return fail(wrong);
    const std::vector<float> alone = arrays.logits;
    count(alone);
    pass.num_threads = 3;
    if (native_forward(model, &pass)) return fail("three threads were refused");
    if (!alone.empty() && std::memcmp(alone.data(), arrays.logits.data(), alone.size() * sizeof(float)))
      return fail("three threads computed other bits than one");
    for (int i = 0; i < 10; ++i) {
      Arrays damaged = arrays;
      damage(damaged);
      const native::Pass bad = {pass.num_rows, pass.num_logits, pass.num_context_slots, pass.num_extra_slots,
          pass.num_slots, feature_width, 1, damaged.ids.data(), damaged.slots.data(), damaged.context_starts.data(),
          damaged.context_lens.data(), damaged.context_slots.data(), damaged.extra_starts.data(),
          damaged.extra_slots.data(), damaged.logit_rows.data(), damaged.cosines.data(), damaged.sines.data(),
          damaged.cache.data(), damaged.features.data(), damaged.logits.data(), nullptr, nullptr};
      num_refused += native_forward(model, &bad) != nullptr;
    }
    const int block_tokens = 1 + below(16);
    Segments sound = random_segments(shape, pass.num_slots, block_tokens);
    std::vector<float> logits(sound.logits.size() * shape.vocab_size);
    native::SegmentPass whole = sound.pass(arrays, pass, block_tokens);
    whole.logits = logits.data();
    if (const char* wrong = native_forward_segments(model, &whole)) return fail(wrong);
    count(logits);
    for (int i = 0; i < 10; ++i) {
      Segments damaged = sound;
      damage(damaged);
      native::SegmentPass bad = damaged.pass(arrays, pass, block_tokens);
      bad.logits = logits.data();
      bad.num_threads = 1;  // two sequences may now write one slot
      num_refused += native_forward_segments(model, &bad) != nullptr;
    }
    if (const char* wrong = compare_decoding(model, arrays, pass, sound, block_tokens)) return fail(wrong);
    native_delete(model);
  }
  std::printf("%d of %d damaged passes refused\n", num_refused, 20 * num_rounds);
  std::printf("checksum %016llx\n", static_cast<unsigned long long>(checksum));
  return num_refused ? 0 : 1;
}
