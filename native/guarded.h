// For functions of the C interfaces: an exception that left one of them would end the process.
#pragma once

#include <exception>
#include <new>
#include <stdexcept>
#include <system_error>

namespace native {

// What the exception that is being handled means.
inline const char* failure() {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return "out of memory";
  } catch (const std::length_error&) {
    return "a size is beyond all memory";
  } catch (const std::system_error&) {
    return "the system refused a thread or a lock";
  } catch (...) {
    return "an unexpected exception";
  }
}

// Return what `body` returns: null, or what is wrong. An exception counts as wrong.
template <class Body>
const char* guarded(const Body& body) noexcept {
  try {
    return body();
  } catch (...) {
    return failure();
  }
}

// Return what `body` returns, or `failed` if it throws.
template <class Result, class Body>
Result guarded_or(Result failed, const Body& body) noexcept {
  try {
    return body();
  } catch (...) {
    return failed;
  }
}

// Return a new object, or null if it cannot be made.
template <class Made, class... Arguments>
Made* make(Arguments... arguments) noexcept {
  return guarded_or<Made*>(nullptr, [&] { return new Made(arguments...); });
}

}  // namespace native
