// The C interface of the native proposers: those of orchestrator/proposers that need only tokens, bit for bit.
//
// A process has one Estimates; a request has one Proposer, which one thread at a time may use. If
// memory runs out, a new object is null and a number of nodes is -1.

#include <cstddef>
#include <cstdint>

#include "drafts.h"
#include "growth.h"
#include "guarded.h"
#include "prompt_lookup.h"
#include "suffix.h"

using namespace drafts;
using native::guarded_or;
using native::make;

namespace {

Growth* growth_of(void* proposer) { return static_cast<Growth*>(static_cast<Proposer*>(proposer)); }

}  // namespace

extern "C" {

void* drafts_new_estimates() { return make<Estimates>(); }

void drafts_free_estimates(void* estimates) { delete static_cast<Estimates*>(estimates); }

Proposer* drafts_new_growth(void* estimates, const void* tables, const void* corpus, const int32_t* prediction,
                            size_t size, int is_chain) {
  return make<Growth>(static_cast<Estimates*>(estimates), static_cast<const Tables*>(tables),
                      static_cast<const Corpus*>(corpus), prediction, size, is_chain);
}

Proposer* drafts_new_prompt_lookup(const PromptLookupOptions* options) { return make<PromptLookup>(*options); }

Proposer* drafts_new_suffix(const SuffixOptions* options) { return make<Suffix>(*options); }

void drafts_free(void* proposer) { delete static_cast<Proposer*>(proposer); }

int drafts_next(void* proposer, const int32_t* committed, size_t count, int max_nodes, int max_depth, const Costs* costs,
                const Tree* tree) {
  return guarded_or(-1, [&] {
    return static_cast<Proposer*>(proposer)->next(committed, count, max_nodes, max_depth, costs, *tree);
  });
}

// Read the beginning of a text whose rest `drafts_grow` reads at first; returns null, or what is wrong.
const char* drafts_read_beginning(void* growth, const int32_t* tokens, size_t count) {
  return native::guarded([&] { return growth_of(growth)->read_beginning(tokens, count), nullptr; });
}

// As `drafts_next`, for a request that may have a prediction. range: of temperature. place: index in the prediction;
// agreement: tokens before it that fit.
int drafts_grow(void* growth, const int32_t* read, size_t count, int range, int place, int agreement, int max_nodes,
                int max_depth, const Costs* costs, const Tree* tree) {
  return guarded_or(-1, [&] {
    growth_of(growth)->read(read, count, range);
    return growth_of(growth)->grow(place, agreement, max_nodes, max_depth, *costs, *tree);
  });
}

// Returns null, or what is wrong.
const char* drafts_learn(void* growth, const int32_t* tokens, size_t count) {
  return native::guarded([&] { return growth_of(growth)->learn(tokens, count), nullptr; });
}

}  // extern "C"
