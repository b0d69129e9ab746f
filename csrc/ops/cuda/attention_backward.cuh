// The gradients of q, k and v of one head a block, by five products and no atomics.
//
// A warp owns kM tiles of keys and their two gradients, in registers. Queries come in chunks: first every warp computes
// the probabilities and the scores' gradients of its keys and leaves the latter in shared memory, then every warp takes
// query tiles of the chunk and multiplies what is there by all keys.
#pragma once

#include "attention_tiles.cuh"

namespace dmjd::attention {

template <typename T>
struct Backward {
  Heads<const T> q, k, v, out, grad;
  Heads<T> grad_q, grad_k, grad_v;
  const T* bias;     // [windows, H, N, N] or null
  const float* lse;  // [B, H, N]
  float* delta;      // [B, H, N] or null: sums of out * grad, for the gradient of bias
  int heads, tokens, windows;
  int chunk_tiles;  // of queries
  float scale, unit;  // unit: scale * log2(e)
};

// Bytes of shared memory between the parts of a block, in their order.
template <int kD>
struct BackwardLayout {
  int query_rows, key_rows, chunk_tiles;

  __host__ __device__ BackwardLayout(int tokens, int keys_per_warp, int chunk_tiles)
      : query_rows((tokens + kTile - 1) / kTile * kTile),
        key_rows((tokens + keys_per_warp - 1) / keys_per_warp * keys_per_warp),
        chunk_tiles(chunk_tiles) {}
  __host__ __device__ int grad_at() const { return query_rows * Rows<kD>::kStride; }
  __host__ __device__ int k_at() const { return 2 * grad_at(); }
  __host__ __device__ int v_at() const { return k_at() + key_rows * Rows<kD>::kStride; }
  __host__ __device__ int stats_at() const { return v_at() + key_rows * Rows<kD>::kStride; }
  // Scores' gradients, a row a key; before them out. The 8 more columns keep rows off each other's banks.
  __host__ __device__ int scores_at() const { return stats_at() + query_rows * int{sizeof(float2)}; }
  __host__ __device__ int score_stride() const { return (chunk_tiles * kTile + 8) * 2; }
  __host__ __device__ int total() const {
    const int scores = key_rows * score_stride();
    return scores_at() + (scores > grad_at() ? scores : grad_at());
  }
};

// Sums of out * grad along a row, and the row's log-sum-exp in powers of 2. Rows past the end get no probability.
template <typename T, int kD>
__device__ __forceinline__ void row_stats(const unsigned char* grad, const unsigned char* out, float2* stats, int rows,
                                          const Backward<T>& p) {
  using R = Rows<kD>;
  constexpr int kSharing = kD == 80 ? 2 : R::kChunks;  // lanes that share a row
  const int64_t first = static_cast<int64_t>(blockIdx.x) * p.tokens;
  const int part = threadIdx.x % kSharing;
  for (int row = threadIdx.x / kSharing; row < rows; row += blockDim.x / kSharing) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < R::kChunks / kSharing; ++i) {
      const int at = R::offset(row, i * kSharing + part);
      const uint4 a = *reinterpret_cast<const uint4*>(grad + at), b = *reinterpret_cast<const uint4*>(out + at);
      const uint32_t left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 l = unpack<T>(left[w]), r = unpack<T>(right[w]);
        sum = fmaf(l.x, r.x, fmaf(l.y, r.y, sum));
      }
    }
    // A warp takes up to 16 rows at once, of which there are a multiple: all its lanes come here together.
#pragma unroll
    for (int apart = 1; apart < kSharing; apart *= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    if (part == 0) {
      const bool inside = row < p.tokens;
      stats[row] = make_float2(inside ? p.lse[first + row] * kLog2e : INFINITY, sum);
      if (inside && p.delta != nullptr) p.delta[first + row] = sum;
    }
  }
}

