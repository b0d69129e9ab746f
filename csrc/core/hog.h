// Histograms of oriented gradients: what the CPU op, the CUDA kernels and the numpy module share.
//
// dmjd/ops/hog.py is the independent second definition and says where the conventions come from.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#include "macros.h"

namespace dmjd {

enum class HogGradient { central, sobel, sobel_gauss };
enum class HogNorm { none, l2, layernorm };

constexpr int kHogMaxBins = 180;
constexpr int kHogWindow = 16;  // pixels; the standard deviation is half of it

// Tangents of the bin edges between 0 and 90 degrees, both excluded.
template <typename Real>
struct HogEdges {
  int count;
  Real tangent[(kHogMaxBins - 1) / 2];

  explicit HogEdges(int bins) : count((bins - 1) / 2), tangent() {
    for (int k = 1; k <= count; ++k) {
      // 45 degrees is the only one that a float can hold, and pi / 4 is not exact.
      tangent[k - 1] = 4 * k == bins ? Real(1) : static_cast<Real>(std::tan(3.141592653589793 * k / bins));
    }
  }
};

// Whether the orientation atan2(rise, run) lies in (90, 180), or on 90 where an even number of bins has an edge.
template <typename Real>
DMJD_HD inline bool hog_mirrored(Real rise, Real run) {
  return (run == 0) | ((rise < 0) != (run < 0));  // not ||, which compilers would not vectorise
}

// Bin of atan2(rise, run) modulo 180 degrees: how many edges lie at or below it. An edge in the upper half mirrors one
// in the lower, and what lies on it is beyond it seen from the other side: hence the strict comparison. Each product is
// rounded once and compared, so that contraction to fused multiply-adds cannot change the result.
template <typename Real>
DMJD_HD inline int hog_bin(Real rise, Real run, const HogEdges<Real>& edges, int bins) {
  if (rise == 0) return 0;
  const bool mirrored = hog_mirrored(rise, run);
  const Real steep = rise < 0 ? -rise : rise;
  const Real flat = run < 0 ? -run : run;
  int passed = 0;
  for (int k = 0; k < edges.count; ++k) {
    const Real edge = edges.tangent[k] * flat;
    passed += mirrored ? steep > edge : steep >= edge;
  }
  return mirrored ? bins - 1 - passed : passed;
}

// Coordinate of the pixel that stands for `i`, one beyond the border at most: the image reflected without its edge. It
// makes central differences across a border 0, also in an image of one pixel.
DMJD_HD inline int64_t hog_reflect(int64_t i, int64_t size) {
  if (i < 0) return size > 1 ? 1 : 0;
  if (i >= size) return size > 1 ? size - 2 : 0;
  return i;
}

// The four sums of Sobel's operator. The order of their terms is part of the definition; doubling is exact, so a fused
// multiply-add gives the same.
template <typename Real>
DMJD_HD inline Real hog_smooth(Real before, Real here, Real after) {
  return before + 2 * here + after;
}

// One axis of the window of maskfeat_gauss, of unit sum.
template <typename Real>
struct HogWindow {
  Real weight[kHogWindow];

  HogWindow() : weight() {
    double exact[kHogWindow], sum = 0;
    for (int i = 0; i < kHogWindow; ++i) {
      const double position = (i - (kHogWindow - 1) / 2.0) / (kHogWindow / 2);
      sum += exact[i] = std::exp(-0.5 * position * position);
    }
    for (int i = 0; i < kHogWindow; ++i) weight[i] = static_cast<Real>(exact[i] / sum);
  }
};

// Everything but the pixels: sizes, conventions, and where values go in the result [B, N, patch values].
struct HogPlan {
  int64_t height, width, channels;
  int cell, bins, patch;
  HogGradient gradient;
  HogNorm norm;
  bool mean;       // of the magnitudes over a cell, else their sum
  bool unit_norm;  // l2 as F.normalize has it
  int64_t cell_stride, bin_stride, channel_stride;  // of a value within its patch

  HogPlan(int64_t height, int64_t width, int64_t channels, int cell, int bins, int patch, const std::string& flavour,
          const std::string& norm)
      : height(height),
        width(width),
        channels(channels),
        cell(cell),
        bins(bins),
        patch(patch),
        gradient(flavour == "maskfeat"         ? HogGradient::sobel
                 : flavour == "maskfeat_gauss" ? HogGradient::sobel_gauss
                                               : HogGradient::central),
        norm(norm == "l2"          ? HogNorm::l2
             : norm == "layernorm" ? HogNorm::layernorm
                                   : HogNorm::none),
        mean(gradient == HogGradient::central),
        unit_norm(!mean) {
    const int64_t cells = static_cast<int64_t>(cells_per_patch()) * cells_per_patch();
    if (flavour == "dmjd") {
      cell_stride = bins * channels, bin_stride = channels, channel_stride = 1;
    } else if (flavour == "skimage") {
      cell_stride = bins, bin_stride = 1, channel_stride = bins * cells;
    } else {
      cell_stride = 1, bin_stride = cells, channel_stride = bins * cells;
    }
  }

  DMJD_HD int cells_per_patch() const { return patch / cell; }
  DMJD_HD int64_t patch_rows() const { return height / patch; }
  DMJD_HD int64_t patch_columns() const { return width / patch; }
  DMJD_HD int64_t patch_values() const {
    return static_cast<int64_t>(cells_per_patch()) * cells_per_patch() * bins * channels;
  }
};

// What turns the summed magnitudes of one (channel, cell) into its values: (sum - shift) * factor.
template <typename Real>
struct HogScale {
  Real shift, factor;
};

DMJD_HD inline float hog_rsqrt(float x) {
#ifdef __CUDA_ARCH__
  return rsqrtf(x);
#else
  return 1 / std::sqrt(x);
#endif
}
DMJD_HD inline double hog_rsqrt(double x) { return 1 / std::sqrt(x); }

// `sums` holds `bins` values `stride` apart.
template <typename Real>
DMJD_HD inline HogScale<Real> hog_scale(const HogPlan& plan, const Real* sums, int bins, int stride) {
  const Real mean_factor = plan.mean ? Real(1) / (plan.cell * plan.cell) : Real(1);
  if (plan.norm == HogNorm::none) return {0, mean_factor};
  const Real per_bin = Real(1) / bins;
  Real shift = 0;
  if (plan.norm == HogNorm::layernorm) {
    for (int b = 0; b < bins; ++b) shift += sums[b * stride];
    shift *= per_bin;
  }
  Real squares = 0;
  for (int b = 0; b < bins; ++b) {
    const Real value = (sums[b * stride] - shift) * mean_factor;
    squares += value * value;
  }
  if (plan.norm == HogNorm::layernorm) {
    squares = squares * per_bin + Real(1e-5);
  } else if (plan.unit_norm) {
    squares = squares > Real(1e-24) ? squares : Real(1e-24);
  } else {
    squares += Real(1e-10);
  }
  return {shift, mean_factor * hog_rsqrt(squares)};
}

}  // namespace dmjd
