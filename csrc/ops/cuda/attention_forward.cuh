// softmax(scale q k' + bias) v of one head a block, 16 queries a warp and turn.
#pragma once

#include "attention_tiles.cuh"

namespace dmjd::attention {

template <typename T>
struct Forward {
  Heads<const T> q, k, v;
  Heads<T> out;
  const T* bias;  // [windows, H, N, N] or null
  float* lse;     // [B, H, N]
  int heads, tokens, windows;
  int chunks;  // of keys
  float scale;
};

// kTiles: tiles of keys whose scores a warp holds at once. More keys come in further chunks, with sums rescaled.
template <typename T, int kD, int kTiles, bool kBias>
__global__ void __launch_bounds__(kThreads, !kBias && (kD == 32 || (kD == 64 && kTiles == 4)) ? 2 : 1) forward_kernel(const Forward<T> p) {
  using R = Rows<kD>;
  extern __shared__ __align__(128) unsigned char shared[];
  const int b = blockIdx.x / p.heads, h = blockIdx.x % p.heads, tokens = p.tokens;
  const int warp = threadIdx.x / kLanes, warps = blockDim.x / kLanes, lane = threadIdx.x % kLanes;
  const int query_tiles = (tokens + kTile - 1) / kTile, keys = p.chunks * kTiles * kTile;
  const uint32_t q_at = shared_address(shared), k_at = q_at + query_tiles * kTile * R::kStride;
  const uint32_t v_at = k_at + keys * R::kStride;
  load_rows<T, kD>(q_at, p.q, b, h, 0, query_tiles * kTile, tokens);
  load_rows<T, kD>(k_at, p.k, b, h, 0, keys, tokens);
  commit_copies();
  load_rows<T, kD>(v_at, p.v, b, h, 0, keys, tokens);
  commit_copies();
  const int down = place<kD>(true), across = place<kD>(false);
  const float unit = kBias ? 1.f : p.scale * kLog2e;  // from scores to exponents of 2
  const T* bias = kBias ? p.bias + (static_cast<int64_t>(b % p.windows) * p.heads + h) * tokens * tokens : nullptr;
  wait_copies<1>();
  __syncthreads();

  bool values_there = false;
  for (int tile = warp; tile < query_tiles; tile += warps) {
    const int row = tile * kTile + lane / 4;
    uint32_t q[kD / kTile][4];
#pragma unroll
    for (int k = 0; k < kD / kTile; ++k) load_matrices(q[k], beside<kD>(q_at + tile * kTile * R::kStride + down, k));
    float out[kD / 8][4] = {}, sum[2] = {}, highest[2] = {-INFINITY, -INFINITY};
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      const int first = chunk * kTiles * kTile;
      float score[2 * kTiles][4] = {};
#pragma unroll
      for (int k = 0; k < kD / kTile; ++k) {
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          uint32_t right[4];
          load_matrices(right, beside<kD>(k_at + (first + j * kTile) * R::kStride + across, k));
          multiply<T>(score[2 * j], q[k], right[0], right[1]);
          multiply<T>(score[2 * j + 1], q[k], right[2], right[3]);
        }
      }
      if (kBias || first + kTiles * kTile > tokens) {
#pragma unroll
        for (int n = 0; n < 2 * kTiles; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int key = first + n * 8 + 2 * (lane % 4) + e % 2;
            if (kBias && key < tokens) {
              const int query = min(row + 8 * (e / 2), tokens - 1);
              score[n][e] = (score[n][e] * p.scale + widen(bias[query * tokens + key])) * kLog2e;
            }
            if (key >= tokens) score[n][e] = -INFINITY;
          }
        }
      }
      float shift[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = highest[half];
#pragma unroll
        for (int n = 0; n < 2 * kTiles; ++n) top = fmaxf(top, fmaxf(score[n][2 * half], score[n][2 * half + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        shift[half] = top == -INFINITY ? 0.f : top * unit;  // a bias of -inf may hide every key so far
        const float rescale = exp2_approx(highest[half] * unit - shift[half]);
        highest[half] = top;
        sum[half] *= rescale;
#pragma unroll
        for (int n = 0; n < kD / 8; ++n) out[n][2 * half] *= rescale, out[n][2 * half + 1] *= rescale;
      }
#pragma unroll
      for (int n = 0; n < 2 * kTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          score[n][e] = exp2_approx(fmaf(score[n][e], unit, -shift[e / 2]));
          sum[e / 2] += score[n][e];
        }
      }
      if (!values_there) {
        wait_copies<0>();
        __syncthreads();
        values_there = true;
      }
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const uint32_t left[4] = {
            pack<T>(score[2 * j][0], score[2 * j][1]), pack<T>(score[2 * j][2], score[2 * j][3]),
            pack<T>(score[2 * j + 1][0], score[2 * j + 1][1]), pack<T>(score[2 * j + 1][2], score[2 * j + 1][3])};
#pragma unroll
        for (int n = 0; n < kD / kTile; ++n) {
          uint32_t right[4];
          load_transposed(right, beside<kD>(v_at + (first + j * kTile) * R::kStride + down, n));
          multiply<T>(out[2 * n], left, right[0], right[1]);
          multiply<T>(out[2 * n + 1], left, right[2], right[3]);
        }
      }
    }
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = sum[half];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      // A query that no key is visible to gets zeros, and sends back none.
      inverse[half] = total > 0.f ? 1.f / total : 0.f;
      const float lse = total > 0.f ? (highest[half] * unit + log2f(total)) / kLog2e : INFINITY;
      const int query = row + 8 * half;
      if (lane % 4 == 0 && query < tokens) p.lse[static_cast<int64_t>(blockIdx.x) * tokens + query] = lse;
    }
    store_tile<T, kD>(shared + tile * kTile * R::kStride, p.out, b, h, tile * kTile, tokens, out, inverse[0],
                      inverse[1]);
  }
}

}  // namespace dmjd::attention