template <typename T, int kD, int kM, int kWarps, int kBlocks, bool kHoldK, bool kHoldV, bool kBias>
__global__ void __launch_bounds__(kWarps* kLanes, kBlocks) backward_kernel(const Backward<T> p) {
  using R = Rows<kD>;
  constexpr int kSteps = kD / kTile;
  extern __shared__ __align__(128) unsigned char shared[];
  const int b = blockIdx.x / p.heads, h = blockIdx.x % p.heads, tokens = p.tokens;
  const int warp = threadIdx.x / kLanes, warps = blockDim.x / kLanes, lane = threadIdx.x % kLanes;
  const int query_tiles = (tokens + kTile - 1) / kTile, row = lane / 4, column = 2 * (lane % 4);
  const BackwardLayout<kD> at(tokens, kM * kTile, p.chunk_tiles);
  const uint32_t q_at = shared_address(shared), grad_at = q_at + at.grad_at(), k_at = q_at + at.k_at();
  const uint32_t v_at = q_at + at.v_at(), scores_at = q_at + at.scores_at();
  const int score_stride = at.score_stride();
  float2* stats = reinterpret_cast<float2*>(shared + at.stats_at());
  load_rows<T, kD>(grad_at, p.grad, b, h, 0, at.query_rows, tokens);
  load_rows<T, kD>(scores_at, p.out, b, h, 0, at.query_rows, tokens);
  commit_copies();
  load_rows<T, kD>(q_at, p.q, b, h, 0, at.query_rows, tokens);
  load_rows<T, kD>(k_at, p.k, b, h, 0, at.key_rows, tokens);
  load_rows<T, kD>(v_at, p.v, b, h, 0, at.key_rows, tokens);
  commit_copies();
  wait_copies<1>();
  __syncthreads();
  row_stats<T, kD>(shared + at.grad_at(), shared + at.scores_at(), stats, at.query_rows, p);
  wait_copies<0>();
  __syncthreads();

  const int down = place<kD>(true), across = place<kD>(false);
  const T* bias = kBias ? p.bias + (static_cast<int64_t>(b % p.windows) * p.heads + h) * tokens * tokens : nullptr;
  const int first_key = warp * kM * kTile;
  const bool edge = first_key + kM * kTile > tokens;
  const uint32_t own_k = k_at + first_key * R::kStride, own_v = v_at + first_key * R::kStride;
  uint32_t k_held[kM][kSteps][4], v_held[kM][kSteps][4];  // no registers where they are not held
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if constexpr (kHoldK) load_matrices(k_held[m][k], beside<kD>(own_k + m * kTile * R::kStride + down, k));
      if constexpr (kHoldV) load_matrices(v_held[m][k], beside<kD>(own_v + m * kTile * R::kStride + down, k));
    }
  }
  float grad_k[kM][kD / 8][4] = {}, grad_v[kM][kD / 8][4] = {};
  // Where this lane leaves its scores' gradients, and where it reads four matrices of them, keys downwards.
  const uint32_t leave = scores_at + (first_key + row) * score_stride + column * 2;
  const uint32_t take = scores_at + ((lane & 7) + 8 * (lane >> 4)) * score_stride + ((lane >> 3) & 1) * 16;

  for (int first_tile = 0; first_tile < query_tiles; first_tile += p.chunk_tiles) {
    const int last_tile = min(first_tile + p.chunk_tiles, query_tiles);
    for (int tile = first_tile; tile < last_tile; ++tile) {
      const uint32_t q_tile = q_at + tile * kTile * R::kStride, grad_tile = grad_at + tile * kTile * R::kStride;
      float score[kM][2][4] = {}, back[kM][2][4] = {};
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        uint32_t right[4];
        load_matrices(right, beside<kD>(q_tile + across, k));
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          if constexpr (!kHoldK) load_matrices(k_held[m][k], beside<kD>(own_k + m * kTile * R::kStride + down, k));
          multiply<T>(score[m][0], k_held[m][k], right[0], right[1]);
          multiply<T>(score[m][1], k_held[m][k], right[2], right[3]);
        }
      }
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        uint32_t right[4];
        load_matrices(right, beside<kD>(grad_tile + across, k));
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          if constexpr (!kHoldV) load_matrices(v_held[m][k], beside<kD>(own_v + m * kTile * R::kStride + down, k));
          multiply<T>(back[m][0], v_held[m][k], right[0], right[1]);
          multiply<T>(back[m][1], v_held[m][k], right[2], right[3]);
        }
      }
      uint32_t probability[kM][4], gradient[kM][4];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int query = tile * kTile + n * 8 + column;
        const float4 stat = *reinterpret_cast<const float4*>(stats + query);  // lse, delta of this and the next query
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          float (&s)[4] = score[m][n], (&g)[4] = back[m][n];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int key = first_key + m * kTile + row + 8 * (e / 2);
            float exponent = fmaf(s[e], p.unit, -(e % 2 ? stat.z : stat.x));
            if (kBias && key < tokens && query + e % 2 < tokens) {
              exponent = fmaf(widen(bias[(query + e % 2) * tokens + key]), kLog2e, exponent);
            }
            s[e] = exp2_approx(exponent);
            if (edge && key >= tokens) s[e] = 0.f;
            g[e] = s[e] * (g[e] - (e % 2 ? stat.w : stat.y));
          }
          probability[m][2 * n] = pack<T>(s[0], s[1]);
          probability[m][2 * n + 1] = pack<T>(s[2], s[3]);
          gradient[m][2 * n] = pack<T>(g[0], g[1]);
          gradient[m][2 * n + 1] = pack<T>(g[2], g[3]);
          const uint32_t to = leave + m * kTile * score_stride + ((tile - first_tile) * kTile + n * 8) * 2;
          store_word(to, gradient[m][2 * n]);
          store_word(to + 8 * score_stride, gradient[m][2 * n + 1]);
        }
      }
