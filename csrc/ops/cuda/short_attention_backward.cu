// The gradients of short_attention: q's, k's and v's by one kernel, a bias's by another.
#include <algorithm>
#include <tuple>

#include "attention_arguments.h"
#include "attention_backward.cuh"

namespace dmjd::attention {
namespace {

using torch::headeronly::ScalarType;

// The most tiles of queries a chunk can hold where `blocks` share a multiprocessor, and then as few as chunks allow.
template <int kD>
int chunk_tiles(int tokens, int keys_per_warp, int blocks, int32_t device) {
  const int reserved = attribute(cudaDevAttrReservedSharedMemoryPerBlock, device);
  const int room = std::min(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
                            attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device) / blocks - reserved);
  const int tiles = (tokens + kTile - 1) / kTile;
  int most = tiles;
  while (most > 0 && BackwardLayout<kD>(tokens, keys_per_warp, most).total() > room) --most;
  if (most == 0) return blocks > 1 ? chunk_tiles<kD>(tokens, keys_per_warp, blocks - 1, device) : 1;
  const int chunks = (tiles + most - 1) / most;
  return (tiles + chunks - 1) / chunks;
}

template <typename T, int kD, int kM, int kWarps, int kBlocks, bool kHoldK, bool kHoldV, bool kBias>
void run(Backward<T> problem, int64_t blocks, int32_t device) {
  constexpr int kKeys = kM * kTile;
  const int warps = (problem.tokens + kKeys - 1) / kKeys;
  problem.chunk_tiles = chunk_tiles<kD>(problem.tokens, kKeys, kBlocks, device);
  const int shared_bytes = BackwardLayout<kD>(problem.tokens, kKeys, problem.chunk_tiles).total();
  launch(backward_kernel<T, kD, kM, kWarps, kBlocks, kHoldK, kHoldV, kBias>, problem, static_cast<unsigned>(blocks),
         warps * kLanes, shared_bytes, device);
}

// Warps, and so the registers that each may have, go by the number of tokens.
template <typename T, int kD, bool kBias>
void run(const Backward<T>& problem, int64_t blocks, int32_t device) {
  const int tiles = (problem.tokens + kTile - 1) / kTile;
  if constexpr (kD == 32) {
    if (tiles <= 14 && !kBias) run<T, kD, 2, 7, 2, false, true, kBias>(problem, blocks, device);
    else run<T, kD, 2, 9, 1, true, true, kBias>(problem, blocks, device);
  } else if constexpr (kD == 64) {
    if (tiles <= 5) run<T, kD, 1, 5, 3, false, false, kBias>(problem, blocks, device);
    else if (tiles <= 13 && kBias) run<T, kD, 1, 13, 1, false, false, kBias>(problem, blocks, device);
    else if (tiles <= 13) run<T, kD, 2, 7, 1, true, false, kBias>(problem, blocks, device);
    else run<T, kD, 2, 8, 1, false, false, kBias>(problem, blocks, device);
  } else {
    if (tiles <= 5) run<T, kD, 1, 5, 2, false, false, kBias>(problem, blocks, device);
    else run<T, kD, 2, 8, 1, false, false, kBias>(problem, blocks, device);
  }
}

// Blocks of bias_gradient_kernel that fill any card a few times; images are shared out to as many.
constexpr int64_t kFill = 2048;

template <typename T, int kD>
void run_bias(BiasGradient<T> problem, Tensor& grad_bias, int32_t device) {
  const int pieces = (problem.tokens + kPiece - 1) / kPiece, maps = problem.windows * problem.heads;
  const int64_t blocks = int64_t{pieces} * pieces * maps;
  const int64_t wanted = std::clamp<int64_t>(kFill / blocks, 1, std::min(problem.images, 65535));
  problem.per_share = static_cast<int>((problem.images + wanted - 1) / wanted);
  problem.shares = (problem.images + problem.per_share - 1) / problem.per_share;
  const int64_t count = grad_bias.numel();
  Tensor partials = torch::stable::new_empty(grad_bias, {static_cast<int64_t>(problem.shares), count}, ScalarType::Float);
  problem.partials = partials.mutable_data_ptr<float>();
  launch(bias_gradient_kernel<T, kD>, problem,
         dim3(static_cast<unsigned>(pieces * pieces), static_cast<unsigned>(maps),
              static_cast<unsigned>(problem.shares)),
         kPieceThreads, 4 * kPiece * Rows<kD>::kStride, device);
  add_shares_kernel<T><<<blocks_for(count), kThreads, 0, current_stream(device)>>>(
      problem.partials, static_cast<T*>(grad_bias.mutable_data_ptr()), count, problem.shares);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// The gradient of packed q, k and v [B, N, 3, H, D], and of bias where there is one, else an empty tensor.
std::tuple<Tensor, Tensor> short_attention_backward_cuda(const Tensor& grad, const Tensor& q, const Tensor& k,
                                                         const Tensor& v, const std::optional<Tensor>& bias,
                                                         const Tensor& out, const Tensor& lse, double scale,
                                                         bool with_bias_gradient) {
  require(q, k, v, bias);
  require(q, out, grad, {});
  const int32_t device = q.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const int64_t batch = q.size(0), tokens = q.size(1), heads = q.size(2), depth = q.size(3), row = heads * depth;
  STD_TORCH_CHECK(lse.is_contiguous() && lse.scalar_type() == ScalarType::Float && lse.numel() == batch * heads * tokens,
                  "short_attention_backward: lse must be float32 [B, H, N]");
  Tensor grad_qkv = torch::stable::new_empty(q, {batch, tokens, 3, heads, depth});
  const bool summed = with_bias_gradient && bias.has_value();
  Tensor grad_bias = summed ? torch::stable::new_empty(*bias, bias->sizes()) : torch::stable::new_empty(q, {0});
  if (q.numel() == 0) {
    torch::stable::zero_(grad_bias);
    return {grad_qkv, grad_bias};
  }
  const Tensor grads = readable(grad), queries = readable(q), keys = readable(k), values = readable(v);
  const Tensor outs = readable(out);
  const Bias biases(bias);
  std::optional<Tensor> delta;
  if (summed) delta = torch::stable::new_empty(lse, lse.sizes());
  for_heads(q, bias.has_value(), [&](auto element, auto depth_constant, auto with_bias) {
    using T = decltype(element);
    constexpr int kD = decltype(depth_constant)::value;
    T* to = static_cast<T*>(grad_qkv.mutable_data_ptr());
    const auto part = [&](int which) { return Heads<T>{to + which * row, tokens * 3 * row, 3 * row, depth}; };
    Backward<T> problem{};
    problem.q = read<T>(queries), problem.k = read<T>(keys), problem.v = read<T>(values);
    problem.out = read<T>(outs), problem.grad = read<T>(grads);
    problem.grad_q = part(0), problem.grad_k = part(1), problem.grad_v = part(2);
    problem.bias = biases.data<T>();
    problem.lse = lse.const_data_ptr<float>();
    problem.delta = summed ? delta->mutable_data_ptr<float>() : nullptr;
    problem.heads = static_cast<int>(heads), problem.tokens = static_cast<int>(tokens);
    problem.windows = biases.windows;
    problem.scale = static_cast<float>(scale), problem.unit = problem.scale * kLog2e;
    run<T, kD, decltype(with_bias)::value>(problem, batch * heads, device);
    if constexpr (decltype(with_bias)::value) {
      if (!summed) return;
      BiasGradient<T> sums{};
      sums.q = problem.q, sums.k = problem.k, sums.v = problem.v, sums.grad = problem.grad;
      sums.bias = problem.bias, sums.lse = problem.lse, sums.delta = problem.delta;
      sums.heads = problem.heads, sums.tokens = problem.tokens, sums.windows = problem.windows;
      sums.images = static_cast<int>(batch / biases.windows);
      sums.scale = problem.scale;
      run_bias<T, kD>(sums, grad_bias, device);
    }
  });
  return {grad_qkv, grad_bias};
}

}  // namespace
}  // namespace dmjd::attention

STABLE_TORCH_LIBRARY_IMPL(dmjd, CUDA, m) {
  m.impl("short_attention_backward", TORCH_BOX(&dmjd::attention::short_attention_backward_cuda));
}
