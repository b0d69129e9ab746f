// scatter_tokens and its gradient. Both are bound by memory: every row is read and written once. Mask token and
// positions are summed in two ordered stages, not by atomics. A wrong slot gives wrong values and never leaves a tensor.
//
// The second number of __launch_bounds__ is the blocks a multiprocessor shall hold at once. Without it the compiler
// aims at occupancies of its own, for which it spills registers.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>
#include <type_traits>

#include "rows.h"

namespace dmjd {
namespace {

// The row of x, or the mask token, that a row of scatter_tokens' result repeats.
template <typename Unit>
struct Scatter {
  const Unit* x;
  const Unit* mask_token;
  const int64_t* restore;
  Layout at;

  struct Row {
    const Unit* from;
    int64_t token;  // negative in the prefix
  };

  __device__ Row locate(int64_t row) const {
    const int64_t view_row = row / at.grid_rows(), token = row - view_row * at.grid_rows() - at.prefix;
    int64_t slot = token;
    if (token >= 0) {
      slot = restore[view_row * at.tokens + token];
      if (!in_range(slot, at.visible)) return {mask_token, token};
    }
    return {x + (view_row * at.view_rows() + at.prefix + slot) * at.units, token};
  }

  __device__ const Unit* operator()(int64_t row) const { return locate(row).from; }
};

template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads, 5)
    scatter_add_kernel(Scatter<Pack<T, kCount>> source, const Pack<T, kCount>* __restrict__ positions,
                       Pack<T, kCount>* __restrict__ out, int64_t rows, int shift) {
  constexpr int kUnroll = 2;
  const Layout at = source.at;
  const int lanes = 1 << shift, lane = threadIdx.x & (lanes - 1);
  const int64_t stride = (static_cast<int64_t>(gridDim.x) * kThreads) >> shift;
  for (int64_t row = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) >> shift; row < rows; row += stride) {
    const auto [from, token] = source.locate(row);
    Pack<T, kCount>* to = out + row * at.units;
    if (token < 0) {
      copy_row(from, to, at.units, lane, lanes);
      continue;
    }
    const Pack<T, kCount>* position = positions + token * at.units;
    for (int first = lane; first < at.units; first += kUnroll * lanes) {
      Pack<T, kCount> value[kUnroll], added[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (first + u * lanes >= at.units) continue;
        value[u] = from[first + u * lanes];
        added[u] = position[first + u * lanes];
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (first + u * lanes >= at.units) continue;
        Sum<T> sum[kCount] = {};
        add_to<T, kCount>(sum, value[u]);
        add_to<T, kCount>(sum, added[u]);
        to[first + u * lanes] = rounded<T, kCount>(sum);
      }
    }
  }
}

// About this many blocks share the scatter gradient: enough to fill a large card, few enough that their sums are small.
// A constant and not the card's size, so that the order of summation is the same on every card.
constexpr int64_t kSumBlocks = 512;

// threadIdx.x is a vector of a row, threadIdx.y a row of the grid; a thread walks along the view rows of its chunk
// (blockIdx.y), hands visible tokens on, and keeps the sums of its column in registers.
template <typename T, int kCount, bool kPositions>
__global__ void __launch_bounds__(kThreads, kPositions ? 2 : 3)
    scatter_backward_kernel(const Pack<T, kCount>* __restrict__ grad, const int64_t* __restrict__ restore,
                            Pack<T, kCount>* __restrict__ x, Pack<Sum<T>, kCount>* __restrict__ mask_sums,
                            Pack<Sum<T>, kCount>* __restrict__ position_sums, Layout at, int64_t per_chunk) {
  constexpr int kUnroll = 4;
  __shared__ Sum<T> shared[kThreads * kCount];
  const int64_t view_rows = at.views * at.batch;
  const int64_t begin = blockIdx.y * per_chunk, end = min(begin + per_chunk, view_rows);
  for (int left = blockIdx.z * blockDim.x; left < at.units; left += gridDim.z * blockDim.x) {
    const int column = left + threadIdx.x;
    Sum<T> hidden[kCount] = {};
    for (int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
         row < at.grid_rows() && column < at.units; row += static_cast<int64_t>(gridDim.x) * blockDim.y) {
      const int64_t token = row - at.prefix;  // negative in the prefix, which passes through
      const Pack<T, kCount>* from = grad + (begin * at.grid_rows() + row) * at.units + column;
      Pack<T, kCount>* to = x + (begin * at.view_rows() + at.prefix) * at.units + column;
      const int64_t* slots = restore + begin * at.tokens + token;
      Sum<T> total[kCount] = {};
      for (int64_t left_over = end - begin; left_over > 0; left_over -= kUnroll) {
        Pack<T, kCount> held[kUnroll];
        int64_t slot[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          if (u >= left_over) continue;
          held[u] = from[u * at.grid_rows() * at.units];
          slot[u] = token < 0 ? token : slots[u * at.tokens];
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          if (u >= left_over) continue;
          if (token < 0 || in_range(slot[u], at.visible)) {
            to[(u * at.view_rows() + slot[u]) * at.units] = held[u];
          } else {
            add_to<T, kCount>(hidden, held[u]);
          }
          if (kPositions) add_to<T, kCount>(total, held[u]);
        }
        from += kUnroll * at.grid_rows() * at.units;
        to += kUnroll * at.view_rows() * at.units;
        slots += kUnroll * at.tokens;
      }
      if (kPositions && token >= 0) {
        position_sums[(blockIdx.y * at.tokens + token) * at.units + column] = rounded<Sum<T>, kCount>(total);
      }
    }

    Sum<T>* mine = shared + (threadIdx.y * blockDim.x + threadIdx.x) * kCount;
#pragma unroll
    for (int e = 0; e < kCount; ++e) mine[e] = hidden[e];
    __syncthreads();
    for (int rows = blockDim.y; rows > 1;) {
      const int half = (rows + 1) / 2;
      if (threadIdx.y + half < rows) {
#pragma unroll
        for (int e = 0; e < kCount; ++e) mine[e] += mine[half * blockDim.x * kCount + e];
      }
      rows = half;
      __syncthreads();
    }
    if (threadIdx.y == 0 && column < at.units) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) hidden[e] = mine[e];
      mask_sums[(static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * at.units + column] =
          rounded<Sum<T>, kCount>(hidden);
    }
    __syncthreads();  // `shared` is free again
  }
}

