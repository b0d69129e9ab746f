// The depthwise convolution of a masked map on its visible tokens: forward, and all three gradients in one pass.
//
// Both directions slide one window. With `s` a tap and p + s a place in the window of k - 1 pixels more than the token's
// own q x q block, centred on it,
//     result[p]           = bias + sum_s weight[s] x[p + s]
//     grad_x[p]           =        sum_s weight[last - s] grad[p + s]
//     grad_weight[last-s] =        sum_p x[p] grad[p + s]
// so a window of grad serves both gradients, and the forward kernel is the backward kernel without its last line.
//
// A warp owns 32 or 64 neighbouring channels and walks over tokens. All its lanes look at one token, so a hidden
// neighbour is skipped without divergence; weights and their gradients stay in registers for the whole walk. Windows of
// neighbouring tokens overlap, which L1 serves: tokens of a block are neighbours in raster order.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <optional>
#include <tuple>

#include "launch.h"

namespace dmjd {
namespace {

using torch::headeronly::ScalarType;

constexpr int kLanes = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarps = kThreads / kLanes;
constexpr int kMaxTaps = 49;
constexpr int kReduceRows = 8;

template <typename T>
struct SumOf {
  using type = float;
};
template <>
struct SumOf<double> {
  using type = double;
};

template <typename T>
struct Problem {
  using Sum = typename SumOf<T>::type;

  const T* source;         // what the window slides over: x forward, the result's gradient backward; [views, V, q*q, C]
  const T* x;              // backward only, as source
  const int64_t* visible;  // [views, V]
  const int64_t* restore;  // [views, grid_h * grid_w]
  const Sum* weight;       // [C, k, k]
  const Sum* bias;         // [C] or null, forward only
  T* result;               // the convolution, or grad_x; as source
  Sum* partials;           // backward only: [chunks, k*k + 1, C], sums over a block's tokens by tap `s`, last the bias's
  int tokens, visible_per_view, grid_h, grid_w, channels, q, k;
};

__device__ inline float widen(float value) { return value; }
__device__ inline double widen(double value) { return value; }
__device__ inline float widen(__half value) { return __half2float(value); }
__device__ inline float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

__device__ inline void narrow(float value, float* out) { *out = value; }
__device__ inline void narrow(double value, double* out) { *out = value; }
__device__ inline void narrow(float value, __half* out) { *out = __float2half_rn(value); }
__device__ inline void narrow(float value, __nv_bfloat16* out) { *out = __float2bfloat16_rn(value); }

template <typename T>
__device__ inline void load(const T* from, float (&value)[1]) {
  value[0] = widen(*from);
}
__device__ inline void load(const __half* from, float (&value)[2]) {
  const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(from));
  value[0] = pair.x, value[1] = pair.y;
}
__device__ inline void load(const __nv_bfloat16* from, float (&value)[2]) {
  // Two instructions, where __bfloat1622float2 takes three.
  const uint32_t pair = *reinterpret_cast<const uint32_t*>(from);
  value[0] = __uint_as_float(pair << 16), value[1] = __uint_as_float(pair & 0xffff0000u);
}

template <typename T>
__device__ inline void store(const float (&value)[1], T* to) {
  narrow(value[0], to);
}
__device__ inline void store(const float (&value)[2], __half* to) {
  *reinterpret_cast<__half2*>(to) = __floats2half2_rn(value[0], value[1]);
}
__device__ inline void store(const float (&value)[2], __nv_bfloat16* to) {
  *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(value[0], value[1]);
}

// Where in [views * V] the token lies that is (dy, dx) away from `token`; -1 where hidden or outside the grid.
template <typename T>
__device__ inline int neighbour(const Problem<T>& problem, int token, int dy, int dx) {
  const int view = token / problem.visible_per_view;
  const int place = static_cast<int>(problem.visible[token]);
  const int row = place / problem.grid_w + dy, column = place % problem.grid_w + dx;
  const bool inside = row >= 0 && row < problem.grid_h && column >= 0 && column < problem.grid_w;
  const int64_t start = static_cast<int64_t>(view) * problem.grid_h * problem.grid_w;
  // Outside, place 0 stands in: without a branch, the loads of several look-ups are in flight together.
  const int64_t slot = problem.restore[start + (inside ? row * problem.grid_w + column : 0)];
  const bool seen = inside && slot >= 0 && slot < problem.visible_per_view;
  return seen ? view * problem.visible_per_view + static_cast<int>(slot) : -1;
}

// Windows that reach the eight tokens around at most, their size known to the compiler.
template <typename T, int kQ, int kK, bool kBackward>
struct Window {
  static constexpr int kHalf = kK / 2, kPixels = kQ * kQ, kTaps = kK * kK;
  static_assert(kHalf <= kQ);
  // Two channels a lane halve the loads. The gradient keeps twice as much per channel and would spill.
  static constexpr int kVec = !kBackward && sizeof(T) == 2 ? 2 : 1;
  static constexpr int kChannels = kLanes * kVec;
  // Enough that loading weights does not count, and that partial sums are a few per cent of what is moved.
  static constexpr int kTokensPerBlock = 512 / kQ;
  // As many as registers allow: small windows spend more of their time waiting for neighbours.
  static constexpr int kBlocksPerMultiprocessor = kQ <= 2 ? 3 : 2;

