// gather_tokens and its gradient. Both are bound by memory: every row is read where it is needed and written once,
// nothing is zeroed beforehand, and no sum needs an atomic. A wrong id gives wrong values and never leaves a tensor.
//
// The second number of __launch_bounds__ is the blocks a multiprocessor shall hold at once. Without it the compiler
// aims at occupancies of its own, for which it spills registers.
#include <algorithm>
#include <cstdint>

#include "rows.h"

namespace dmjd {
namespace {

// The row of x that a row of gather_tokens' result repeats.
template <typename Unit>
struct Gather {
  const Unit* x;
  const int64_t* ids;
  Layout at;

  __device__ const Unit* operator()(int64_t row) const {
    const int64_t view_row = row / at.view_rows(), slot = row - view_row * at.view_rows();
    int64_t source = slot;
    if (slot >= at.prefix) {
      const int64_t id = ids[view_row * at.visible + slot - at.prefix];
      if (!in_range(id, at.tokens)) return nullptr;
      source = at.prefix + id;
    }
    return x + (view_row % at.batch * at.grid_rows() + source) * at.units;
  }
};

// Rows of the result that a block of gather_backward_kernel makes, if the views are few.
constexpr int64_t kTile = 16;
constexpr int64_t kMapBytes = 48 * 1024;  // of shared memory, what every card gives without asking

// A block makes `tile` rows of one sample's gradient. It first inverts the ids in shared memory, where a view's row is
// found by the row of the grid, so that each row is summed over the views in order and written once.
template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads, 4)
    gather_backward_kernel(const Pack<T, kCount>* __restrict__ grad, const int64_t* __restrict__ ids,
                           Pack<T, kCount>* __restrict__ out, Layout at, int tile, int shift) {
  extern __shared__ int32_t source[];  // [views][tile]: row of the view's gradient, -1 where the view does not look
  constexpr int kUnroll = kCount >= 8 ? 2 : 4;
  const int lanes = 1 << shift, lane = threadIdx.x & (lanes - 1);
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * tile;
  const int count = static_cast<int>(min(static_cast<int64_t>(tile), at.grid_rows() - first_row));
  for (int64_t sample = blockIdx.y; sample < at.batch; sample += gridDim.y) {
    __syncthreads();  // the map of the sample before is no longer read
    for (int i = threadIdx.x; i < at.views * tile; i += kThreads) {
      const int64_t row = first_row + i % tile;
      source[i] = row < at.prefix ? static_cast<int32_t>(row) : -1;
    }
    __syncthreads();
    for (int view = 0; view < at.views; ++view) {
      const int64_t* view_ids = ids + (view * at.batch + sample) * at.visible;
      for (int64_t slot = threadIdx.x; slot < at.visible; slot += kThreads) {
        const int64_t id = view_ids[slot], row = at.prefix + id - first_row;
        if (id >= 0 && in_range(row, count)) source[view * tile + row] = static_cast<int32_t>(at.prefix + slot);
      }
    }
    __syncthreads();
    for (int row = threadIdx.x >> shift; row < count; row += kThreads >> shift) {
      Pack<T, kCount>* to = out + (sample * at.grid_rows() + first_row + row) * at.units;
      for (int first = lane; first < at.units; first += kUnroll * lanes) {
        Sum<T> sum[kUnroll][kCount] = {};
        for (int view = 0; view < at.views; ++view) {
          const int32_t from_row = source[view * tile + row];
          if (from_row < 0) continue;
          const Pack<T, kCount>* from = grad + ((view * at.batch + sample) * at.view_rows() + from_row) * at.units;
          Pack<T, kCount> held[kUnroll];
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) {
            if (first + u * lanes < at.units) held[u] = from[first + u * lanes];
          }
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) {
            if (first + u * lanes < at.units) add_to<T, kCount>(sum[u], held[u]);
          }
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          if (first + u * lanes < at.units) to[first + u * lanes] = rounded<T, kCount>(sum[u]);
        }
      }
    }
  }
}