#pragma unroll
      for (int n = 0; n < kSteps; ++n) {
        uint32_t right[4];
        load_transposed(right, beside<kD>(grad_tile + down, n));
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          multiply<T>(grad_v[m][2 * n], probability[m], right[0], right[1]);
          multiply<T>(grad_v[m][2 * n + 1], probability[m], right[2], right[3]);
        }
        load_transposed(right, beside<kD>(q_tile + down, n));
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          multiply<T>(grad_k[m][2 * n], gradient[m], right[0], right[1]);
          multiply<T>(grad_k[m][2 * n + 1], gradient[m], right[2], right[3]);
        }
      }
    }
    __syncthreads();
    for (int tile = first_tile + warp; tile < last_tile; tile += warps) {
      float grad_q[kD / 8][4] = {};
      const uint32_t from = take + (tile - first_tile) * kTile * 2;
#pragma unroll 2
      for (int key = 0; key < query_tiles; ++key) {  // as many tiles of keys
        uint32_t left[4];
        load_transposed(left, from + key * kTile * score_stride);
#pragma unroll
        for (int n = 0; n < kSteps; ++n) {
          uint32_t right[4];
          load_transposed(right, beside<kD>(k_at + key * kTile * R::kStride + down, n));
          multiply<T>(grad_q[2 * n], left, right[0], right[1]);
          multiply<T>(grad_q[2 * n + 1], left, right[2], right[3]);
        }
      }
      store_tile<T, kD>(shared + tile * kTile * R::kStride, p.grad_q, b, h, tile * kTile, tokens, grad_q, p.scale,
                        p.scale);
    }
    if (last_tile < query_tiles) __syncthreads();
  }
  // Only this warp reads its rows of v, and it is done with them.
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    unsigned char* rows = shared + at.v_at() + (first_key + m * kTile) * R::kStride;
    store_tile<T, kD>(rows, p.grad_v, b, h, first_key + m * kTile, tokens, grad_v[m], 1.f, 1.f);
    store_tile<T, kD>(rows, p.grad_k, b, h, first_key + m * kTile, tokens, grad_k[m], p.scale, p.scale);
  }
}

// The gradient of bias: a block sums a 64 x 64 piece over images first, first + windows, ... of its share, in order.
template <typename T>
struct BiasGradient {
  Heads<const T> q, k, v, grad;
  const T* bias;
  const float *lse, *delta;  // [B, H, N]
  float* partials;           // [shares, windows, H, N, N]
  int heads, tokens, windows, images;  // images of a window
  int shares, per_share;
  float scale;
};

constexpr int kPiece = 64, kPieceThreads = 128;