  float filter[kTaps][kVec];
  float sum[kQ][kQ][kVec];
  float own[kBackward ? kQ : 1][kBackward ? kQ : 1][kVec];
  float filter_sum[kBackward ? kTaps + 1 : 1][kVec];

  // Adds what the pixels of the token (kDy, kDx) away give to the block's own.
  template <int kDy, int kDx>
  __device__ inline void add(const T* pixels, int stride) {
    constexpr int kTop = kDy < 0 ? kQ - kHalf : 0, kBottom = kDy > 0 ? kHalf : kQ;
    constexpr int kLeft = kDx < 0 ? kQ - kHalf : 0, kRight = kDx > 0 ? kHalf : kQ;
    float value[kBottom - kTop][kRight - kLeft][kVec];
#pragma unroll
    for (int row = kTop; row < kBottom; ++row) {
#pragma unroll
      for (int column = kLeft; column < kRight; ++column) {
        load(pixels + static_cast<int64_t>(stride) * (row * kQ + column), value[row - kTop][column - kLeft]);
      }
    }
#pragma unroll
    for (int row = kTop; row < kBottom; ++row) {
#pragma unroll
      for (int column = kLeft; column < kRight; ++column) {
#pragma unroll
        for (int y = 0; y < kQ; ++y) {
#pragma unroll
          for (int x = 0; x < kQ; ++x) {
            const int down = kDy * kQ + row - y + kHalf, across = kDx * kQ + column - x + kHalf;
            if (down < 0 || down >= kK || across < 0 || across >= kK) continue;
#pragma unroll
            for (int v = 0; v < kVec; ++v) {
              const float pixel = value[row - kTop][column - kLeft][v];
              sum[y][x][v] += filter[down * kK + across][v] * pixel;
              if constexpr (kBackward) filter_sum[down * kK + across][v] += own[y][x][v] * pixel;
            }
          }
        }
        if constexpr (kBackward && kDy == 0 && kDx == 0) {
#pragma unroll
          for (int v = 0; v < kVec; ++v) filter_sum[kTaps][v] += value[row][column][v];
        }
      }
    }
  }
};

template <typename T, int kQ, int kK, bool kBackward>
__global__ void __launch_bounds__(kThreads, Window<T, kQ, kK, kBackward>::kBlocksPerMultiprocessor)
    window_kernel(const Problem<T> problem) {
  using W = Window<T, kQ, kK, kBackward>;
  constexpr int kVec = W::kVec, kChannels = W::kChannels, kTaps = W::kTaps, kPixels = W::kPixels;
  // First the weights of the block's channels and behind them their biases, at last their gradients.
  __shared__ float stage[(kTaps + 1) * kChannels];
  __shared__ int neighbours[W::kTokensPerBlock][9];

  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const int channels = problem.channels, slices = (channels + kChannels - 1) / kChannels;
  const int slice = blockIdx.x % slices, chunk = blockIdx.x / slices;
  const int first = slice * kChannels;
  const bool real = first + lane * kVec < channels;
  const int channel = real ? first + lane * kVec : first;  // an idle lane computes along and stores nothing

  const int weights = min(kChannels, channels - first) * kTaps;
  for (int i = threadIdx.x; i < kChannels * kTaps; i += kThreads) {
    stage[i] = i < weights ? problem.weight[static_cast<int64_t>(first) * kTaps + i] : 0.0f;
  }
  float* const biases = stage + kTaps * kChannels;
  for (int i = threadIdx.x; !kBackward && i < kChannels; i += kThreads) {
    biases[i] = problem.bias && first + i < channels ? problem.bias[first + i] : 0.0f;
  }
  const int begin = chunk * W::kTokensPerBlock, count = min(W::kTokensPerBlock, problem.tokens - begin);
#pragma unroll 4
  for (int i = threadIdx.x; i < count * 9; i += kThreads) {
    neighbours[i / 9][i % 9] = neighbour(problem, begin + i / 9, i % 9 / 3 - 1, i % 3 - 1);
  }
  __syncthreads();
  W window;
#pragma unroll
  for (int s = 0; s < kTaps; ++s) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      window.filter[s][v] = stage[(lane * kVec + v) * kTaps + (kBackward ? kTaps - 1 - s : s)];
    }
  }
  if constexpr (kBackward) {
#pragma unroll
    for (int s = 0; s <= kTaps; ++s) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) window.filter_sum[s][v] = 0.0f;
    }
  }

  const int stride = channels, token_stride = kPixels * channels;
  for (int i = warp; i < count; i += kWarps) {
    const int64_t here = static_cast<int64_t>(begin + i) * token_stride + channel;
    // Lane n holds neighbour n, and all lanes one word of which are visible.
    const int around = lane < 9 ? neighbours[i][lane] : -1;
    const unsigned seen = __ballot_sync(kAllLanes, around >= 0);

    // The next token's pixels are on their way to L2 while this one is computed.
    if (i + kWarps < count && lane < kPixels) {
      const int64_t ahead = static_cast<int64_t>(begin + i + kWarps) * token_stride + lane * stride + first;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(problem.source + ahead));
      if constexpr (kBackward) asm volatile("prefetch.global.L2 [%0];" ::"l"(problem.x + ahead));
    }

    if constexpr (kBackward) {
#pragma unroll
      for (int pixel = 0; pixel < kPixels; ++pixel) {
        load(problem.x + here + static_cast<int64_t>(stride) * pixel, window.own[pixel / kQ][pixel % kQ]);
      }
    }
