// Which Philox words a draw reads: the layout of dmjd/ops/philox.py.
//
//     counter = (block, domain << 24 | lane, sample id low 32 bits, sample id high 32 bits)       key = (seed, epoch)
#pragma once

#include "philox.h"

namespace dmjd {

// The members of philox.Domain that native code draws from.
enum class Domain : uint32_t { mask = 1, rectangle = 8 };

DMJD_HD inline PhiloxCounter keyed_counter(uint32_t block, Domain domain, uint32_t lane, int64_t sample) {
  const uint64_t id = static_cast<uint64_t>(sample);
  return {{block, static_cast<uint32_t>(domain) << 24 | lane, static_cast<uint32_t>(id),
           static_cast<uint32_t>(id >> 32)}};
}

// Uniform in [0, range) from a uniform word, for range <= 2^32.
DMJD_HD inline uint32_t bounded(uint32_t word, uint64_t range) {
  return static_cast<uint32_t>((word * range) >> 32);
}

}  // namespace dmjd
