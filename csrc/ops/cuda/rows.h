// Rows of tokens as vectors: a group of up to 32 neighbouring lanes walks along one row, 16 bytes a lane where sizes
// and pointers are multiples of it.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "../dtypes.h"
#include "launch.h"

namespace dmjd {

// Elements that are loaded and stored by one instruction. Kept as words: as an array of 16-bit numbers each would take
// a register of its own from the load on.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  using Word = std::conditional_t<sizeof(T) * kCount % 4 == 0, uint32_t, uint16_t>;
  Word word[sizeof(T) * kCount / sizeof(Word)];
};

constexpr int64_t kWidest = 16;  // bytes

// Within a row positions are 32-bit, with room for a few strides beyond its end; rows themselves are counted in 64.
constexpr int64_t kLongestRow = int64_t{1} << 30;

// The widest power of two, up to 16, that divides the bytes of a row and every address.
inline int64_t common_alignment(int64_t row_bytes, std::initializer_list<const void*> pointers) {
  uint64_t bits = static_cast<uint64_t>(row_bytes) | kWidest;
  for (const void* pointer : pointers) bits |= reinterpret_cast<uintptr_t>(pointer);
  return static_cast<int64_t>(bits & (~bits + 1));
}

// Calls action with a value of the type in which rows of any dtype are copied.
template <typename Action>
void for_copy_unit(int64_t alignment, const Action& action) {
  switch (alignment) {
    case 16:
      return action(Pack<uint32_t, 4>{});
    case 8:
      return action(Pack<uint32_t, 2>{});
    case 4:
      return action(uint32_t{});
    case 2:
      return action(uint16_t{});
    default:
      return action(uint8_t{});
  }
}

// How many lanes share a row of `units` vectors: a power of two, so that a lane finds its place by shifts.
inline int lanes_shift(int64_t units) {
  int shift = 0;
  while (shift < 5 && (int64_t{1} << shift) < units) ++shift;
  return shift;
}

inline unsigned int blocks_for_rows(int64_t rows, int shift) { return blocks_for(rows << shift); }

// Copies a row; without a source it becomes zero. All loads of a round are under way before its first store.
template <typename Unit>
__device__ __forceinline__ void copy_row(const Unit* __restrict__ from, Unit* __restrict__ to, int units, int lane,
                                         int lanes) {
  constexpr int kUnroll = 4;
  for (int first = lane; first < units; first += kUnroll * lanes) {
    Unit held[kUnroll] = {};
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (from != nullptr && first + u * lanes < units) held[u] = from[first + u * lanes];
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * lanes < units) to[first + u * lanes] = held[u];
    }
  }
}

template <typename T, int kCount>
__device__ __forceinline__ void add_to(Sum<T> (&sum)[kCount], const Pack<T, kCount>& pack) {
  T value[kCount];
  memcpy(value, &pack, sizeof(pack));
#pragma unroll
  for (int e = 0; e < kCount; ++e) sum[e] += static_cast<Sum<T>>(value[e]);
}

template <typename T, int kCount>
__device__ __forceinline__ Pack<T, kCount> rounded(const Sum<T> (&sum)[kCount]) {
  T value[kCount];
#pragma unroll
  for (int e = 0; e < kCount; ++e) value[e] = static_cast<T>(sum[e]);
  Pack<T, kCount> pack;
  memcpy(&pack, value, sizeof(pack));
  return pack;
}

// Rows of the grid and rows of a view, in one order: the prefix, then the tokens.
struct Layout {
  int64_t batch;
  int64_t views;
  int64_t prefix;
  int64_t tokens;   // N
  int64_t visible;  // V
  int units;        // vectors in a row

  __host__ __device__ int64_t grid_rows() const { return prefix + tokens; }
  __host__ __device__ int64_t view_rows() const { return prefix + visible; }
};

__device__ __forceinline__ bool in_range(int64_t id, int64_t size) {
  return static_cast<uint64_t>(id) < static_cast<uint64_t>(size);
}

// Calls action with the number of elements of T that are read at once, as a compile-time constant.
template <typename T, typename Action>
void for_pack(int64_t alignment, const Action& action) {
  if (alignment == kWidest) {
    action(std::integral_constant<int, static_cast<int>(kWidest / sizeof(T))>{});
  } else {
    action(std::integral_constant<int, 1>{});
  }
}

inline void require_row(const char* op, int64_t channels, int64_t element_size) {
  STD_TORCH_CHECK(channels <= kLongestRow / element_size, op, ": a token of ", channels, " channels is too long");
}

template <typename Unit, typename Source>
__global__ void __launch_bounds__(kThreads)
    copy_rows_kernel(Source source, Unit* __restrict__ out, int64_t rows, int units, int shift) {
  const int lanes = 1 << shift, lane = threadIdx.x & (lanes - 1);
  const int64_t stride = (static_cast<int64_t>(gridDim.x) * kThreads) >> shift;
  for (int64_t row = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) >> shift; row < rows; row += stride) {
    copy_row(source(row), out + row * units, units, lane, lanes);
  }
}

template <typename Unit, typename Source>
void copy_rows(const Source& source, Unit* out, int64_t rows, int units, cudaStream_t stream) {
  const int shift = lanes_shift(units);
  const unsigned int blocks = blocks_for_rows(rows, shift);
  copy_rows_kernel<Unit, Source><<<blocks, kThreads, 0, stream>>>(source, out, rows, units, shift);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace dmjd
