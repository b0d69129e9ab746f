// What the kernels of masked_depthwise_conv2d are given, and how they look at it: one channel or two a lane, in the type of
// sums, and the tokens around a token.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../dtypes.h"
#include "launch.h"

namespace dmjd {

constexpr int kLanes = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

template <typename T>
struct Problem {
  using Sum = dmjd::Sum<T>;

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

}  // namespace dmjd
