// The C interface of the native proposers: those that need only tokens.
//
// A process has one Estimates and at most one Memory; a request has one Proposer, which one thread at a time may use. If
// memory runs out, a new object is null and a number of nodes is -1.

#include <cstddef>
#include <cstdint>
#include <string>

#include "drafts/drafts.h"
#include "drafts/growth.h"
#include "guarded.h"
#include "drafts/predicted.h"
#include "drafts/prompt_lookup.h"
#include "drafts/response_memory.h"
#include "drafts/suffix.h"

using namespace drafts;
using native::guarded_or;
using native::make;

namespace {

// A proposer of this kind, which the caller knows it to be.
template <typename Kind>
Kind* as(void* proposer) {
  return static_cast<Kind*>(static_cast<Proposer*>(proposer));
}

}  // namespace

extern "C" {

void* drafts_new_estimates() { return make<Estimates>(); }

void drafts_free_estimates(void* estimates) { delete static_cast<Estimates*>(estimates); }

void* drafts_new_memory(size_t max_tokens) { return make<Memory>(max_tokens); }

void drafts_free_memory(void* memory) { delete static_cast<Memory*>(memory); }

void* drafts_new_recollection(void* memory, const char* salt, size_t size) {
  return guarded_or<void*>(nullptr, [&] {
    return new Recollection{static_cast<Memory*>(memory), std::string(salt, size)};
  });
}

void drafts_free_recollection(void* recollection) { delete static_cast<Recollection*>(recollection); }

// Returns null, or what is wrong.
const char* drafts_remember(void* recollection, const int32_t* tokens, size_t count) {
  return native::guarded([&] { return static_cast<Recollection*>(recollection)->learn(tokens, count), nullptr; });
}

// Write what followed all of these tokens, the newest first, and how often, to two arrays of `capacity`, a token once for
// each text that has it; return how many there are.
int drafts_remembered(void* recollection, const int32_t* backwards, int count, int32_t* tokens, int32_t* times,
                      int capacity) {
  return guarded_or(-1, [&] {
    int num_found = 0;
    with_texts(static_cast<Recollection*>(recollection), [&](const Texts& texts) {
      for (const Automaton* text : texts) {
        const Match match = text->find(backwards, count);
        if (!match.state || match.length < count) continue;
        text->each_follower(match, [&](int token, int seen, size_t) {
          if (num_found < capacity) tokens[num_found] = token, times[num_found++] = seen;
        });
      }
    });
    return num_found;
  });
}

// corpus, recollection: null = the request does not draft from it.
Proposer* drafts_new_growth(void* estimates, const void* tables, const void* corpus, const void* recollection,
                            int is_chain) {
  return make<Growth>(static_cast<Estimates*>(estimates), static_cast<const Tables*>(tables),
                      static_cast<const Corpus*>(corpus), static_cast<const Recollection*>(recollection), is_chain);
}

Proposer* drafts_new_predicted(const PredictedOptions* options) { return make<Predicted>(*options); }

Proposer* drafts_new_prompt_lookup(const PromptLookupOptions* options) { return make<PromptLookup>(*options); }

Proposer* drafts_new_suffix(const SuffixOptions* options, const void* recollection, const void* corpus) {
  return make<Suffix>(*options, static_cast<const Recollection*>(recollection), static_cast<const Corpus*>(corpus));
}

void drafts_free(void* proposer) { delete static_cast<Proposer*>(proposer); }

int drafts_next(void* proposer, const int32_t* committed, size_t count, int max_nodes, int max_depth,
                const Tree* tree) {
  return guarded_or(-1, [&] {
    return static_cast<Proposer*>(proposer)->next(committed, count, max_nodes, max_depth, *tree);
  });
}

// Read a part of the output that the client expects, before any output; returns null, or what is wrong.
const char* drafts_read_prediction(void* proposer, const int32_t* tokens, size_t count) {
  return native::guarded([&] { return as<PredictionProposer>(proposer)->read_prediction(tokens, count), nullptr; });
}

// Read a part of the prompt, before the first tree; returns null, or what is wrong.
const char* drafts_read_prompt(void* proposer, const int32_t* tokens, size_t count) {
  return native::guarded([&] { return as<PredictionProposer>(proposer)->read_prompt(tokens, count), nullptr; });
}

// Set what the next trees of a growth are sized by (`Growth::size_by`); returns null, or what is wrong.
const char* drafts_size_by(void* growth, const double* seconds, size_t count, double others_tokens, double rate_to_beat,
                           int range) {
  return native::guarded([&] {
    return as<Growth>(growth)->size_by(seconds, count, others_tokens, rate_to_beat, range), nullptr;
  });
}

}  // extern "C"
