// The depthwise convolution of a masked map on its visible tokens. The CUDA file says why one window serves forward and
// both gradients; here it is gathered, widened to the type of sums, for a few channels of one token at a time.
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "../common.h"

// The baseline of x86-64 has vectors of four floats and no fused multiply-add; the loader picks what the machine has.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define DMJD_VECTORS __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#else
#define DMJD_VECTORS
#endif

namespace dmjd {
namespace {

using torch::headeronly::ScalarType;

constexpr int kLanes = 16;                 // channels of a window
constexpr int64_t kTokensPerChunk = 64;    // a chunk is one thread's work, and one partial sum of the weight's gradient
constexpr int64_t kReduceGrain = 1 << 12;

// Adds, for `kRun` neighbouring pixels from `window` on, the taps' weighted sum. `width` is the window's.
template <typename Sum, int kRun>
inline __attribute__((always_inline)) void convolve_run(const Sum* __restrict window, int64_t width,
                                                        const Sum* __restrict filter, const Sum* __restrict bias, int k,
                                                        Sum* __restrict result) {
  Sum sum[kRun][kLanes];
  for (int run = 0; run < kRun; ++run) {
    for (int lane = 0; lane < kLanes; ++lane) sum[run][lane] = bias[lane];
  }
  for (int row = 0; row < k; ++row) {
    for (int column = 0; column < k; ++column) {
      const Sum* const from = window + (row * width + column) * kLanes;
      const Sum* const weight = filter + (row * k + column) * kLanes;
      for (int run = 0; run < kRun; ++run) {
        for (int lane = 0; lane < kLanes; ++lane) sum[run][lane] += weight[lane] * from[run * kLanes + lane];
      }
    }
  }
  for (int run = 0; run < kRun; ++run) {
    for (int lane = 0; lane < kLanes; ++lane) result[run * kLanes + lane] = sum[run][lane];
  }
}

template <typename Sum>
inline __attribute__((always_inline)) void convolve(const Sum* window, const Sum* filter, const Sum* bias, int q, int k,
                                                    Sum* result) {
  const int64_t width = q + k - 1;
  for (int y = 0; y < q; ++y) {
    int x = 0;
    for (; x + 4 <= q; x += 4) {
      convolve_run<Sum, 4>(window + (y * width + x) * kLanes, width, filter, bias, k, result + (y * q + x) * kLanes);
    }
    for (; x + 2 <= q; x += 2) {
      convolve_run<Sum, 2>(window + (y * width + x) * kLanes, width, filter, bias, k, result + (y * q + x) * kLanes);
    }
    for (; x < q; ++x) {
      convolve_run<Sum, 1>(window + (y * width + x) * kLanes, width, filter, bias, k, result + (y * q + x) * kLanes);
    }
  }
}

// filter_sum[tap] += sum over the token's pixels of own[pixel] * window[pixel + tap]; behind the taps, the sum of the
// token's own part of the window.
template <typename Sum>
inline __attribute__((always_inline)) void correlate(const Sum* __restrict window, const Sum* __restrict own, int q, int k,
                                                     Sum* __restrict filter_sum) {
  const int64_t width = q + k - 1;
  for (int row = 0; row < k; ++row) {
    for (int column = 0; column < k; ++column) {
      Sum sum[kLanes] = {};
      for (int y = 0; y < q; ++y) {
        const Sum* const from = window + ((y + row) * width + column) * kLanes;
        for (int i = 0; i < q * kLanes; i += kLanes) {
          for (int lane = 0; lane < kLanes; ++lane) sum[lane] += own[y * q * kLanes + i + lane] * from[i + lane];
        }
      }
      Sum* const total = filter_sum + (row * k + column) * kLanes;
      for (int lane = 0; lane < kLanes; ++lane) total[lane] += sum[lane];
    }
  }
  Sum* const total = filter_sum + k * k * kLanes;
  for (int y = 0; y < q; ++y) {
    for (int x = 0; x < q; ++x) {
      const Sum* const from = window + ((y + k / 2) * width + x + k / 2) * kLanes;
      for (int lane = 0; lane < kLanes; ++lane) total[lane] += from[lane];
    }
  }
}

DMJD_VECTORS void slide(const float* window, const float* filter, const float* bias, const float* own, int q, int k,
                        float* result, float* filter_sum) {
  convolve(window, filter, bias, q, k, result);
  if (own != nullptr) correlate(window, own, q, k, filter_sum);
}

DMJD_VECTORS void slide(const double* window, const double* filter, const double* bias, const double* own, int q, int k,
                        double* result, double* filter_sum) {
  convolve(window, filter, bias, q, k, result);
  if (own != nullptr) correlate(window, own, q, k, filter_sum);
}

template <typename T>
struct SumOf {
  using type = float;
};
template <>
struct SumOf<double> {
  using type = double;
};

// What both directions know. `source` is what the window slides over: x forward, the result's gradient backward.
template <typename T>
struct Problem {
  using Sum = typename SumOf<T>::type;