#pragma unroll
    for (int pixel = 0; pixel < kPixels; ++pixel) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        window.sum[pixel / kQ][pixel % kQ][v] = kBackward ? 0.0f : biases[lane * kVec + v];
      }
    }
    window.template add<0, 0>(problem.source + here, stride);
    const auto pixels_of = [&](int n) {
      return problem.source + (static_cast<int64_t>(__shfl_sync(kAllLanes, around, n)) * token_stride + channel);
    };
    if (seen & 1u << 0) window.template add<-1, -1>(pixels_of(0), stride);
    if (seen & 1u << 1) window.template add<-1, 0>(pixels_of(1), stride);
    if (seen & 1u << 2) window.template add<-1, 1>(pixels_of(2), stride);
    if (seen & 1u << 3) window.template add<0, -1>(pixels_of(3), stride);
    if (seen & 1u << 5) window.template add<0, 1>(pixels_of(5), stride);
    if (seen & 1u << 6) window.template add<1, -1>(pixels_of(6), stride);
    if (seen & 1u << 7) window.template add<1, 0>(pixels_of(7), stride);
    if (seen & 1u << 8) window.template add<1, 1>(pixels_of(8), stride);

    if (real) {
#pragma unroll
      for (int pixel = 0; pixel < kPixels; ++pixel) {
        store(window.sum[pixel / kQ][pixel % kQ], problem.result + here + static_cast<int64_t>(stride) * pixel);
      }
    }
  }

  if constexpr (kBackward) {
    // One warp after the other, so that the order of summation is fixed.
    for (int turn = 0; turn < kWarps; ++turn) {
      __syncthreads();
      if (warp != turn) continue;
#pragma unroll
      for (int s = 0; s <= kTaps; ++s) {
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
          float& total = stage[s * kChannels + lane * kVec + v];
          total = turn == 0 ? window.filter_sum[s][v] : total + window.filter_sum[s][v];
        }
      }
    }
    __syncthreads();
    float* const partials = problem.partials + static_cast<int64_t>(chunk) * (kTaps + 1) * channels;
    for (int i = threadIdx.x; i < (kTaps + 1) * kChannels; i += kThreads) {
      const int s = i / kChannels, at = first + i % kChannels;
      if (at < channels) partials[static_cast<int64_t>(s) * channels + at] = stage[i];
    }
  }
}

