#include "sampling/rules.h"

#include <algorithm>

namespace sampling {
namespace {

const void* row_of(const Request& request, int32_t row, size_t vocab_size) {
  const size_t width = request.type == kBFloat16 ? 2 : request.type == kFloat32 ? 4 : 8;
  return static_cast<const char*>(request.logits) + size_t(row) * vocab_size * width;
}

std::vector<int32_t> children_of(const Request& request, int32_t parent) {
  std::vector<int32_t> children;
  for (int32_t node = 1; node <= request.num_nodes; ++node)
    if (request.parents[node - 1] == parent) children.push_back(node);
  return children;
}

bool accepts(const Request& request, double probability, int64_t position, uint64_t child) {
  return uniform({request.seed, uint64_t(position), kAccept, uint64_t(request.prefix_len)}, child) < probability;
}

}  // namespace

const char* check(const Request& request, size_t vocab_size) {
  if (request.num_nodes < 0) return "the number of nodes is negative";
  if (request.type < kFloat32 || request.type > kFloat64) return "the type of the logits is unknown";
  if (request.rule < kCoupled || request.rule > kTypical) return "the rule is unknown";
  for (int32_t node = 1; node <= request.num_nodes; ++node) {
    const int32_t parent = request.parents[node - 1], token = request.tokens[node - 1];
    if (parent < 0 || parent >= node) return "a node's parent does not come before it";
    if (token < 0 || size_t(token) >= vocab_size) return "a node's token is outside the vocabulary";
    if (request.rule == kBlock && parent != node - 1) return "the tree of the rule block is no chain";
    if (!request.q_starts) continue;
    const int64_t first = request.q_starts[node - 1], last = request.q_starts[node];
    if (first < 0 || first >= last) return "a node's q is empty";
    for (int64_t i = first; i < last; ++i)
      if (request.q_ids[i] < 0 || size_t(request.q_ids[i]) >= vocab_size) return "an id of q is outside the vocabulary";
  }
  return nullptr;
}

Verifier::Verifier(size_t vocab_size)
    : vocab_size_(vocab_size), distribution_(vocab_size), p_(vocab_size), q_(vocab_size), residual_(vocab_size),
      scratch_(vocab_size) {}

void Verifier::verify(Request& request) {
  if (request.target_tokens) {
    std::vector<int64_t> depths(size_t(request.num_nodes) + 1, 0);
    for (int32_t node = 0; node <= request.num_nodes; ++node) {
      if (node > 0) depths[size_t(node)] = depths[size_t(request.parents[node - 1])] + 1;
      request.target_tokens[node] = target_token(request, node, request.prefix_len + depths[size_t(node)]);
    }
  }
  request.path_len = 0;
  switch (request.rule) {
    case kCoupled: return accept_coupled(request);
    case kRejection: return accept_rejection(request);
    case kBlock: return accept_block(request);
    case kTypical: return accept_typical(request);
  }
}

// argmax(log p + noise); at temperature 0 the argmax.
int32_t Verifier::target_token(const Request& request, int32_t row, int64_t position) {
  const void* logits = row_of(request, row, vocab_size_);
  if (request.temperature == 0.0) return int32_t(argmax(logits, request.type, vocab_size_));
  if (!distribution_.compute(logits, request.type, request.temperature, request.truncation())) return 0;
  const Distribution& found = distribution_;
  const Key key{request.seed, uint64_t(position), kTarget, 0};
  const int32_t* ids = found.is_dense ? nullptr : found.ids.data();
  const size_t place = race(key, found.weights.data(), ids, found.weights.size(), found.scale,
                            [&](size_t i) { return found.log_prob(i); });
  return ids ? ids[place] : int32_t(place);
}

// Only the rows on the path are sampled, unless all target tokens are wanted.
void Verifier::accept_coupled(Request& request) {
  for (int32_t node = 0;;) {
    const int32_t token = request.target_tokens ? request.target_tokens[node]
                                                : target_token(request, node, request.prefix_len + request.path_len);
    const auto children = children_of(request, node);
    const auto next = std::find_if(children.begin(), children.end(),
                                   [&](int32_t child) { return request.tokens[child - 1] == token; });
    request.next_token = token;
    if (next == children.end()) return;
    request.path[request.path_len++] = node = *next;
  }
}

void Verifier::accept_rejection(Request& request) {
  for (int32_t node = 0;;) {
    const int64_t position = request.prefix_len + request.path_len;
    load_p(request, node, p_);
    const auto children = children_of(request, node);
    node = request.q_starts && !children.empty() ? try_sampled(request, children, position)
                                                 : try_deterministic(request, children, position);
    if (node == 0) {
      request.next_token = recover(request, p_, position);
      return;
    }
    request.path[request.path_len++] = node;
  }
}

// The accepted child, or 0; then p_ is the residual.
int32_t Verifier::try_deterministic(const Request& request, const std::vector<int32_t>& children, int64_t position) {
  if (children.empty()) return 0;
  std::vector<double> probs(children.size()), masses(children.size());
  for (size_t i = 0; i < children.size(); ++i) probs[i] = p_[size_t(request.tokens[children[i] - 1])];
  for (const int32_t child : children) p_[size_t(request.tokens[child - 1])] = 0.0;
  // The remaining mass is added up from the last child to the first, so that the only token left has probability 1.
  double mass = sum(p_);
  for (size_t i = children.size(); i-- > 0;) masses[i] = mass += probs[i];
  for (size_t i = 0; i < children.size(); ++i)
    if (accepts(request, masses[i] > 0.0 ? probs[i] / masses[i] : 0.0, position, i)) return children[i];
  return 0;
}

int32_t Verifier::try_sampled(const Request& request, const std::vector<int32_t>& children, int64_t position) {
  load_q(request, children[0]);
  for (size_t i = 0; i < children.size(); ++i) {
    const size_t token = size_t(request.tokens[children[i] - 1]);
    if (accepts(request, p_[token] / q_[token], position, i)) return children[i];
    for (size_t id = 0; id < vocab_size_; ++id) p_[id] = std::max(p_[id] - q_[id], 0.0);
    normalise(p_);
    q_[token] = 0.0;
    normalise(q_);
  }
  return 0;
}

void Verifier::accept_block(Request& request) {
  double joint = 1.0;
  load_p(request, 0, p_);
  residual_ = p_;
  for (int32_t depth = 0; depth <= request.num_nodes; ++depth) {
    const bool is_last = depth == request.num_nodes;
    if (depth > 0) {
      const size_t token = size_t(request.tokens[depth - 1]);
      joint = std::min(joint * p_[token] / q_[token], 1.0);
      load_p(request, depth, p_);
    }
    double probability = joint;
    if (!is_last) {
      load_q(request, depth + 1);
      for (size_t id = 0; id < vocab_size_; ++id) scratch_[id] = std::max(joint * p_[id] - q_[id], 0.0);
    } else {
      scratch_ = p_;
    }
    std::vector<double>& gains = scratch_;
    if (!is_last && depth > 0) {
      std::vector<double>& halves = distribution_.weights;
      halves.resize(vocab_size_);
      const double gain = total(gains.data(), vocab_size_, halves.data());
      const double mass = gain + (1.0 - joint);
      probability = mass > 0.0 ? gain / mass : 1.0;
    }
    if (depth > 0 && !accepts(request, probability, request.prefix_len + depth - 1, 0)) continue;
    request.path_len = depth;
    residual_.swap(gains);
  }
  for (int32_t depth = 0; depth < request.path_len; ++depth) request.path[depth] = depth + 1;
  request.next_token = recover(request, residual_, request.prefix_len + request.path_len);
}

void Verifier::accept_typical(Request& request) {
  const size_t num_rows = size_t(request.num_nodes) + 1;
  // By node: the length of the path to it, -1 if it is not accepted, and the path's log-probability.
  std::vector<int32_t> lengths(num_rows, -1);
  std::vector<double> log_probs(num_rows, 0.0);
  lengths[0] = 0;
  int32_t best = 0;
  for (int32_t parent = 0; parent <= request.num_nodes; ++parent) {
    const auto children = children_of(request, parent);
    if (lengths[size_t(parent)] < 0 || children.empty()) continue;
    load_p(request, parent, p_);
    for (size_t id = 0; id < vocab_size_; ++id) residual_[id] = p_[id] * (p_[id] > 0.0 ? log(p_[id]) : 0.0);
    const double limit = std::min(request.epsilon, request.delta * exp(sum(residual_)));
    for (const int32_t child : children) {
      const double prob = p_[size_t(request.tokens[child - 1])];
      if (!(prob > limit)) continue;
      lengths[size_t(child)] = lengths[size_t(parent)] + 1;
      log_probs[size_t(child)] = log_probs[size_t(parent)] + log(prob);
    }
  }
  for (int32_t node = 1; node <= request.num_nodes; ++node) {
    const size_t own = size_t(node), other = size_t(best);
    if (lengths[own] > lengths[other] || (lengths[own] == lengths[other] && log_probs[own] > log_probs[other]))
      best = node;
  }
  request.path_len = lengths[size_t(best)];
  for (int32_t node = best, at = request.path_len; at-- > 0; node = request.parents[node - 1]) request.path[at] = node;
  load_p(request, best, p_);
  request.next_token = recover(request, p_, request.prefix_len + request.path_len);
}

void Verifier::load_p(const Request& request, int32_t row, std::vector<double>& p) {
  const void* logits = row_of(request, row, vocab_size_);
  const double temperature = request.temperature;
  if (temperature > 0.0 && distribution_.compute(logits, request.type, temperature, request.truncation()))
    return distribution_.write_probs(p.data());
  std::fill(p.begin(), p.end(), 0.0);
  p[argmax(logits, request.type, vocab_size_)] = 1.0;
}

// The q of a node; that of a deterministic draft is the point mass on its token.
void Verifier::load_q(const Request& request, int32_t node) {
  std::fill(q_.begin(), q_.end(), 0.0);
  if (!request.q_starts) {
    q_[size_t(request.tokens[node - 1])] = 1.0;
    return;
  }
  const int64_t first = request.q_starts[node - 1], last = request.q_starts[node];
  std::vector<double> weights(request.q_weights + first, request.q_weights + last), scratch(weights.size());
  const double mass = total(weights.data(), weights.size(), scratch.data());
  for (int64_t i = first; i < last; ++i) q_[size_t(request.q_ids[i])] = weights[size_t(i - first)] / mass;
}

void Verifier::normalise(std::vector<double>& x) {
  const double mass = sum(x);
  if (mass > 0.0)
    for (double& each : x) each /= mass;
}

int32_t Verifier::recover(const Request& request, const std::vector<double>& p, int64_t position) {
  const Key key{request.seed, uint64_t(position), kRecover, uint64_t(request.prefix_len)};
  return int32_t(race(key, p.data(), nullptr, p.size(), 1.0, [&](size_t i) { return log(p[i]); }));
}

}  // namespace sampling
