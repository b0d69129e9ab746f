// Tiles of short_attention: rows of a head in shared memory, their fragments, and tensor core products m16n8k16.
//
// A warp's lane holds, of a 16 x 8 float32 result, rows lane / 4 and lane / 4 + 8 at columns 2 * (lane % 4) and the next.
// Two results side by side, rounded and packed, are the left operand of a product over their 16 columns.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "launch.h"

namespace dmjd::attention {

constexpr int kTile = 16;  // rows of a tile, and keys or channels that one product adds up
constexpr int kLanes = 32;
constexpr float kLog2e = 1.44269504088896341f;

// One of q, k, v, out or their gradients, [B, N, H, D]; strides in elements. Rows are multiples of 16 bytes apart.
template <typename T>
struct Heads {
  T* data;
  int64_t batch, token, head;

  __device__ T* row(int b, int h, int n) const { return data + b * batch + n * token + h * head; }
};

// Where rows of kD elements lie in shared memory: 8 rows read at one chunk of 16 bytes meet no bank twice.
template <int kD>
struct Rows {
  static constexpr int kChunks = kD / 8;
  static constexpr int kStride = kD == 80 ? 176 : kD * 2;  // bytes
  static __device__ __forceinline__ int offset(int row, int chunk) {
    const int swizzle = kD == 64 ? row & 7 : kD == 32 ? (row >> 1) & 3 : 0;
    return row * kStride + ((chunk ^ swizzle) << 4);
  }
};

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// The whole block starts to copy rows [first, first + count) of a head; rows from `tokens` on become zero.
template <typename T, int kD>
__device__ __forceinline__ void load_rows(uint32_t to, const Heads<const T>& heads, int b, int h, int first, int count,
                                          int tokens) {
  using R = Rows<kD>;
  const T* from = heads.row(b, h, 0);
  for (int i = threadIdx.x; i < count * R::kChunks; i += blockDim.x) {
    const int row = i / R::kChunks, chunk = i % R::kChunks, token = first + row;
    const bool inside = token < tokens;
    const T* source = from + (inside ? token : 0) * heads.token + chunk * 8;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + R::offset(row, chunk)), "l"(source),
                 "r"(inside ? 16 : 0)
                 : "memory");
  }
}

__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from));
}

__device__ __forceinline__ void load_transposed(uint32_t (&to)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from));
}

// The place, from a tile's first byte on, that a lane names to load four 8 x 8 matrices of its first 16 channels. `down`:
// the second matrix is the one below the first (left operands; right operands that are transposed), else the one beside
// it (right operands).
template <int kD>
__device__ __forceinline__ int place(bool down) {
  const int lane = threadIdx.x % kLanes, low = (lane >> 3) & 1, high = lane >> 4;
  return Rows<kD>::offset((lane & 7) + 8 * (down ? low : high), down ? high : low);
}

// The same place 16 * step channels on. Tiles begin at multiples of 128 bytes where chunks are permuted.
template <int kD>
__device__ __forceinline__ uint32_t beside(uint32_t address, int step) {
  return kD == 80 ? address + 32 * step : address ^ (32 * step);
}

__device__ __forceinline__ void store_word(uint32_t to, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

// sum += left * right, of bfloat16 or float16 with float32 sums.
template <typename T>
__device__ __forceinline__ void multiply(float (&sum)[4], const uint32_t (&left)[4], uint32_t right0, uint32_t right1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
  }
}

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t word;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    memcpy(&word, &pair, sizeof(word));
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    memcpy(&word, &pair, sizeof(word));
  }
  return word;
}

template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t word) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    __nv_bfloat162 pair;
    memcpy(&pair, &word, sizeof(word));
    return __bfloat1622float2(pair);
  } else {
    __half2 pair;
    memcpy(&pair, &word, sizeof(word));
    return __half22float2(pair);
  }
}

__device__ __forceinline__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float widen(__half value) { return __half2float(value); }

template <typename T>
__device__ __forceinline__ T round_to(float value) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(value);
  } else {
    return __float2half_rn(value);
  }
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Writes a warp's 16 x kD result to rows [first, first + 16) of a head by way of 16 rows of shared memory that no other
// warp is using. Factors are those of rows lane / 4 and lane / 4 + 8.
template <typename T, int kD>
__device__ __forceinline__ void store_tile(unsigned char* shared, const Heads<T>& heads, int b, int h, int first,
                                           int tokens, const float (&result)[kD / 8][4], float upper, float lower) {
  using R = Rows<kD>;
  const int lane = threadIdx.x % kLanes, row = lane / 4, word = 4 * (lane % 4);
  __syncwarp();
#pragma unroll
  for (int n = 0; n < R::kChunks; ++n) {
    *reinterpret_cast<uint32_t*>(shared + R::offset(row, n) + word) =
        pack<T>(result[n][0] * upper, result[n][1] * upper);
    *reinterpret_cast<uint32_t*>(shared + R::offset(row + 8, n) + word) =
        pack<T>(result[n][2] * lower, result[n][3] * lower);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kTile * R::kChunks / kLanes; ++i) {
    const int at = i * kLanes + lane, r = at / R::kChunks, chunk = at % R::kChunks;
    const uint4 value = *reinterpret_cast<const uint4*>(shared + R::offset(r, chunk));
    if (first + r < tokens) *reinterpret_cast<uint4*>(heads.row(b, h, first + r) + chunk * 8) = value;
  }
}

}  // namespace dmjd::attention
