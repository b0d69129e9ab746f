// short_attention forward; dmjd/ops/short_attention.py describes the op, attention_forward.cuh the kernel.
#include <algorithm>
#include <tuple>

#include "attention_arguments.h"
#include "attention_forward.cuh"

namespace dmjd::attention {
namespace {

template <typename T, int kD, int kTiles, bool kBias>
void run(Forward<T> problem, int64_t blocks, int32_t device) {
  const int tiles = (problem.tokens + kTile - 1) / kTile;
  problem.chunks = (tiles + kTiles - 1) / kTiles;
  // Measured on an H200: few warps leave room for more blocks, except where a block's memory leaves room for one or two.
  const int most = kBias || tiles < 5 || (kD == 64 && tiles > 7) || (kD == 80 && tiles > 15) ? 8 : 4;
  const int turns = (tiles + most - 1) / most, warps = (tiles + turns - 1) / turns;
  const int shared_bytes = (tiles + 2 * problem.chunks * kTiles) * kTile * Rows<kD>::kStride;
  launch(forward_kernel<T, kD, kTiles, kBias>, problem, static_cast<unsigned>(blocks), warps * kLanes, shared_bytes,
         device);
}

// Chooses how many tiles of keys a chunk holds: the fewest chunks, then the fewest tiles beyond the last key. Where there
// are several chunks of heads of 64, small ones leave registers for two blocks.
template <typename T, int kD, bool kBias>
void run(const Forward<T>& problem, int64_t blocks, int32_t device) {
  const int tiles = (problem.tokens + kTile - 1) / kTile;
  const int chunks = (tiles + 6) / 7;
  const int needed = kD == 64 && chunks > 1 && !kBias ? 4 : (tiles + chunks - 1) / chunks;
  if (needed <= 4) run<T, kD, 4, kBias>(problem, blocks, device);
  else if (needed == 5) run<T, kD, 5, kBias>(problem, blocks, device);
  else if (needed == 6) run<T, kD, 6, kBias>(problem, blocks, device);
  else run<T, kD, 7, kBias>(problem, blocks, device);
}

std::tuple<Tensor, Tensor> short_attention_cuda(const Tensor& q, const Tensor& k, const Tensor& v,
                                                const std::optional<Tensor>& bias, double scale) {
  require(q, k, v, bias);
  const int32_t device = q.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const int64_t batch = q.size(0), tokens = q.size(1), heads = q.size(2), depth = q.size(3);
  Tensor out = torch::stable::new_empty(q, {batch, tokens, heads, depth});
  Tensor lse = torch::stable::new_empty(q, {batch, heads, tokens}, torch::headeronly::ScalarType::Float);
  if (q.numel() == 0) return {out, lse};
  const Tensor queries = readable(q), keys = readable(k), values = readable(v);
  const Bias biases(bias);
  for_heads(q, bias.has_value(), [&](auto element, auto depth_constant, auto with_bias) {
    using T = decltype(element);
    Forward<T> problem{};
    problem.q = read<T>(queries), problem.k = read<T>(keys), problem.v = read<T>(values);
    problem.out = {static_cast<T*>(out.mutable_data_ptr()), tokens * heads * depth, heads * depth, depth};
    problem.bias = biases.data<T>();
    problem.lse = lse.mutable_data_ptr<float>();
    problem.heads = static_cast<int>(heads), problem.tokens = static_cast<int>(tokens);
    problem.windows = biases.windows;
    problem.scale = static_cast<float>(scale);
    run<T, decltype(depth_constant)::value, decltype(with_bias)::value>(problem, batch * heads, device);
  });
  return {out, lse};
}

// q, k and v of one tensor [B, N, 3, H, D].
std::tuple<Tensor, Tensor> short_attention_packed_cuda(const Tensor& qkv, const std::optional<Tensor>& bias,
                                                       double scale) {
  STD_TORCH_CHECK(qkv.dim() == 5 && qkv.size(2) == 3, "short_attention_packed: qkv must be [B, N, 3, H, D]");
  return short_attention_cuda(torch::stable::select(qkv, 2, 0), torch::stable::select(qkv, 2, 1),
                              torch::stable::select(qkv, 2, 2), bias, scale);
}

}  // namespace
}  // namespace dmjd::attention

STABLE_TORCH_LIBRARY_IMPL(dmjd, CUDA, m) {
  m.impl("short_attention", TORCH_BOX(&dmjd::attention::short_attention_cuda));
  m.impl("short_attention_packed", TORCH_BOX(&dmjd::attention::short_attention_packed_cuda));
}
