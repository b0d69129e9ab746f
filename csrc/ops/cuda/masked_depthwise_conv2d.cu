// The depthwise convolution of a masked map on its visible tokens: forward, and all three gradients in one pass.
//
// Both directions slide one window. With `s` a tap and p + s a place in the window of k - 1 pixels more than the token's
// own q x q block, centred on it,
//     result[p]           = bias + sum_s weight[s] x[p + s]
//     grad_x[p]           =        sum_s weight[last - s] grad[p + s]
//     grad_weight[last-s] =        sum_p x[p] grad[p + s]
// so a window of grad serves both gradients, and the forward kernel is the backward kernel without its last line.
#include <optional>
#include <tuple>

#include "depthwise_any_window.cuh"
#include "depthwise_window.cuh"

namespace dmjd {
namespace {

using torch::headeronly::ScalarType;

constexpr int kReduceRows = 8;

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
    using Sum = dmjd::Sum<T>;
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
    using Sum = dmjd::Sum<T>;
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
  m.impl("masked_depthwise_conv2d", DMJD_BOX(&dmjd::masked_depthwise_conv2d_cuda));
  m.impl("masked_depthwise_conv2d_backward", DMJD_BOX(&dmjd::masked_depthwise_conv2d_backward_cuda));
}
