// What both directions of short_attention make of their tensors before a launch.
#pragma once

#include <optional>

#include <torch/headeronly/core/ScalarType.h>

#include "attention_tiles.cuh"

namespace dmjd::attention {

// A tensor [B, N, H, D] as kernels read it: in place where rows are whole and 16 bytes apart, which views of a packed
// projection are, else a copy.
inline Tensor readable(const Tensor& tensor) {
  const auto bytes = static_cast<int64_t>(tensor.element_size());
  bool fits = tensor.stride(3) == 1 && reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
  for (int64_t dim = 0; dim < 3; ++dim) fits = fits && tensor.stride(dim) * bytes % 16 == 0;
  if (fits) return tensor;
  Tensor copy = torch::stable::new_empty(tensor, tensor.sizes());
  torch::stable::copy_(copy, tensor);
  return copy;
}

template <typename T>
Heads<const T> read(const Tensor& tensor) {
  return {static_cast<const T*>(tensor.const_data_ptr()), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

// The bias [H, N, N] or [windows, H, N, N] as [windows, H, N, N].
struct Bias {
  std::optional<Tensor> tensor;
  int windows = 1;

  explicit Bias(const std::optional<Tensor>& bias) {
    if (!bias.has_value()) return;
    tensor = torch::stable::contiguous(*bias);
    if (bias->dim() == 4) windows = static_cast<int>(bias->size(0));
  }
  template <typename T>
  const T* data() const {
    return tensor.has_value() ? static_cast<const T*>(tensor->const_data_ptr()) : nullptr;
  }
};

// The front end has checked all this; a caller of the op itself would read and write past the ends of tensors.
inline void require(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias) {
  using torch::headeronly::ScalarType;
  const auto alike = [&](const Tensor& other) {
    bool same = other.scalar_type() == q.scalar_type() && other.dim() == 4 &&
                other.get_device_index() == q.get_device_index();
    for (int64_t dim = 0; same && dim < 4; ++dim) same = other.size(dim) == q.size(dim);
    return same;
  };
  STD_TORCH_CHECK(q.dim() == 4 && alike(k) && alike(v), "short_attention: q, k and v must be alike, [B, N, H, D]");
  STD_TORCH_CHECK(q.scalar_type() == ScalarType::BFloat16 || q.scalar_type() == ScalarType::Half,
                  "short_attention: kernels take bfloat16 and float16");
  const int64_t batch = q.size(0), tokens = q.size(1), heads = q.size(2), depth = q.size(3);
  STD_TORCH_CHECK((depth == 32 && tokens <= 288) || ((depth == 64 || depth == 80) && tokens <= 256),
                  "short_attention: kernels take 288 tokens of 32 channels a head, 256 of 64 or 80 at most, got ", tokens,
                  " of ", depth);
  STD_TORCH_CHECK(batch * heads <= INT32_MAX, "short_attention: too many heads in one call");
  if (!bias.has_value()) return;
  const int64_t dim = bias->dim(), windows = dim == 4 ? bias->size(0) : 1;
  STD_TORCH_CHECK(bias->scalar_type() == q.scalar_type() && (dim == 3 || dim == 4) && windows > 0 &&
                      batch % windows == 0 && windows * heads <= 65535 && bias->size(dim - 3) == heads &&
                      bias->size(dim - 2) == tokens && bias->size(dim - 1) == tokens,
                  "short_attention: bias must be [H, N, N] or [W, H, N, N] of q's dtype with W a divisor of B");
}

inline int attribute(cudaDeviceAttr which, int32_t device) {
  int value = 0;
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device));
  return value;
}

template <typename Kernel, typename Problem>
void launch(Kernel kernel, const Problem& problem, dim3 blocks, int threads, int shared_bytes, int32_t device) {
  STD_TORCH_CHECK(shared_bytes <= attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
                  "short_attention: a block needs ", shared_bytes, " bytes of shared memory, which this card has not");
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  kernel<<<blocks, threads, shared_bytes, current_stream(device)>>>(problem);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

// Calls action with a value of the element type, the head size and whether there is a bias, as constants.
template <typename Action>
void for_heads(const Tensor& q, bool bias, const Action& action) {
  const auto with_bias = [&](auto element, auto depth) {
    if (bias) action(element, depth, std::true_type{});
    else action(element, depth, std::false_type{});
  };
  const auto with_depth = [&](auto element) {
    if (q.size(3) == 32) with_bias(element, Constant<32>{});
    else if (q.size(3) == 64) with_bias(element, Constant<64>{});
    else with_bias(element, Constant<80>{});
  };
  if (q.scalar_type() == torch::headeronly::ScalarType::BFloat16) with_depth(__nv_bfloat16{});
  else with_depth(__half{});
}

}  // namespace dmjd::attention