  const T* source;
  const T* x;  // backward only
  T* result;   // the convolution, or grad_x
  const int64_t* visible;
  const int64_t* restore;
  int64_t tokens, per_view, grid_h, grid_w, channels;
  int q, k;

  int64_t slices() const { return (channels + kLanes - 1) / kLanes; }
  int64_t chunks() const { return (tokens + kTokensPerChunk - 1) / kTokensPerChunk; }
  int64_t pixels() const { return static_cast<int64_t>(q) * q; }

  // Where in [views * V] the token lies that is (dy, dx) away from `token`; -1 where hidden or outside the grid.
  int64_t neighbour(int64_t token, int64_t dy, int64_t dx) const {
    const int64_t view = token / per_view;
    const int64_t row = visible[token] / grid_w + dy, column = visible[token] % grid_w + dx;
    if (row < 0 || row >= grid_h || column < 0 || column >= grid_w) return -1;
    const int64_t slot = restore[(view * grid_h + row) * grid_w + column];
    return slot >= 0 && slot < per_view ? view * per_view + slot : -1;
  }

  // Pixel `pixel` of `token`, `count` channels from `channel` on, the rest of the lanes zero.
  void load(const T* from, int64_t token, int64_t pixel, int64_t channel, int count, Sum* lanes) const {
    const T* const start = from + (token * pixels() + pixel) * channels + channel;
    if (count == kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = static_cast<Sum>(start[lane]);
    } else {
      for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = lane < count ? static_cast<Sum>(start[lane]) : Sum(0);
    }
  }