// Any q and k, one warp a block. A lane keeps the filter of its channel and its gradient in a column of shared memory.
constexpr int kTokensPerWarp = 32;

template <typename T, bool kBackward>
__global__ void __launch_bounds__(kLanes) any_window_kernel(const Problem<T> problem) {
  using Sum = typename Problem<T>::Sum;
  __shared__ Sum filter[kMaxTaps][kLanes];
  __shared__ Sum filter_sum[kBackward ? kMaxTaps + 1 : 1][kLanes];

  const int lane = threadIdx.x, channels = problem.channels, slices = (channels + kLanes - 1) / kLanes;
  const int channel = blockIdx.x % slices * kLanes + lane, chunk = blockIdx.x / slices;
  if (channel >= channels) return;
  const int q = problem.q, k = problem.k, half = k / 2, taps = k * k, pixels = q * q;
  const int reach = (half + q - 1) / q;
  for (int s = 0; s < taps; ++s) {
    filter[s][lane] = problem.weight[static_cast<int64_t>(channel) * taps + (kBackward ? taps - 1 - s : s)];
  }
  if constexpr (kBackward) {
    for (int s = 0; s <= taps; ++s) filter_sum[s][lane] = 0;
  }
  const Sum bias = !kBackward && problem.bias ? problem.bias[channel] : Sum(0);

  const int begin = chunk * kTokensPerWarp, end = min(begin + kTokensPerWarp, problem.tokens);
  for (int token = begin; token < end; ++token) {
    for (int pixel = 0; pixel < pixels; ++pixel) {
      const int y = pixel / q, x = pixel % q;
      const int64_t here = (static_cast<int64_t>(token) * pixels + pixel) * channels + channel;
      Sum sum = bias, own = 0;
      if constexpr (kBackward) {
        own = widen(problem.x[here]);
        filter_sum[taps][lane] += widen(problem.source[here]);
      }
      for (int dy = -reach; dy <= reach; ++dy) {
        // The window's rows that the tokens dy down hold, as rows of those tokens; likewise columns below.
        const int top = max(0, y - half - dy * q), bottom = min(q, y + half + 1 - dy * q);
        if (top >= bottom) continue;
        for (int dx = -reach; dx <= reach; ++dx) {
          const int left = max(0, x - half - dx * q), right = min(q, x + half + 1 - dx * q);
          if (left >= right) continue;
          const int found = neighbour(problem, token, dy, dx);
          if (found < 0) continue;
          const T* const from = problem.source + static_cast<int64_t>(found) * pixels * channels + channel;
          for (int row = top; row < bottom; ++row) {
            for (int column = left; column < right; ++column) {
              const Sum value = widen(from[static_cast<int64_t>(row * q + column) * channels]);
              const int s = (dy * q + row - y + half) * k + dx * q + column - x + half;
              sum += filter[s][lane] * value;
              if constexpr (kBackward) filter_sum[s][lane] += own * value;
            }
          }
        }
      }
      narrow(sum, problem.result + here);
    }
  }
  if constexpr (kBackward) {
    for (int s = 0; s <= taps; ++s) {
      problem.partials[(static_cast<int64_t>(chunk) * (taps + 1) + s) * channels + channel] = filter_sum[s][lane];
    }
  }
}

