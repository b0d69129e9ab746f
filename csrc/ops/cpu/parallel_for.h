// Loops over torch's threads.
#pragma once

#include <atomic>
#include <exception>

#include "../common.h"

namespace dmjd {

// torch::stable::parallel_for, whose body may run out of memory: the exception is thrown again by the caller's thread, and
// does not pass through torch's frames (see `guarded`).
template <typename Body>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Body& body) {
  std::atomic_flag failed = ATOMIC_FLAG_INIT;
  std::exception_ptr thrown;
  torch::stable::parallel_for(begin, end, grain, [&](int64_t from, int64_t to) {
    try {
      body(from, to);
    } catch (...) {
      if (!failed.test_and_set()) thrown = std::current_exception();
    }
  });
  if (thrown) std::rethrow_exception(thrown);
}

}  // namespace dmjd
