// csrc/core against published numbers. No torch, no framework: a failed check prints itself and fails the test.
#include <cmath>
#include <cstdio>

#include "../core/hog_rows.h"
#include "../core/philox.h"

namespace {

int failures = 0;

// Known-answer vectors of Random123 (kat_vectors, "philox4x32 10").
void check_philox(const char* name, dmjd::PhiloxCounter counter, dmjd::PhiloxKey key, dmjd::PhiloxCounter expected) {
  const dmjd::PhiloxCounter got = dmjd::philox4x32(counter, key);
  for (int i = 0; i < 4; ++i) {
    if (got.word[i] != expected.word[i]) {
      std::printf("philox4x32, %s, word %d: %08x, expected %08x\n", name, i, got.word[i], expected.word[i]);
      ++failures;
    }
  }
}

// The bin of every gradient that uint8 images have, against its angle. Orientations on an edge are those of multiples of
// 45 degrees (no other has a rational tangent), for which the angle in degrees is exact.
void check_hog_bins(int bins) {
  const dmjd::HogEdges<float> edges(bins);
  for (int rise = -255; rise <= 255; ++rise) {
    for (int run = -255; run <= 255; ++run) {
      double degrees = std::atan2(rise, run) * (180 / 3.141592653589793238);
      if (rise == 0) degrees = 0;
      if (rise == run) degrees = rise == 0 ? 0 : 45;
      if (rise == -run && rise != 0) degrees = 135;
      if (run == 0 && rise != 0) degrees = 90;
      if (degrees < 0) degrees += 180;
      const int expected = static_cast<int>(std::floor(degrees * bins / 180));
      const int got = dmjd::hog_bin<float>(static_cast<float>(rise), static_cast<float>(run), edges, bins);
      if (got != expected) {
        std::printf("hog_bin(%d, %d) of %d bins: %d, expected %d\n", rise, run, bins, got, expected);
        ++failures;
      }
    }
  }
}

// A vertical edge of height 100 between columns 7 and 8: one column of each cell sees it, so bin 0 of all holds 100 / 8.
void check_hog_of_an_edge() {
  uint8_t image[16 * 16];
  for (int i = 0; i < 16 * 16; ++i) image[i] = i % 16 < 8 ? 0 : 100;
  const dmjd::HogPlan plan(16, 16, 1, 8, 9, 16, "dmjd", "none");
  float values[36];
  dmjd::HogRows<uint8_t, float>(plan, {image, 16 * 16, 16, 1, 1}).run(0, 0, values);
  for (int i = 0; i < 36; ++i) {
    const float expected = i % 9 == 0 ? 12.5f : 0.0f;
    if (values[i] != expected) {
      std::printf("hog of an edge, value %d: %g, expected %g\n", i, values[i], expected);
      ++failures;
    }
  }
}

}  // namespace

int main() {
  check_philox("zeros", {{0, 0, 0, 0}}, {{0, 0}}, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}});
  check_philox("ones", {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}}, {{0xffffffff, 0xffffffff}},
               {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}});
  check_philox("pi", {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, {{0xa4093822, 0x299f31d0}},
               {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}});
  for (int bins = 1; bins <= 12; ++bins) check_hog_bins(bins);
  check_hog_of_an_edge();
  return failures == 0 ? 0 : 1;
}
