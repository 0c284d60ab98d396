// The last tokens of a text.
#pragma once

#include <algorithm>
#include <array>

namespace drafts {

// The longest suffix that is looked up; longer agreement tells nothing more.
constexpr int kMaxMatch = 24;

// The last tokens of a text, the newest first.
struct Recent {
  std::array<int, kMaxMatch> backwards;
  int count;

  void add(int token) {
    std::copy_backward(backwards.begin(), backwards.end() - 1, backwards.end());
    backwards[0] = token;
    count = std::min(count + 1, kMaxMatch);
  }
};

}  // namespace drafts