// Sums partials over chunks in a fixed order, and turns taps `s` back into places of the weight.
template <typename Sum>
__global__ void reduce_kernel(const Sum* __restrict__ partials, int64_t chunks, int taps, int channels,
                              Sum* __restrict__ grad_weight, Sum* __restrict__ grad_bias) {
  __shared__ Sum sums[kReduceRows][kLanes];
  const int64_t columns = static_cast<int64_t>(taps + 1) * channels;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kLanes + threadIdx.x;
  Sum sum = 0;
  if (column < columns) {
#pragma unroll 8
    for (int64_t chunk = threadIdx.y; chunk < chunks; chunk += kReduceRows) sum += partials[chunk * columns + column];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
  for (int row = 1; row < kReduceRows; ++row) sum += sums[row][threadIdx.x];
  const int s = static_cast<int>(column / channels), channel = static_cast<int>(column % channels);
  if (s == taps) {
    grad_bias[channel] = sum;
  } else {
    grad_weight[static_cast<int64_t>(channel) * taps + (taps - 1 - s)] = sum;
  }
}

template <typename T, int kQ, int kK, bool kBackward>
bool fits(const Problem<T>& problem) {
  constexpr size_t kVec = Window<T, kQ, kK, kBackward>::kVec;
  return problem.q == kQ && problem.k == kK && problem.channels % kVec == 0 &&
         reinterpret_cast<uintptr_t>(problem.source) % (kVec * sizeof(T)) == 0;
}

// Launches the kernel for one direction. Backward, `make_partials` allocates for as many chunks as there are.
template <typename T, bool kBackward, typename MakePartials>
void slide(Problem<T> problem, cudaStream_t stream, const MakePartials& make_partials) {
  const auto launch = [&](auto kernel, int tokens_per_block, int channels_per_block, int threads) {
    const int64_t chunks = (static_cast<int64_t>(problem.tokens) + tokens_per_block - 1) / tokens_per_block;
    const int64_t slices = (problem.channels + channels_per_block - 1) / channels_per_block;
    STD_TORCH_CHECK(chunks * slices <= INT32_MAX, "masked_depthwise_conv2d: too many tokens and channels in one call");
    problem.partials = make_partials(chunks);
    if (chunks == 0) return;
    kernel<<<static_cast<unsigned>(chunks * slices), threads, 0, stream>>>(problem);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  };
  if constexpr (!std::is_same_v<T, double>) {
    if (fits<T, 4, 5, kBackward>(problem)) {
      using W = Window<T, 4, 5, kBackward>;
      return launch(window_kernel<T, 4, 5, kBackward>, W::kTokensPerBlock, W::kChannels, kThreads);
    }
    if (fits<T, 2, 5, kBackward>(problem)) {
      using W = Window<T, 2, 5, kBackward>;
      return launch(window_kernel<T, 2, 5, kBackward>, W::kTokensPerBlock, W::kChannels, kThreads);
    }
  }
  launch(any_window_kernel<T, kBackward>, kTokensPerWarp, kLanes, kLanes);
}

// Contiguous copies of what a kernel reads, alive as long as it is being launched.
struct Layout {
  Tensor visible, restore, weight;
  int64_t tokens, per_view, grid_h, grid_w, channels, q, k;

  Layout(const Tensor& x, const Tensor& visible, const Tensor& restore, const Tensor& weight, int64_t grid_h,
         int64_t grid_w, int64_t q)
      : visible(torch::stable::contiguous(visible)),
        restore(torch::stable::contiguous(restore)),
        weight(torch::stable::contiguous(weight)),
        tokens(x.size(0) * x.size(1)),
        per_view(x.size(1)),
        grid_h(grid_h),
        grid_w(grid_w),
        channels(x.size(3)),
        q(q),
        k(weight.size(1)) {
    STD_TORCH_CHECK(tokens <= INT32_MAX / 2 && grid_h * grid_w <= INT32_MAX / 2 && q * q * k * k <= INT32_MAX / 2 &&
                        channels <= INT32_MAX / 64,
                    "masked_depthwise_conv2d: more tokens or channels than 32-bit counters hold");
  }

  template <typename T>
  Problem<T> problem(const Tensor& source, const Tensor* x, const Tensor* bias, const Tensor& result) const {
    using Sum = typename SumOf<T>::type;
    Problem<T> problem = {};
    problem.source = static_cast<const T*>(source.const_data_ptr());
    problem.x = x == nullptr ? nullptr : static_cast<const T*>(x->const_data_ptr());
    problem.visible = visible.const_data_ptr<int64_t>();
    problem.restore = restore.const_data_ptr<int64_t>();
    problem.weight = weight.const_data_ptr<Sum>();
    problem.bias = bias == nullptr ? nullptr : bias->const_data_ptr<Sum>();
    problem.result = static_cast<T*>(result.mutable_data_ptr());
    problem.tokens = static_cast<int>(tokens);
    problem.visible_per_view = static_cast<int>(per_view);
    problem.grid_h = static_cast<int>(grid_h);
    problem.grid_w = static_cast<int>(grid_w);
    problem.channels = static_cast<int>(channels);
    problem.q = static_cast<int>(q);
    problem.k = static_cast<int>(k);
    return problem;
  }
};

// Calls `run` with a null pointer of the element type that `x` has.
template <typename Run>
void with_type(const Tensor& x, const Run& run) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return run(static_cast<float*>(nullptr));
    case ScalarType::BFloat16:
      return run(static_cast<__nv_bfloat16*>(nullptr));
    case ScalarType::Half:
      return run(static_cast<__half*>(nullptr));
    case ScalarType::Double:
      return run(static_cast<double*>(nullptr));
    default:
      STD_TORCH_CHECK(false, "masked_depthwise_conv2d: x has a dtype without a kernel");
  }
}

