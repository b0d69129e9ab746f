// BEiT's rectangles in integers, so that every device draws the same ones: areas have 8 fractional bits, aspect ratios
// 16, and roots are integer roots.
#pragma once

#include <cmath>
#include <cstdint>

#include "keyed.h"

namespace dmjd {

// As in BEiT a view takes no more rectangles when this many attempts in a row hide nothing. The bound on all attempts is
// ours: their words are drawn ahead on CUDA, and no view was seen to need 100.
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

// floor(sqrt(value)): a float's guess, off by one at most, put right in integers.
DMJD_HD inline uint32_t integer_root(uint32_t value) {
  uint64_t root = static_cast<uint64_t>(sqrtf(static_cast<float>(value)));
  while (root * root > value) --root;
  while ((root + 1) * (root + 1) <= value) ++root;
  return static_cast<uint32_t>(root);
}

// sqrt(area * aspect) to the nearest integer; `area` has 8 fractional bits, `aspect` 16, and 4 x must be below 2^32.
DMJD_HD inline int rounded_side(uint64_t area, uint64_t aspect) {
  return static_cast<int>((integer_root(static_cast<uint32_t>(area * aspect >> 22)) + 1) / 2);
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
