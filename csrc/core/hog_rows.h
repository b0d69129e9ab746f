// HOG on the CPU, one row of patches at a time. Pixels are taken row by row over all their channels at once: gradients,
// magnitudes and bins are loops over plain arrays that compilers vectorise; only the addition to the histograms is not.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "hog.h"

namespace dmjd {

// Pixels of any memory layout; strides in elements.
template <typename Pixel>
struct HogImages {
  const Pixel* data;
  int64_t image_stride, row_stride, column_stride, channel_stride;
};

// Loops over `count` lanes, a lane being a channel of a pixel. Neighbouring pixels are `step` lanes apart.
template <typename Real>
inline __attribute__((always_inline)) void hog_central_row(const Real* __restrict above, const Real* __restrict here,
                                                           const Real* __restrict below, int step, int count,
                                                           Real* __restrict rise, Real* __restrict run) {
  for (int i = 0; i < count; ++i) {
    rise[i] = below[i] - above[i];
    run[i] = here[i + step] - here[i - step];
  }
}

template <typename Real>
inline __attribute__((always_inline)) void hog_sobel_row(const Real* __restrict above, const Real* __restrict here,
                                                         const Real* __restrict below, int step, int count,
                                                         Real* __restrict rise, Real* __restrict run) {
  for (int i = 0; i < count; ++i) {
    const int left = i - step, right = i + step;
    rise[i] = hog_smooth(above[left], here[left], below[left]) - hog_smooth(above[right], here[right], below[right]);
    run[i] = hog_smooth(above[left] - below[left], above[i] - below[i], above[right] - below[right]);
  }
}

// Replaces rise by the magnitude; `slot` is where the pixel's bin lies, given where bin 0 does.
template <typename Real>
inline __attribute__((always_inline)) void hog_bin_row(Real* __restrict rise, const Real* __restrict run,
                                                       const int32_t* __restrict first, const HogEdges<Real>& edges,
                                                       int bins, int count, int32_t* __restrict slot) {
  for (int i = 0; i < count; ++i) slot[i] = 0;
  for (int k = 0; k < edges.count; ++k) {
    const Real tangent = edges.tangent[k];
    for (int i = 0; i < count; ++i) {
      const Real steep = std::fabs(rise[i]), edge = tangent * std::fabs(run[i]);
      const int mirrored = hog_mirrored(rise[i], run[i]);
      const int beyond = steep > edge, on = steep == edge;
      slot[i] += beyond | (on & ~mirrored);
    }
  }
  for (int i = 0; i < count; ++i) {
    const int mirrored = hog_mirrored(rise[i], run[i]), flat = rise[i] == 0, passed = slot[i];
    const int bin = mirrored ? bins - 1 - passed : passed;
    slot[i] = first[i] + (flat ? 0 : bin);
  }
  for (int i = 0; i < count; ++i) rise[i] = std::sqrt(rise[i] * rise[i] + run[i] * run[i]);
}

template <typename Real>
struct HogRow {
  const Real *above, *here, *below;
  int step, count;
  HogGradient gradient;
  const HogEdges<Real>* edges;
  int bins;
  const int32_t* first;
  Real *magnitude, *run;
  int32_t* slot;
};

template <typename Real>
inline __attribute__((always_inline)) void hog_row_lanes(const HogRow<Real>& row) {
  if (row.gradient == HogGradient::central) {
    hog_central_row(row.above, row.here, row.below, row.step, row.count, row.magnitude, row.run);
  } else {
    hog_sobel_row(row.above, row.here, row.below, row.step, row.count, row.magnitude, row.run);
  }
  hog_bin_row(row.magnitude, row.run, row.first, *row.edges, row.bins, row.count, row.slot);
}

DMJD_WIDE static void hog_row(const HogRow<float>& row) { hog_row_lanes(row); }
inline void hog_row(const HogRow<double>& row) { hog_row_lanes(row); }

DMJD_WIDE static void hog_widen(const uint8_t* pixels, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = pixels[i];
}
template <typename Pixel, typename Real>
inline void hog_widen(const Pixel* pixels, int64_t count, Real* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<Real>(pixels[i]);
}

// The scratch of one thread, and the walk over a row of patches.
template <typename Pixel, typename Real>
class HogRows {
 public:
  HogRows(const HogPlan& plan, const HogImages<Pixel>& images)
      : plan_(plan),
        images_(images),
        edges_(plan.bins),
        // Lanes run over the channels where these are neighbours in memory, else every channel is an image of its own.
        packed_(images.channel_stride == 1 && images.column_stride == plan.channels),
        step_(packed_ ? static_cast<int>(plan.channels) : 1),
        lanes_(static_cast<int>(plan.width) * step_),
        padded_(lanes_ + 2 * step_),
        pixels_(static_cast<size_t>(plan.cell + 2) * padded_),
        magnitude_(lanes_),
        run_(lanes_),
        slot_(lanes_),
        first_(lanes_),
        weight_(plan.gradient == HogGradient::sobel_gauss ? lanes_ : 0),
        sums_(plan.width / plan.cell * step_ * plan.bins) {
    for (int i = 0; i < lanes_; ++i) {
      first_[i] = static_cast<int32_t>((i / step_ / plan.cell * step_ + i % step_) * plan.bins);
    }
    for (size_t i = 0; i < weight_.size(); ++i) weight_[i] = window_.weight[i / step_ % kHogWindow];
  }

