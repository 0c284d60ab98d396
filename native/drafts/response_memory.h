// Earlier responses to draft from: limited in size, and separate for each cache salt.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "drafts/automaton.h"

namespace drafts {

constexpr int kMemoryDepth = 64;
constexpr int64_t kNumSegments = 4;
constexpr size_t kMaxSegments = 4096;
// Tokens read under the lock, for which a proposal may have to wait.
constexpr size_t kMemoryPiece = 256;
// A salt has fewer texts than this: two neighbours hold more than a fourth of all tokens.
constexpr size_t kMostTexts = 2 * kNumSegments;

// The texts of one salt, the newest first.
using Texts = std::vector<const Automaton*>;

// Responses of one process; any thread may call.
class Memory {
 public:
  explicit Memory(size_t max_tokens) : max_tokens_(max_tokens) {}

  // Locked by whoever uses texts.
  std::mutex mutex;

  // Add a response; if it exceeds max_tokens, only its end.
  void learn(const std::string& salt, const int32_t* tokens, size_t count) {
    const size_t num_kept = std::min(count, max_tokens_);
    if (!num_kept) return;
    const std::lock_guard learning(learning_);  // so that nobody else forgets the text meanwhile
    Automaton* text = begin(salt, num_kept);
    for (size_t start = count - num_kept; start < count; start += kMemoryPiece) {
      const std::lock_guard lock(mutex);
      for (size_t i = start; i < std::min(start + kMemoryPiece, count); ++i) text->append(tokens[i]);
    }
  }

  Texts texts(const std::string& salt) const {
    auto found = by_salt_.find(salt);
    if (found == by_salt_.end()) return {};
    Texts texts;
    for (auto text = found->second.rbegin(); text != found->second.rend(); ++text) texts.push_back(text->get());
    return texts;
  }

 private:
  // Make room for a response and return the text to add it to.
  Automaton* begin(const std::string& salt, size_t count) {
    std::vector<std::unique_ptr<Automaton>> forgotten;  // freed after the lock, for which a proposal may have to wait
    const std::lock_guard lock(mutex);
    while (num_tokens_ + count > max_tokens_ || oldest_first_.size() >= kMaxSegments)
      forgotten.push_back(forget_oldest());
    num_tokens_ += count;
    auto& texts = by_salt_[salt];
    if (texts.empty() || texts.back()->num_tokens() + count > max_tokens_ / kNumSegments) {
      oldest_first_.push_back(salt);
      texts.push_back(std::make_unique<Automaton>(kMemoryDepth));
    }
    texts.back()->begin();
    return texts.back().get();
  }

  std::unique_ptr<Automaton> forget_oldest() {
    auto salt = by_salt_.find(oldest_first_.front());
    std::unique_ptr<Automaton> text = std::move(salt->second.front());
    num_tokens_ -= text->num_tokens();
    salt->second.pop_front();
    if (salt->second.empty()) by_salt_.erase(salt);
    oldest_first_.pop_front();
    return text;
  }

  const size_t max_tokens_;
  size_t num_tokens_ = 0;
  std::deque<std::string> oldest_first_;  // the salt of each text
  std::map<std::string, std::deque<std::unique_ptr<Automaton>>> by_salt_;
  std::mutex learning_;
};

// The responses that one request may draft from: those of its own salt.
struct Recollection {
  Memory* memory;
  std::string salt;

  void learn(const int32_t* tokens, size_t count) const { memory->learn(salt, tokens, count); }
};

// Call use(texts) while the texts that may be drafted from are locked; without a recollection there are none.
template <typename Use>
void with_texts(const Recollection* recollection, Use&& use) {
  if (!recollection) return use(Texts{});
  const std::lock_guard lock(recollection->memory->mutex);
  use(recollection->memory->texts(recollection->salt));
}

// The longest suffix of these tokens that occurs in one of the texts, in the first of equals.
inline std::pair<const Automaton*, Match> longest(const Texts& texts, const int* backwards, int count) {
  std::pair<const Automaton*, Match> best{nullptr, {}};
  for (const Automaton* text : texts) {
    Match match = text->find(backwards, count);
    if (match.length > best.second.length) best = {text, match};
  }
  return best;
}

}  // namespace drafts
