// csrc/core's HOG against its definition. No torch, no framework: a failed check prints itself and fails the test.
#include <cmath>
#include <cstdio>

#include "../core/hog_rows.h"

namespace {

int failures = 0;

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

// The CUDA kernel for bytes takes |rise| - tangent * |run| for the indicator of an edge passed, after it has multiplied
// pixels by 2^20: the difference has to be at least 1 or at most 0, and 0 where both are 0 alone. Sobel sums of bytes go
// to 1020, and the differences are exact in float64.
void check_margins_of_byte_gradients() {
  const dmjd::HogEdges<float> edges(9);
  for (int k = 0; k < edges.count; ++k) {
    for (int rise = 0; rise <= 1020; ++rise) {
      for (int run = 0; run <= 1020; ++run) {
        const double beyond = (rise - static_cast<double>(edges.tangent[k]) * run) * (1 << 20);
        if ((beyond > 0 && beyond < 1) || (beyond == 0 && (rise != 0 || run != 0))) {
          std::printf("gradient (%d, %d) is too near edge %d\n", rise, run, k);
          ++failures;
        }
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
  for (int bins = 1; bins <= 12; ++bins) check_hog_bins(bins);
  check_margins_of_byte_gradients();
  check_hog_of_an_edge();
  return failures == 0 ? 0 : 1;
}