  // `out` is the first value of the row's first patch.
  template <typename Value>
  void run(int64_t image, int64_t patch_row, Value* out) {
    const Pixel* pixels = images_.data + image * images_.image_stride;
    for (int cell_row = 0; cell_row < plan_.cells_per_patch(); ++cell_row) {
      for (int64_t channel = 0; channel < plan_.channels; channel += step_) {
        sum_cells(pixels + channel * images_.channel_stride, patch_row * plan_.patch + cell_row * plan_.cell);
        write_cells(cell_row, channel, out);
      }
    }
  }

 private:
  void load_row(const Pixel* pixels, int64_t row, Real* out) const {
    pixels += hog_reflect(row, plan_.height) * images_.row_stride;
    if (packed_ || images_.column_stride == 1) {
      hog_widen(pixels, lanes_, out);
    } else {
      for (int i = 0; i < lanes_; ++i) out[i] = static_cast<Real>(pixels[i * images_.column_stride]);
    }
    const int64_t second = hog_reflect(-1, plan_.width) * step_, last = hog_reflect(plan_.width, plan_.width) * step_;
    for (int64_t c = 0; c < step_; ++c) {
      out[c - step_] = out[second + c];
      out[lanes_ + c] = out[last + c];
    }
  }

  // Into sums_ [cell column, channel, bin], from the cells whose first row is `top`.
  void sum_cells(const Pixel* pixels, int64_t top) {
    Real* here = pixels_.data() + step_;
    for (int r = 0; r < plan_.cell + 2; ++r) load_row(pixels, top + r - 1, here + r * padded_);
    std::fill(sums_.begin(), sums_.end(), Real(0));
    for (int r = 0; r < plan_.cell; ++r, here += padded_) {
      hog_row(HogRow<Real>{here, here + padded_, here + 2 * padded_, step_, lanes_, plan_.gradient, &edges_, plan_.bins,
                           first_.data(), magnitude_.data(), run_.data(), slot_.data()});
      if (!weight_.empty()) {
        const Real weight = window_.weight[(top + r) % kHogWindow];
        for (int i = 0; i < lanes_; ++i) magnitude_[i] *= weight * weight_[i];
      }
      const int32_t* slot = slot_.data();
      const Real* magnitude = magnitude_.data();
      Real* sums = sums_.data();
      for (int i = 0; i < lanes_; ++i) sums[slot[i]] += magnitude[i];
    }
  }

  template <typename Value>
  void write_cells(int cell_row, int64_t channel, Value* out) const {
    const int per_patch = plan_.cells_per_patch();
    const Real* sums = sums_.data();
    for (int64_t patch = 0; patch < plan_.patch_columns(); ++patch) {
      for (int cell_column = 0; cell_column < per_patch; ++cell_column) {
        for (int64_t c = 0; c < step_; ++c, sums += plan_.bins) {
          const HogScale<Real> scale = hog_scale(plan_, sums, plan_.bins, 1);
          const int64_t cell = cell_row * per_patch + cell_column;
          Value* values = out + patch * plan_.patch_values() + cell * plan_.cell_stride +
                          (channel + c) * plan_.channel_stride;
          for (int b = 0; b < plan_.bins; ++b) {
            values[b * plan_.bin_stride] = static_cast<Value>((sums[b] - scale.shift) * scale.factor);
          }
        }
      }
    }
  }

  const HogPlan plan_;
  const HogImages<Pixel> images_;
  const HogEdges<Real> edges_;
  const HogWindow<Real> window_;
  const bool packed_;
  const int step_, lanes_, padded_;
  std::vector<Real> pixels_, magnitude_, run_;
  std::vector<int32_t> slot_, first_;
  std::vector<Real> weight_, sums_;
};

}  // namespace dmjd