Tensor masked_depthwise_conv2d_cuda(const Tensor& x, const Tensor& visible, const Tensor& restore, const Tensor& weight,
                                    const std::optional<Tensor>& bias, int64_t grid_h, int64_t grid_w, int64_t q) {
  const int32_t device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Tensor pixels = torch::stable::contiguous(x);
  const Layout layout(pixels, visible, restore, weight, grid_h, grid_w, q);
  std::optional<Tensor> biases;
  if (bias.has_value()) biases = torch::stable::contiguous(*bias);
  Tensor result = torch::stable::new_empty(pixels, pixels.sizes());

  with_type(pixels, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    const Problem<T> problem = layout.problem<T>(pixels, nullptr, biases ? &*biases : nullptr, result);
    slide<T, false>(problem, current_stream(device), [](int64_t) { return nullptr; });
  });
  return result;
}

std::tuple<Tensor, Tensor, Tensor> masked_depthwise_conv2d_backward_cuda(const Tensor& grad, const Tensor& x,
                                                                         const Tensor& visible, const Tensor& restore,
                                                                         const Tensor& weight, int64_t grid_h,
                                                                         int64_t grid_w, int64_t q) {
  const int32_t device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Tensor pixels = torch::stable::contiguous(x);
  const Tensor grads = torch::stable::contiguous(grad);
  const Layout layout(pixels, visible, restore, weight, grid_h, grid_w, q);
  Tensor grad_x = torch::stable::new_empty(pixels, pixels.sizes());
  Tensor grad_weight = torch::stable::new_empty(layout.weight, layout.weight.sizes());
  Tensor grad_bias = torch::stable::new_empty(layout.weight, {layout.channels});
  const int taps = static_cast<int>(layout.k * layout.k);
  const cudaStream_t stream = current_stream(device);

  with_type(pixels, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    using Sum = typename SumOf<T>::type;
    Tensor partials;
    int64_t chunks = 0;
    slide<T, true>(layout.problem<T>(grads, &pixels, nullptr, grad_x), stream, [&](int64_t needed) {
      chunks = needed;
      partials = torch::stable::new_empty(layout.weight, {chunks, taps + 1, layout.channels});
      return partials.mutable_data_ptr<Sum>();
    });
    const int64_t columns = (taps + 1) * layout.channels;
    reduce_kernel<Sum><<<static_cast<unsigned>((columns + kLanes - 1) / kLanes), dim3(kLanes, kReduceRows), 0, stream>>>(
        partials.const_data_ptr<Sum>(), chunks, taps, static_cast<int>(layout.channels),
        grad_weight.mutable_data_ptr<Sum>(), grad_bias.mutable_data_ptr<Sum>());
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return {grad_x, grad_weight, grad_bias};
}

}  // namespace
}  // namespace dmjd

STABLE_TORCH_LIBRARY_IMPL(dmjd, CUDA, m) {
  m.impl("masked_depthwise_conv2d", TORCH_BOX(&dmjd::masked_depthwise_conv2d_cuda));
  m.impl("masked_depthwise_conv2d_backward", TORCH_BOX(&dmjd::masked_depthwise_conv2d_backward_cuda));
}