// out[width] = sum over rows of parts[rows][width], rounded once. 32 columns a block.
template <typename T>
__global__ void add_parts_kernel(const Sum<T>* __restrict__ parts, int64_t rows, int64_t width, T* __restrict__ out) {
  __shared__ Sum<T> shared[32][32];
  const int64_t stride = static_cast<int64_t>(gridDim.x) * 32;
  for (int64_t left = static_cast<int64_t>(blockIdx.x) * 32; left < width; left += stride) {
    const int64_t column = left + threadIdx.x;
    Sum<T> sum = 0;
    if (column < width) {
#pragma unroll 8
      for (int64_t row = threadIdx.y; row < rows; row += blockDim.y) sum += parts[row * width + column];
    }
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    for (int half = blockDim.y / 2; half > 0; half /= 2) {
      if (threadIdx.y < half) shared[threadIdx.y][threadIdx.x] += shared[threadIdx.y + half][threadIdx.x];
      __syncthreads();
    }
    if (threadIdx.y == 0 && column < width) out[column] = static_cast<T>(shared[0][threadIdx.x]);
    __syncthreads();  // `shared` is free again
  }
}

template <typename T>
void add_parts(const Sum<T>* parts, int64_t rows, int64_t width, T* out, cudaStream_t stream) {
  unsigned int height = 1;  // a power of two, for the tree
  while (height < 32 && height < rows) height *= 2;
  const auto blocks = static_cast<unsigned int>(std::min<int64_t>((width + 31) / 32, 8192));
  add_parts_kernel<T><<<blocks, dim3(32, height), 0, stream>>>(parts, rows, width, out);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

Tensor scatter_tokens_cuda(const Tensor& x, const Tensor& mask_token, const Tensor& restore,
                           const std::optional<Tensor>& positions, int64_t prefix) {
  const int32_t device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Tensor tokens = torch::stable::contiguous(x);
  const Tensor mask = torch::stable::contiguous(mask_token);
  const Tensor slots = torch::stable::contiguous(restore);
  std::optional<Tensor> added;
  if (positions.has_value()) added = torch::stable::contiguous(*positions);
  const int64_t channels = x.size(2);
  Layout at = {restore.size(1), restore.size(0), prefix, restore.size(2), x.size(1) - prefix, 0};
  Tensor result = torch::stable::new_empty(tokens, {x.size(0), at.grid_rows(), channels});
  if (result.numel() == 0) return result;

  require_row("scatter_tokens", channels, x.element_size());
  const int64_t rows = result.size(0) * result.size(1);
  const int64_t row_bytes = channels * static_cast<int64_t>(x.element_size());
  const void* from = tokens.const_data_ptr();
  const void* fill = mask.const_data_ptr();
  const int64_t* index = slots.const_data_ptr<int64_t>();
  void* to = result.mutable_data_ptr();
  const cudaStream_t stream = current_stream(device);
  if (!added.has_value()) {
    for_copy_unit(common_alignment(row_bytes, {from, fill, to}), [&](auto unit) {
      using Unit = decltype(unit);
      at.units = static_cast<int>(row_bytes / static_cast<int64_t>(sizeof(Unit)));
      const Scatter<Unit> source = {static_cast<const Unit*>(from), static_cast<const Unit*>(fill), index, at};
      copy_rows(source, static_cast<Unit*>(to), rows, at.units, stream);
    });
    return result;
  }
  const void* position = added->const_data_ptr();
  for_floating_type(x.scalar_type(), "scatter_tokens", [&](auto zero) {
    using T = decltype(zero);
    for_pack<T>(common_alignment(row_bytes, {from, fill, position, to}), [&](auto count) {
      constexpr int kCount = decltype(count)::value;
      using Unit = Pack<T, kCount>;
      at.units = static_cast<int>(channels / kCount);
      const Scatter<Unit> source = {static_cast<const Unit*>(from), static_cast<const Unit*>(fill), index, at};
      const int shift = lanes_shift(at.units);
      scatter_add_kernel<T, kCount><<<blocks_for_rows(rows, shift), kThreads, 0, stream>>>(
          source, static_cast<const Unit*>(position), static_cast<Unit*>(to), rows, shift);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    });
  });
  return result;
}

std::tuple<Tensor, Tensor, Tensor> scatter_tokens_backward_cuda(const Tensor& grad, const Tensor& restore,
                                                                int64_t visible, int64_t prefix, bool positions) {
  const int32_t device = grad.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Tensor grads = torch::stable::contiguous(grad);
  const Tensor slots = torch::stable::contiguous(restore);
  const int64_t view_rows = grad.size(0), channels = grad.size(2), tokens = restore.size(2);
  Tensor x = torch::stable::new_empty(grads, {view_rows, prefix + visible, channels});
  if (grad.numel() == 0) {
    return {x, torch::stable::new_zeros(grads, {channels}),
            positions ? torch::stable::new_zeros(grads, {tokens, channels}) : torch::stable::new_empty(grads, {0})};
  }
  require_row("scatter_tokens_backward", channels, grad.element_size());
  Tensor mask_token = torch::stable::new_empty(grads, {channels});
  Tensor position =
      positions ? torch::stable::new_empty(grads, {tokens, channels}) : torch::stable::new_empty(grads, {0});

  const cudaStream_t stream = current_stream(device);
  for_floating_type(grad.scalar_type(), "scatter_tokens_backward", [&](auto zero) {
    using T = decltype(zero);
    constexpr auto kSumType = std::is_same_v<T, double> ? torch::headeronly::ScalarType::Double
                                                        : torch::headeronly::ScalarType::Float;
    const void* from = grads.const_data_ptr();
    void* to = x.mutable_data_ptr();
    for_pack<T>(common_alignment(channels * int64_t{sizeof(T)}, {from, to}), [&](auto count) {
      constexpr int kCount = decltype(count)::value;
      const int units = static_cast<int>(channels / kCount);
      const Layout at = {restore.size(1), restore.size(0), prefix, tokens, visible, units};
      // Columns are split evenly over blocks; what a row leaves of a block's threads goes to further rows.
      const int64_t panels = (at.units + kThreads - 1) / kThreads;
      const int64_t width = (at.units + panels - 1) / panels, height = kThreads / width;
      const int64_t row_blocks = std::min((at.grid_rows() + height - 1) / height, kSumBlocks);
      const int64_t wanted_chunks = std::clamp<int64_t>(kSumBlocks / row_blocks, 1, view_rows);
      const int64_t per_chunk = (view_rows + wanted_chunks - 1) / wanted_chunks;
      const int64_t chunks = (view_rows + per_chunk - 1) / per_chunk;
      const dim3 grid(static_cast<unsigned int>(row_blocks), static_cast<unsigned int>(chunks),
                      static_cast<unsigned int>(std::min<int64_t>(panels, 65535)));
      const dim3 block(static_cast<unsigned int>(width), static_cast<unsigned int>(height));

      Tensor mask_sums = torch::stable::new_empty(grads, {chunks * row_blocks, channels}, kSumType);
      Tensor position_sums = torch::stable::new_empty(grads, {positions ? chunks * tokens * channels : 0}, kSumType);
      auto* mask_parts = static_cast<Sum<T>*>(mask_sums.mutable_data_ptr());
      auto* position_parts = static_cast<Sum<T>*>(position_sums.mutable_data_ptr());
      const auto kernel =
          positions ? scatter_backward_kernel<T, kCount, true> : scatter_backward_kernel<T, kCount, false>;
      kernel<<<grid, block, 0, stream>>>(static_cast<const Pack<T, kCount>*>(from), slots.const_data_ptr<int64_t>(),
                                         static_cast<Pack<T, kCount>*>(to),
                                         reinterpret_cast<Pack<Sum<T>, kCount>*>(mask_parts),
                                         reinterpret_cast<Pack<Sum<T>, kCount>*>(position_parts), at, per_chunk);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
      add_parts<T>(mask_parts, chunks * row_blocks, channels, static_cast<T*>(mask_token.mutable_data_ptr()), stream);
      if (positions) {
        add_parts<T>(position_parts, chunks, tokens * channels, static_cast<T*>(position.mutable_data_ptr()), stream);
      }
    });
  });
  return {x, mask_token, position};
}

}  // namespace
}  // namespace dmjd

STABLE_TORCH_LIBRARY_IMPL(dmjd, CUDA, m) {
  m.impl("scatter_tokens", DMJD_BOX(&dmjd::scatter_tokens_cuda));
  m.impl("scatter_tokens_backward", DMJD_BOX(&dmjd::scatter_tokens_backward_cuda));
}