template <typename T, int kD>
__global__ void __launch_bounds__(kPieceThreads, 2) bias_gradient_kernel(const BiasGradient<T> p) {
  using R = Rows<kD>;
  extern __shared__ __align__(128) unsigned char shared[];
  const int tokens = p.tokens, pieces = (tokens + kPiece - 1) / kPiece;
  const int first_key = static_cast<int>(blockIdx.x % pieces) * kPiece;
  const int first_query = static_cast<int>(blockIdx.x / pieces) * kPiece;
  const int window = blockIdx.y / p.heads, h = blockIdx.y % p.heads, share = blockIdx.z;
  const int lane = threadIdx.x % kLanes, tile = threadIdx.x / kLanes * kTile;
  const int64_t map = static_cast<int64_t>(tokens) * tokens, offset = static_cast<int64_t>(blockIdx.y) * map;
  const uint32_t q_at = shared_address(shared), grad_at = q_at + kPiece * R::kStride;
  const uint32_t k_at = grad_at + kPiece * R::kStride, v_at = k_at + kPiece * R::kStride;
  const int down = place<kD>(true), across = place<kD>(false);
  float sum[kPiece / 8][4] = {};
  const int last = min((share + 1) * p.per_share, p.images);
  for (int image = share * p.per_share; image < last; ++image) {
    const int b = image * p.windows + window;
    load_rows<T, kD>(q_at, p.q, b, h, first_query, kPiece, tokens);
    load_rows<T, kD>(grad_at, p.grad, b, h, first_query, kPiece, tokens);
    load_rows<T, kD>(k_at, p.k, b, h, first_key, kPiece, tokens);
    load_rows<T, kD>(v_at, p.v, b, h, first_key, kPiece, tokens);
    commit_copies();
    float lse[2], delta[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = min(first_query + tile + lane / 4 + 8 * half, tokens - 1);
      const int64_t at = (static_cast<int64_t>(b) * p.heads + h) * tokens + query;
      lse[half] = p.lse[at] * kLog2e, delta[half] = p.delta[at];
    }
    wait_copies<0>();
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kPiece / kTile; ++j) {
      float score[2][4] = {}, back[2][4] = {};
#pragma unroll
      for (int k = 0; k < kD / kTile; ++k) {
        uint32_t left[4], right[4];
        load_matrices(left, beside<kD>(q_at + tile * R::kStride + down, k));
        load_matrices(right, beside<kD>(k_at + j * kTile * R::kStride + across, k));
        multiply<T>(score[0], left, right[0], right[1]);
        multiply<T>(score[1], left, right[2], right[3]);
        load_matrices(left, beside<kD>(grad_at + tile * R::kStride + down, k));
        load_matrices(right, beside<kD>(v_at + j * kTile * R::kStride + across, k));
        multiply<T>(back[0], left, right[0], right[1]);
        multiply<T>(back[1], left, right[2], right[3]);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int query = min(first_query + tile + lane / 4 + 8 * (e / 2), tokens - 1);
          const int key = min(first_key + j * kTile + n * 8 + 2 * (lane % 4) + e % 2, tokens - 1);
          const float biased = (score[n][e] * p.scale + widen(p.bias[offset + query * tokens + key])) * kLog2e;
          sum[2 * j + n][e] += exp2_approx(biased - lse[e / 2]) * (back[n][e] - delta[e / 2]);
        }
      }
    }
    __syncthreads();
  }
  float* to = p.partials + static_cast<int64_t>(share) * gridDim.y * map + offset;
#pragma unroll
  for (int n = 0; n < kPiece / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int query = first_query + tile + lane / 4 + 8 * (e / 2), key = first_key + n * 8 + 2 * (lane % 4) + e % 2;
      if (query < tokens && key < tokens) to[query * tokens + key] = sum[n][e];
    }
  }
}

// Adds the shares in their order.
template <typename T>
__global__ void __launch_bounds__(kThreads) add_shares_kernel(const float* __restrict__ partials, T* __restrict__ out,
                                                              int64_t count, int shares) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    float sum = 0.f;
    for (int share = 0; share < shares; ++share) sum += partials[share * count + i];
    out[i] = round_to<T>(sum);
  }
}

}  // namespace dmjd::attention
