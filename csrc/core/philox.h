// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11).
//
// The arithmetic exists once, here, and is compiled into the CPU op, the CUDA kernel and the numpy module, so that they
// agree by construction. The PyTorch reference in dmjd/ops/philox.py is the independent second definition.
#pragma once

#include <cstdint>

#include "macros.h"

namespace dmjd {

struct PhiloxCounter {
  uint32_t word[4];
};

struct PhiloxKey {
  uint32_t word[2];
};

// High and low 32 bits of a * b.
DMJD_HD inline void multiply_wide(uint32_t a, uint32_t b, uint32_t& high, uint32_t& low) {
  const uint64_t product = static_cast<uint64_t>(a) * b;
  high = static_cast<uint32_t>(product >> 32);
  low = static_cast<uint32_t>(product);
}

DMJD_HD inline PhiloxCounter philox4x32(PhiloxCounter counter, PhiloxKey key) {
  for (int round = 0; round < 10; ++round) {
    uint32_t high0, low0, high1, low1;
    multiply_wide(0xD2511F53u, counter.word[0], high0, low0);
    multiply_wide(0xCD9E8D57u, counter.word[2], high1, low1);
    counter = {{high1 ^ counter.word[1] ^ key.word[0], low1, high0 ^ counter.word[3] ^ key.word[1], low0}};
    key.word[0] += 0x9E3779B9u;
    key.word[1] += 0xBB67AE85u;
  }
  return counter;
}

}  // namespace dmjd
