// The growth of `auto` for Python: the trees of orchestrator/proposers/growth.py, bit for bit.
//
// A process has one Estimates; a request has one Growth, which one thread at a time may use.

#include <cstddef>
#include <cstdint>

#include "growth.h"

using namespace drafts;

extern "C" {

void* drafts_new_estimates() { return new Estimates; }

void drafts_free_estimates(void* estimates) { delete static_cast<Estimates*>(estimates); }

void* drafts_new(void* estimates, const void* tables, const int32_t* prediction, size_t size, int is_chain) {
  return new Growth(static_cast<Estimates*>(estimates), static_cast<const Tables*>(tables), prediction, size, is_chain);
}

void drafts_free(void* growth) { delete static_cast<Growth*>(growth); }

int drafts_grow(void* growth, const int32_t* read, size_t count, int range, int place, int agreement, int max_nodes, int max_depth,
                const double* seconds, const double* row_s, double others_tokens, double rate, double node_s,
                int32_t* tokens, int32_t* parents, int32_t* names, double* chances) {
  auto* each = static_cast<Growth*>(growth);
  each->read(read, count, range);
  Costs costs{seconds, row_s, others_tokens, rate, node_s};
  return each->grow(place, agreement, max_nodes, max_depth, costs, {tokens, parents, names, chances});
}

void drafts_learn(void* growth, const int32_t* tokens, size_t count) {
  static_cast<Growth*>(growth)->learn(tokens, count);
}

// Learn from the tokens that a step has committed, and grow the tree behind them, without a prediction (drafts::Next).
int drafts_next(void* growth, const int32_t* committed, size_t count, int max_nodes, int max_depth, const Costs* costs,
                const Tree* tree) {
  auto* each = static_cast<Growth*>(growth);
  each->learn(committed, count);
  each->read(committed, count);
  return each->grow(-1, 0, max_nodes, max_depth, *costs, *tree);
}

}  // extern "C"