Tensor gather_tokens_cuda(const Tensor& x, const Tensor& ids, int64_t prefix) {
  const int32_t device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Tensor tokens = torch::stable::contiguous(x);
  const Tensor indices = torch::stable::contiguous(ids);
  const int64_t views = ids.size(0), batch = ids.size(1), visible = ids.size(2), channels = x.size(2);
  Tensor result = torch::stable::new_empty(tokens, {views * batch, prefix + visible, channels});
  if (result.numel() == 0) return result;

  require_row("gather_tokens", channels, x.element_size());
  const void* from = tokens.const_data_ptr();
  void* to = result.mutable_data_ptr();
  const int64_t row_bytes = channels * static_cast<int64_t>(x.element_size());
  for_copy_unit(common_alignment(row_bytes, {from, to}), [&](auto unit) {
    using Unit = decltype(unit);
    const int units = static_cast<int>(row_bytes / static_cast<int64_t>(sizeof(Unit)));
    const Layout at = {batch, views, prefix, x.size(1) - prefix, visible, units};
    const Gather<Unit> source = {static_cast<const Unit*>(from), indices.const_data_ptr<int64_t>(), at};
    copy_rows(source, static_cast<Unit*>(to), result.size(0) * result.size(1), units, current_stream(device));
  });
  return result;
}

Tensor gather_tokens_backward_cuda(const Tensor& grad, const Tensor& ids, int64_t tokens, int64_t prefix) {
  const int32_t device = grad.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Tensor grads = torch::stable::contiguous(grad);
  const Tensor indices = torch::stable::contiguous(ids);
  const int64_t views = ids.size(0), batch = ids.size(1), visible = ids.size(2), channels = grad.size(2);
  Tensor result = torch::stable::new_empty(grads, {batch, prefix + tokens, channels});
  if (result.numel() == 0) return result;

  require_row("gather_tokens_backward", channels, grad.element_size());
  const int64_t tile = std::min(kTile, kMapBytes / (std::max<int64_t>(views, 1) * int64_t{sizeof(int32_t)}));
  STD_TORCH_CHECK(tile > 0 && prefix + visible <= INT32_MAX && prefix + tokens <= INT32_MAX,
                  "gather_tokens_backward: too many views or tokens for ids [", views, ", ", batch, ", ", visible, "]");
  const void* from = grads.const_data_ptr();
  void* to = result.mutable_data_ptr();
  for_floating_type(grad.scalar_type(), "gather_tokens_backward", [&](auto zero) {
    using T = decltype(zero);
    for_pack<T>(common_alignment(channels * int64_t{sizeof(T)}, {from, to}), [&](auto count) {
      constexpr int kCount = decltype(count)::value;
      const Layout at = {batch, views, prefix, tokens, visible, static_cast<int>(channels / kCount)};
      const dim3 grid(static_cast<unsigned int>((at.grid_rows() + tile - 1) / tile),
                      static_cast<unsigned int>(std::min<int64_t>(batch, 65535)));
      const size_t map_bytes = static_cast<size_t>(views * tile) * sizeof(int32_t);
      gather_backward_kernel<T, kCount><<<grid, kThreads, map_bytes, current_stream(device)>>>(
          static_cast<const Pack<T, kCount>*>(from), indices.const_data_ptr<int64_t>(),
          static_cast<Pack<T, kCount>*>(to), at, static_cast<int>(tile), lanes_shift(at.units));
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    });
  });
  return result;
}

}  // namespace
}  // namespace dmjd

STABLE_TORCH_LIBRARY_IMPL(dmjd, CUDA, m) {
  m.impl("gather_tokens", DMJD_BOX(&dmjd::gather_tokens_cuda));
  m.impl("gather_tokens_backward", DMJD_BOX(&dmjd::gather_tokens_backward_cuda));
}
