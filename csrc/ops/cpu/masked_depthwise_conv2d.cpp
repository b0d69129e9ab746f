// The depthwise convolution of a masked map on its visible tokens. The CUDA file says why one window serves forward and
// both gradients; here it is gathered, widened to the type of sums, for a few channels of one token at a time.
#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "../dtypes.h"
#include "parallel_for.h"

// The baseline of x86-64 has vectors of four floats and no fused multiply-add; the loader picks what the machine has.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 12
#define DMJD_VECTORS __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define DMJD_VECTORS
#endif
// What a function in several versions calls must be compiled into each of them.
#define DMJD_INLINE inline __attribute__((always_inline))

namespace dmjd {
namespace {

constexpr int64_t kTokensPerChunk = 64;  // a chunk is one thread's work, and one partial sum of the weight's gradient
constexpr int64_t kReduceGrain = 1 << 8;

// One pixel of a window: a few channels in a vector that the compiler splits if need be. Not wider than AVX2's, since
// compilers split those through memory.
template <typename Sum>
struct alignas(32) Lanes {  // said aloud: GCC 12 forgets it when it allocates a std::vector of them
  static constexpr int kCount = 32 / sizeof(Sum);
  typedef Sum Vector __attribute__((vector_size(32)));
  Vector of;

  // `count` channels from `from` on, zero behind.
  template <typename T>
  DMJD_INLINE void load(const T* from, int count) {
    Sum wide[kCount] = {};
    if (count == kCount) {
      for (int lane = 0; lane < kCount; ++lane) wide[lane] = static_cast<Sum>(from[lane]);
    } else {
      for (int lane = 0; lane < count; ++lane) wide[lane] = static_cast<Sum>(from[lane]);
    }
    std::memcpy(&of, wide, sizeof(of));
  }

  template <typename T>
  DMJD_INLINE void store(T* to, int count) const {
    Sum wide[kCount];
    std::memcpy(wide, &of, sizeof(of));
    if (count == kCount) {
      for (int lane = 0; lane < kCount; ++lane) to[lane] = static_cast<T>(wide[lane]);
    } else {
      for (int lane = 0; lane < count; ++lane) to[lane] = static_cast<T>(wide[lane]);
    }
  }
};

// The taps' weighted sum for `kRun` neighbouring pixels from `window` on; `width` is the window's.
template <typename Sum, int kRun>
DMJD_INLINE void convolve_run(const Lanes<Sum>* window, int width, const Lanes<Sum>* filter, const Lanes<Sum>& bias,
                              int k, Lanes<Sum>* result) {
  typename Lanes<Sum>::Vector sum[kRun];
  for (int run = 0; run < kRun; ++run) sum[run] = bias.of;
  for (int row = 0; row < k; ++row) {
    for (int column = 0; column < k; ++column) {
      const Lanes<Sum>* const from = window + row * width + column;
      for (int run = 0; run < kRun; ++run) sum[run] += filter[row * k + column].of * from[run].of;
    }
  }
  for (int run = 0; run < kRun; ++run) result[run].of = sum[run];
}

template <typename Sum>
DMJD_INLINE void convolve(const Lanes<Sum>* window, const Lanes<Sum>* filter, const Lanes<Sum>& bias, int q, int k,
                          Lanes<Sum>* result) {
  const int width = q + k - 1;
  for (int y = 0; y < q; ++y, window += width, result += q) {
    int x = 0;
    for (; x + 4 <= q; x += 4) convolve_run<Sum, 4>(window + x, width, filter, bias, k, result + x);
    for (; x + 2 <= q; x += 2) convolve_run<Sum, 2>(window + x, width, filter, bias, k, result + x);
    for (; x < q; ++x) convolve_run<Sum, 1>(window + x, width, filter, bias, k, result + x);
  }
}

// filter_sum[tap] += sum over the token's pixels of own[pixel] * window[pixel + tap], a row of taps at a time.
template <typename Sum, int kK>
DMJD_INLINE void correlate_taps(const Lanes<Sum>* window, const Lanes<Sum>* own, int q, Lanes<Sum>* filter_sum) {
  const int width = q + kK - 1;
  for (int row = 0; row < kK; ++row) {
    typename Lanes<Sum>::Vector sum[kK] = {};
    for (int y = 0; y < q; ++y) {
      for (int x = 0; x < q; ++x) {
        const Lanes<Sum>* const from = window + (y + row) * width + x;
        for (int column = 0; column < kK; ++column) sum[column] += own[y * q + x].of * from[column].of;
      }
    }
    for (int column = 0; column < kK; ++column) filter_sum[row * kK + column].of += sum[column];
  }
}

// As above for every k there is; behind the taps, the sum of the token's own part of the window.
template <typename Sum>
DMJD_INLINE void correlate(const Lanes<Sum>* window, const Lanes<Sum>* own, int q, int k, Lanes<Sum>* filter_sum) {
  if (k == 3) correlate_taps<Sum, 3>(window, own, q, filter_sum);
  if (k == 5) correlate_taps<Sum, 5>(window, own, q, filter_sum);
  if (k == 7) correlate_taps<Sum, 7>(window, own, q, filter_sum);
  for (int y = 0; y < q; ++y) {
    for (int x = 0; x < q; ++x) filter_sum[k * k].of += window[(y + k / 2) * (q + k - 1) + x + k / 2].of;
  }
}

// What both directions know. `source` is what the window slides over: x forward, the result's gradient backward.
template <typename T>
struct Problem {
  using Sum = dmjd::Sum<T>;
  static constexpr int64_t kLanes = Lanes<Sum>::kCount;