  // Slides over the tokens of one chunk. `filter` is [slices, taps, lanes]; `bias`, [slices, lanes]. Backward,
  // `filter_sum` ([slices, taps + 1, lanes], zero at first) takes the sums of x times the window.
  void slide_chunk(int64_t chunk, const Sum* filter, const Sum* bias, Sum* filter_sum) const {
    const int half = k / 2, width = q + k - 1, reach = (half + q - 1) / q, taps = k * k;
    std::vector<Sum> window(static_cast<size_t>(width) * width * kLanes), own(pixels() * kLanes), sums(pixels() * kLanes);
    std::vector<int64_t> around(static_cast<size_t>(2 * reach + 1) * (2 * reach + 1));
    const int64_t end = std::min(tokens, (chunk + 1) * kTokensPerChunk);
    for (int64_t token = chunk * kTokensPerChunk; token < end; ++token) {
      for (int64_t i = 0, dy = -reach; dy <= reach; ++dy) {
        for (int64_t dx = -reach; dx <= reach; ++dx) around[i++] = neighbour(token, dy, dx);
      }
      for (int64_t slice = 0; slice < slices(); ++slice) {
        const int64_t channel = slice * kLanes;
        const int count = static_cast<int>(std::min<int64_t>(kLanes, channels - channel));
        for (int row = 0; row < width; ++row) {
          // Rows and columns of the window start `half` before the token; the added reach keeps the division positive.
          const int y = row - half + reach * q;
          for (int column = 0; column < width; ++column) {
            const int x = column - half + reach * q;
            const int64_t found = around[(y / q) * (2 * reach + 1) + x / q];
            Sum* const lanes = window.data() + (static_cast<int64_t>(row) * width + column) * kLanes;
            if (found < 0) {
              std::fill(lanes, lanes + kLanes, Sum(0));
            } else {
              load(source, found, (y % q) * q + x % q, channel, count, lanes);
            }
          }
        }
        if (x != nullptr) {
          for (int64_t pixel = 0; pixel < pixels(); ++pixel) {
            load(x, token, pixel, channel, count, own.data() + pixel * kLanes);
          }
        }
        slide(window.data(), filter + slice * taps * kLanes, bias + channel, x != nullptr ? own.data() : nullptr, q, k,
              sums.data(), filter_sum == nullptr ? nullptr : filter_sum + slice * (taps + 1) * kLanes);
        for (int64_t pixel = 0; pixel < pixels(); ++pixel) {
          T* const to = result + (token * pixels() + pixel) * channels + channel;
          for (int lane = 0; lane < count; ++lane) to[lane] = static_cast<T>(sums[pixel * kLanes + lane]);
        }
      }
    }
  }
};

// The weight as [slices, taps, lanes]; its taps in reverse for a gradient.
template <typename Sum>
std::vector<Sum> lane_filter(const Sum* weight, int64_t channels, int64_t taps, bool reverse) {
  std::vector<Sum> filter((channels + kLanes - 1) / kLanes * taps * kLanes, Sum(0));
  for (int64_t channel = 0; channel < channels; ++channel) {
    for (int64_t tap = 0; tap < taps; ++tap) {
      filter[(channel / kLanes * taps + tap) * kLanes + channel % kLanes] =
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

// Calls `run` with a null pointer of the element type that `x` has.
template <typename Run>
void with_type(const Tensor& x, const Run& run) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return run(static_cast<float*>(nullptr));
    case ScalarType::BFloat16:
      return run(static_cast<torch::headeronly::BFloat16*>(nullptr));
    case ScalarType::Half:
      return run(static_cast<torch::headeronly::Half*>(nullptr));
    case ScalarType::Double:
      return run(static_cast<double*>(nullptr));
    default:
      STD_TORCH_CHECK(false, "masked_depthwise_conv2d: x has a dtype without a kernel");
  }
}

Tensor masked_depthwise_conv2d_cpu(const Tensor& x, const Tensor& visible, const Tensor& restore, const Tensor& weight,
                                   const std::optional<Tensor>& bias, int64_t grid_h, int64_t grid_w, int64_t q) {
  const Tensor pixels = torch::stable::contiguous(x), ids = torch::stable::contiguous(visible);
  const Tensor slots = torch::stable::contiguous(restore), weights = torch::stable::contiguous(weight);
  std::optional<Tensor> biases;
  if (bias.has_value()) biases = torch::stable::contiguous(*bias);
  Tensor result = torch::stable::new_empty(pixels, pixels.sizes());

  with_type(pixels, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    using Sum = typename SumOf<T>::type;
    const auto problem = make_problem<T>(pixels, nullptr, result, ids, slots, weights, grid_h, grid_w, q);
    const auto filter = lane_filter(weights.const_data_ptr<Sum>(), problem.channels, problem.k * problem.k, false);
    std::vector<Sum> lane_bias(problem.slices() * kLanes, Sum(0));
    if (biases) std::copy_n(biases->const_data_ptr<Sum>(), problem.channels, lane_bias.begin());
    torch::stable::parallel_for(0, problem.chunks(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        problem.slide_chunk(chunk, filter.data(), lane_bias.data(), nullptr);
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

  with_type(pixels, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    using Sum = typename SumOf<T>::type;
    const auto problem = make_problem<T>(grads, &pixels, grad_x, ids, slots, weights, grid_h, grid_w, q);
    const int64_t taps = problem.k * problem.k, chunks = problem.chunks();
    const auto filter = lane_filter(weights.const_data_ptr<Sum>(), problem.channels, taps, true);
    const std::vector<Sum> no_bias(problem.slices() * kLanes, Sum(0));
    // One partial sum a chunk, whatever the number of threads, so that gradients do not depend on it.
    const int64_t size = problem.slices() * (taps + 1) * kLanes;
    std::vector<Sum> partials(chunks * size, Sum(0));
    torch::stable::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        problem.slide_chunk(chunk, filter.data(), no_bias.data(), partials.data() + chunk * size);
      }
    });
    Sum* const weight_out = grad_weight.mutable_data_ptr<Sum>();
    Sum* const bias_out = grad_bias.mutable_data_ptr<Sum>();
    std::vector<Sum> total(size, Sum(0));
    torch::stable::parallel_for(0, size, kReduceGrain, [&](int64_t begin, int64_t end) {
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        for (int64_t at = begin; at < end; ++at) total[at] += partials[chunk * size + at];
      }
      for (int64_t at = begin; at < end; ++at) {
        const int64_t channel = at / ((taps + 1) * kLanes) * kLanes + at % kLanes, tap = at / kLanes % (taps + 1);
        if (channel >= problem.channels) continue;
        (tap == taps ? bias_out[channel] : weight_out[channel * taps + (taps - 1 - tap)]) = total[at];
      }
    });
  });
  return {grad_x, grad_weight, grad_bias};
}

}  // namespace
}  // namespace dmjd

STABLE_TORCH_LIBRARY_IMPL(dmjd, CPU, m) {
  m.impl("masked_depthwise_conv2d", TORCH_BOX(&dmjd::masked_depthwise_conv2d_cpu));
  m.impl("masked_depthwise_conv2d_backward", TORCH_BOX(&dmjd::masked_depthwise_conv2d_backward_cpu));
}
