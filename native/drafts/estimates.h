// How likely a candidate is to be the next token: counts of all requests, corrected by how a request's own text differs.
// The counts are the Beta–Bernoulli estimate with a geometric discount (Garivier and Moulines 2011, arXiv:0805.3415).
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace drafts {

constexpr double kDiscount = 0.998, kPriorWeight = 4.0, kRequestDiscount = 0.95, kRequestWeight = 2.0;

// The kind of candidate that an estimate is for: its sources as bits, the evidence of the first source, the grade of
// the candidates before it, and the request's temperature range.
struct Kind {
  int names, evidence, grade, range;
  uint64_t key() const {
    return uint64_t(evidence) << 24 | uint64_t(range) << 16 | uint64_t(grade) << 8 | uint64_t(names);
  }
};

inline double corrected(double probability, double odds_ratio) {
  double odds = probability * odds_ratio;
  return odds / (1.0 - probability + odds);
}

// Discounted counts of accepted and tested tokens by kind, of all requests.
class Estimates {
 public:
  // Locked by whoever reads or changes the counts: requests share them, and native code runs without Python's lock.
  std::mutex mutex;

  void observe(const Kind& kind, bool is_accepted) {
    auto& [accepted, tested] = counts_[kind.key()];
    accepted = kDiscount * accepted + double(is_accepted);
    tested = kDiscount * tested + 1.0;
  }

  double probability(const Kind& kind, double prior) const {
    auto found = counts_.find(kind.key());
    auto [accepted, tested] = found == counts_.end() ? std::pair(0.0, 0.0) : found->second;
    return (accepted + kPriorWeight * prior) / (tested + kPriorWeight);
  }

 private:
  std::unordered_map<uint64_t, std::pair<double, double>> counts_;
};

// The odds of one source's candidates in one request, relative to the odds that the counts predict.
class RequestOdds {
 public:
  double ratio() const { return accepted_ * expected_rejected_ / (rejected_ * expected_accepted_); }

  void observe(double probability, bool is_accepted) {
    discount(accepted_, double(is_accepted));
    discount(rejected_, 1.0 - double(is_accepted));
    discount(expected_accepted_, probability);
    discount(expected_rejected_, 1.0 - probability);
  }

 private:
  static void discount(double& count, double outcome) {
    count = kRequestWeight + kRequestDiscount * (count - kRequestWeight) + outcome;
  }

  double accepted_ = kRequestWeight, rejected_ = kRequestWeight;
  double expected_accepted_ = kRequestWeight, expected_rejected_ = kRequestWeight;
};

}  // namespace drafts