  const T* source;
  const T* x;  // backward only
  T* result;   // the convolution, or grad_x
  const int64_t* visible;
  const int64_t* restore;
  int64_t tokens, per_view, grid_h, grid_w, channels;
  int q, k;

  int64_t slices() const { return (channels + kLanes - 1) / kLanes; }
  int64_t chunks() const { return (tokens + kTokensPerChunk - 1) / kTokensPerChunk; }

  // Where in [views * V] the token lies that is (dy, dx) away from `token`; -1 where hidden or outside the grid.
  int64_t neighbour(int64_t token, int64_t dy, int64_t dx) const {
    const int64_t view = token / per_view;
    const int64_t row = visible[token] / grid_w + dy, column = visible[token] % grid_w + dx;
    if (row < 0 || row >= grid_h || column < 0 || column >= grid_w) return -1;
    const int64_t slot = restore[(view * grid_h + row) * grid_w + column];
    return slot >= 0 && slot < per_view ? view * per_view + slot : -1;
  }
};

// Slides over the tokens of one chunk. `filter` is [slices, taps]; `bias`, [slices]. Backward, `filter_sum`
// ([slices, taps + 1], zero at first) takes the sums of x times the window.
template <typename T, typename Sum>
DMJD_VECTORS void slide(const Problem<T>& problem, int64_t chunk, const Lanes<Sum>* filter, const Lanes<Sum>* bias,
                        Lanes<Sum>* filter_sum) {
  constexpr int64_t kLanes = Problem<T>::kLanes;
  const int q = problem.q, k = problem.k, half = k / 2, taps = k * k, pixels = q * q;
  const int width = q + k - 1, reach = (half + q - 1) / q, span = 2 * reach + 1;
  const int64_t channels = problem.channels;
  std::vector<Lanes<Sum>> window(width * width), own(pixels), sums(pixels);
  // Of each pixel of the window, where its channels start; null where hidden.
  std::vector<const T*> from(width * width);
  const int64_t end = std::min(problem.tokens, (chunk + 1) * kTokensPerChunk);
  for (int64_t token = chunk * kTokensPerChunk; token < end; ++token) {
    for (int i = 0; i < span * span; ++i) {
      const int dy = i / span - reach, dx = i % span - reach;
      const int64_t found = problem.neighbour(token, dy, dx);
      for (int row = std::max(0, dy * q + half); row < std::min(width, (dy + 1) * q + half); ++row) {
        for (int column = std::max(0, dx * q + half); column < std::min(width, (dx + 1) * q + half); ++column) {
          const int pixel = (row - half - dy * q) * q + column - half - dx * q;
          from[row * width + column] = found < 0 ? nullptr : problem.source + (found * pixels + pixel) * channels;
        }
      }
    }
    for (int64_t slice = 0; slice < problem.slices(); ++slice) {
      const int64_t channel = slice * kLanes, here = token * pixels * channels + channel;
      const int count = static_cast<int>(std::min<int64_t>(kLanes, channels - channel));
      for (int i = 0; i < width * width; ++i) {
        if (from[i] == nullptr) {
          window[i] = Lanes<Sum>();
        } else {
          window[i].load(from[i] + channel, count);
        }
      }
      convolve(window.data(), filter + slice * taps, bias[slice], q, k, sums.data());
      for (int i = 0; i < pixels; ++i) sums[i].store(problem.result + here + i * channels, count);
      if (problem.x != nullptr) {
        for (int i = 0; i < pixels; ++i) own[i].load(problem.x + here + i * channels, count);
        correlate(window.data(), own.data(), q, k, filter_sum + slice * (taps + 1));
      }
    }
  }
}

// The weight as [slices, taps]; its taps in reverse for a gradient.
template <typename Sum>
std::vector<Lanes<Sum>> make_filter(const Sum* weight, int64_t channels, int64_t taps, bool reverse) {
  constexpr int64_t kLanes = Lanes<Sum>::kCount;
  std::vector<Lanes<Sum>> filter((channels + kLanes - 1) / kLanes * taps);
  for (int64_t channel = 0; channel < channels; ++channel) {
    for (int64_t tap = 0; tap < taps; ++tap) {
      filter[channel / kLanes * taps + tap].of[channel % kLanes] =
          weight[channel * taps + (reverse ? taps - 1 - tap : tap)];
    }
  }
  return filter;
}

template <typename T>
Problem<T> make_problem(const Tensor& source, const Tensor* x, const Tensor& result, const Tensor& visible,
                        const Tensor& restore, const Tensor& weight, int64_t grid_h, int64_t grid_w, int64_t q) {
  Problem<T> problem = {};
  problem.source = static_cast<const T*>(source.const_data_ptr());
  problem.x = x == nullptr ? nullptr : static_cast<const T*>(x->const_data_ptr());
  problem.result = static_cast<T*>(result.mutable_data_ptr());
  problem.visible = visible.const_data_ptr<int64_t>();
  problem.restore = restore.const_data_ptr<int64_t>();
  problem.tokens = source.size(0) * source.size(1);
  problem.per_view = source.size(1);
  problem.grid_h = grid_h;
  problem.grid_w = grid_w;
  problem.channels = source.size(3);
  problem.q = static_cast<int>(q);
  problem.k = static_cast<int>(weight.size(1));
  return problem;
}

Tensor masked_depthwise_conv2d_cpu(const Tensor& x, const Tensor& visible, const Tensor& restore, const Tensor& weight,
                                   const std::optional<Tensor>& bias, int64_t grid_h, int64_t grid_w, int64_t q) {
  const Tensor pixels = torch::stable::contiguous(x), ids = torch::stable::contiguous(visible);
  const Tensor slots = torch::stable::contiguous(restore), weights = torch::stable::contiguous(weight);
  std::optional<Tensor> biases;
  if (bias.has_value()) biases = torch::stable::contiguous(*bias);
  Tensor result = torch::stable::new_empty(pixels, pixels.sizes());

  for_floating_type(pixels.scalar_type(), "masked_depthwise_conv2d", [&](auto element) {
    using T = decltype(element);
    using Sum = dmjd::Sum<T>;
    const auto problem = make_problem<T>(pixels, nullptr, result, ids, slots, weights, grid_h, grid_w, q);
    const auto filter = make_filter(weights.const_data_ptr<Sum>(), problem.channels, problem.k * problem.k, false);
    std::vector<Lanes<Sum>> lane_bias(problem.slices());
    for (int64_t channel = 0; biases && channel < problem.channels; ++channel) {
      lane_bias[channel / problem.kLanes].of[channel % problem.kLanes] = biases->const_data_ptr<Sum>()[channel];
    }
    parallel_for(0, problem.chunks(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        slide<T, Sum>(problem, chunk, filter.data(), lane_bias.data(), nullptr);
      }
    });
  });
  return result;
}

std::tuple<Tensor, Tensor, Tensor> masked_depthwise_conv2d_backward_cpu(const Tensor& grad, const Tensor& x,
                                                                        const Tensor& visible, const Tensor& restore,
                                                                        const Tensor& weight, int64_t grid_h,
                                                                        int64_t grid_w, int64_t q) {
  const Tensor pixels = torch::stable::contiguous(x), grads = torch::stable::contiguous(grad);
  const Tensor ids = torch::stable::contiguous(visible), slots = torch::stable::contiguous(restore);
  const Tensor weights = torch::stable::contiguous(weight);
  Tensor grad_x = torch::stable::new_empty(pixels, pixels.sizes());
  Tensor grad_weight = torch::stable::new_empty(weights, weights.sizes());
  Tensor grad_bias = torch::stable::new_empty(weights, {weights.size(0)});

  for_floating_type(pixels.scalar_type(), "masked_depthwise_conv2d", [&](auto element) {
    using T = decltype(element);
    using Sum = dmjd::Sum<T>;
    const auto problem = make_problem<T>(grads, &pixels, grad_x, ids, slots, weights, grid_h, grid_w, q);
    const int64_t taps = problem.k * problem.k, chunks = problem.chunks();
    const auto filter = make_filter(weights.const_data_ptr<Sum>(), problem.channels, taps, true);
    const std::vector<Lanes<Sum>> no_bias(problem.slices());
    // One partial sum a chunk, whatever the number of threads, so that gradients do not depend on it.
    const int64_t size = problem.slices() * (taps + 1);
    std::vector<Lanes<Sum>> partials(chunks * size), total(size);
    parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        slide<T, Sum>(problem, chunk, filter.data(), no_bias.data(), partials.data() + chunk * size);
      }
    });
    parallel_for(0, size, kReduceGrain, [&](int64_t begin, int64_t end) {
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        for (int64_t at = begin; at < end; ++at) total[at].of += partials[chunk * size + at].of;
      }
    });
    Sum* const weight_out = grad_weight.mutable_data_ptr<Sum>();
    Sum* const bias_out = grad_bias.mutable_data_ptr<Sum>();
    for (int64_t channel = 0; channel < problem.channels; ++channel) {
      const Lanes<Sum>* const sums = total.data() + channel / problem.kLanes * (taps + 1);
      const int lane = static_cast<int>(channel % problem.kLanes);
      for (int64_t tap = 0; tap < taps; ++tap) weight_out[channel * taps + taps - 1 - tap] = sums[tap].of[lane];
      bias_out[channel] = sums[taps].of[lane];
    }
  });
  return {grad_x, grad_weight, grad_bias};
}

}  // namespace
}  // namespace dmjd

STABLE_TORCH_LIBRARY_IMPL(dmjd, CPU, m) {
  m.impl("masked_depthwise_conv2d", DMJD_BOX(&dmjd::masked_depthwise_conv2d_cpu));
  m.impl("masked_depthwise_conv2d_backward", DMJD_BOX(&dmjd::masked_depthwise_conv2d_backward_cpu));
}
