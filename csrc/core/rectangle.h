// BEiT's rectangles in integers, so that every device draws the same ones: areas have 8 fractional bits, aspect ratios
// 16, and roots are integer roots.
#pragma once

#include <cmath>

#include "keyed.h"

namespace dmjd {

// As in BEiT a view is given up when this many attempts in a row hide nothing. The bound on all attempts of a view is
// ours: twice what a view was ever seen to need, and what a device draws ahead of time.
constexpr int kMaxFailures = 10;
constexpr int kMaxAttempts = 128;

// What rectangles may look like on a grid of units; aspects[count - 1 - i] is the inverse of aspects[i].
struct RectangleLaw {
  int rows, columns;
  int smallest;
  int count;
  const int* aspects;
};

// Units [top, top + height) x [left, left + width); a height of 0 says that the draw does not fit the grid.
struct Rectangle {
  int top, left, height, width;

  DMJD_HD int units() const { return height * width; }
};

// The nearest integer to sqrt(area * aspect), halves up: with s = isqrt(floor(4 x)) it is (s + 1) / 2.
DMJD_HD inline int rounded_side(uint64_t area, uint64_t aspect) {
  // Exact: up to 2^52 the correctly rounded root of an integer reaches no integer that the true root does not.
  const double four_times = static_cast<double>(area * aspect >> 22);
  return (static_cast<int>(sqrt(four_times)) + 1) / 2;
}

// The four words are (area, aspect, top, left); `remaining` is how many units the view has still to hide.
DMJD_HD inline Rectangle draw_rectangle(const PhiloxCounter& words, int remaining, const RectangleLaw& law) {
  const uint64_t low = remaining < law.smallest ? remaining : law.smallest;
  const uint64_t high = remaining < law.smallest ? law.smallest : remaining;
  const uint64_t area = (low << 8) + bounded(words.word[0], ((high - low) << 8) + 1);
  const int aspect = static_cast<int>(bounded(words.word[1], law.count));
  const int height = rounded_side(area, law.aspects[aspect]);
  const int width = rounded_side(area, law.aspects[law.count - 1 - aspect]);
  if (height < 1 || width < 1 || height >= law.rows || width >= law.columns) return {0, 0, 0, 0};
  return {static_cast<int>(bounded(words.word[2], law.rows - height + 1)),
          static_cast<int>(bounded(words.word[3], law.columns - width + 1)), height, width};
}

}  // namespace dmjd
