// The k lowest of n random words, without sorting them.
#pragma once

#include <cstdint>

#include "macros.h"

namespace dmjd {

// The chosen words are those below `word`, and of those equal to it the first `ties` in order of units.
struct Cut {
  uint32_t word;
  int ties;
};

// The cut that chooses `count` of `eligible` words, 0 < count < eligible; below(t) counts the eligible words under t.
//
// Words are uniform, so their order statistics are nearly where a straight line puts them: interpolation takes about
// five counts where bisection takes twenty. How the cut is found does not matter for what it chooses, so the floating
// point here need not agree between devices.
template <typename CountBelow>
DMJD_HD inline Cut find_cut(int eligible, int count, CountBelow below) {
  constexpr int kInterpolations = 12;  // then bisect, so that no arrangement of words takes more than 32 further counts
  uint64_t low = 0, high = uint64_t{1} << 32;
  int under_low = 0, under_high = eligible;
  for (int round = 0; high - low > 1; ++round) {
    const uint64_t width = high - low;
    uint64_t step = width / 2;
    if (round < kInterpolations) {
      const float share = (count - under_low + 0.5f) / (under_high - under_low + 1);
      step = static_cast<uint64_t>(static_cast<float>(width) * share);
      step = step < 1 ? 1 : step < width ? step : width - 1;
    }
    const uint64_t middle = low + step;
    const int under = below(static_cast<uint32_t>(middle));
    if (under == count) return {static_cast<uint32_t>(middle), 0};
    if (under < count) {
      low = middle;
      under_low = under;
    } else {
      high = middle;
      under_high = under;
    }
  }
  return {static_cast<uint32_t>(low), count - under_low};
}

}  // namespace dmjd
