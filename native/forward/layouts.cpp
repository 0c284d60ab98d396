// The sizes of the structures that Python declares too (ctypes), for the test that compares the declarations.

#include <cstddef>
#include <map>
#include <string>

#include "guarded.h"
#include "heads/chains.h"
#include "decode/decode.h"
#include "heads/drafters.h"
#include "heads/heads.h"

namespace {

size_t size_of(const char* name) {
  static const std::map<std::string, size_t> sizes{
      {"Shape", sizeof(native::Shape)},           {"SegmentPass", sizeof(native::SegmentPass)},
      {"Ranking", sizeof(native::Ranking)},       {"DraftCall", sizeof(native::DraftCall)},
      {"Drafting", sizeof(native::Drafting)},     {"Chain", sizeof(native::Chain)},
      {"Chains", sizeof(native::Chains)},         {"Continuation", sizeof(native::Continuation)},
      {"Decoding", sizeof(native::Decoding)},     {"Drafter", sizeof(native::Drafter)},
      {"DrafterUse", sizeof(native::DrafterUse)}, {"Tree", sizeof(drafts::Tree)},
      {"Request", sizeof(sampling::Request)},     {"Member", sizeof(native::Member)},
  };
  const auto found = sizes.find(name);
  return found == sizes.end() ? 0 : found->second;
}

}  // namespace

// Return the size of a structure in bytes, 0 for an unknown name.
extern "C" size_t native_size_of(const char* name) {
  return native::guarded_or<size_t>(0, [&] { return size_of(name); });
}
