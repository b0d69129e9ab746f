// Windows whose size the compiler knows, for the maps of ConvViT's stages. masked_depthwise_conv2d.cu says what slides.
//
// A warp owns 32 or 64 neighbouring channels and walks over tokens. All its lanes look at one token, so a hidden
// neighbour is skipped without divergence; weights and their gradients stay in registers for the whole walk. Windows of
// neighbouring tokens overlap, which L1 serves: tokens of a block are neighbours in raster order.
#pragma once

#include "depthwise_problem.cuh"

namespace dmjd {

constexpr int kWarps = kThreads / kLanes;

// Windows that reach the eight tokens around at most, their size known to the compiler.
template <typename T, int kQ, int kK, bool kBackward>
struct Window {
  static constexpr int kHalf = kK / 2, kPixels = kQ * kQ, kTaps = kK * kK;
  static_assert(kHalf <= kQ);
  // Two channels a lane halve the loads. The gradient keeps twice as much per channel and would spill.
  static constexpr int kVec = !kBackward && sizeof(T) == 2 ? 2 : 1;
  static constexpr int kChannels = kLanes * kVec;
  // Enough that loading weights does not count, and that partial sums are a few per cent of what is moved.
  static constexpr int kTokensPerBlock = 512 / kQ;
  // As many as registers allow: small windows spend more of their time waiting for neighbours.
  static constexpr int kBlocksPerMultiprocessor = kQ <= 2 ? 3 : 2;

  float filter[kTaps][kVec];
  float sum[kQ][kQ][kVec];
  float own[kBackward ? kQ : 1][kBackward ? kQ : 1][kVec];
  float filter_sum[kBackward ? kTaps + 1 : 1][kVec];

  // Adds what the pixels of the token (kDy, kDx) away give to the block's own.
  template <int kDy, int kDx>
  __device__ inline void add(const T* pixels, int stride) {
    constexpr int kTop = kDy < 0 ? kQ - kHalf : 0, kBottom = kDy > 0 ? kHalf : kQ;
    constexpr int kLeft = kDx < 0 ? kQ - kHalf : 0, kRight = kDx > 0 ? kHalf : kQ;
    float value[kBottom - kTop][kRight - kLeft][kVec];
#pragma unroll
    for (int row = kTop; row < kBottom; ++row) {
#pragma unroll
      for (int column = kLeft; column < kRight; ++column) {
        load(pixels + static_cast<int64_t>(stride) * (row * kQ + column), value[row - kTop][column - kLeft]);
      }
    }
#pragma unroll
    for (int row = kTop; row < kBottom; ++row) {
#pragma unroll
      for (int column = kLeft; column < kRight; ++column) {
#pragma unroll
        for (int y = 0; y < kQ; ++y) {
#pragma unroll
          for (int x = 0; x < kQ; ++x) {
            const int down = kDy * kQ + row - y + kHalf, across = kDx * kQ + column - x + kHalf;
            if (down < 0 || down >= kK || across < 0 || across >= kK) continue;
#pragma unroll
            for (int v = 0; v < kVec; ++v) {
              const float pixel = value[row - kTop][column - kLeft][v];
              sum[y][x][v] += filter[down * kK + across][v] * pixel;
              if constexpr (kBackward) filter_sum[down * kK + across][v] += own[y][x][v] * pixel;
            }
          }
        }
        if constexpr (kBackward && kDy == 0 && kDx == 0) {
#pragma unroll
          for (int v = 0; v < kVec; ++v) filter_sum[kTaps][v] += value[row][column][v];
        }
      }
    }
  }
};

template <typename T, int kQ, int kK, bool kBackward>
__global__ void __launch_bounds__(kThreads, Window<T, kQ, kK, kBackward>::kBlocksPerMultiprocessor)
    window_kernel(const Problem<T> problem) {
  using W = Window<T, kQ, kK, kBackward>;
  constexpr int kVec = W::kVec, kChannels = W::kChannels, kTaps = W::kTaps, kPixels = W::kPixels;
  // First the weights of the block's channels and behind them their biases, at last their gradients.
  __shared__ float stage[(kTaps + 1) * kChannels];
  __shared__ int neighbours[W::kTokensPerBlock][9];

  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const int channels = problem.channels, slices = (channels + kChannels - 1) / kChannels;
  const int slice = blockIdx.x % slices, chunk = blockIdx.x / slices;
  const int first = slice * kChannels;
  const bool real = first + lane * kVec < channels;
  const int channel = real ? first + lane * kVec : first;  // an idle lane computes along and stores nothing

  const int weights = min(kChannels, channels - first) * kTaps;
  for (int i = threadIdx.x; i < kChannels * kTaps; i += kThreads) {
    stage[i] = i < weights ? problem.weight[static_cast<int64_t>(first) * kTaps + i] : 0.0f;
  }
  float* const biases = stage + kTaps * kChannels;
  for (int i = threadIdx.x; !kBackward && i < kChannels; i += kThreads) {
    biases[i] = problem.bias && first + i < channels ? problem.bias[first + i] : 0.0f;
  }
  const int begin = chunk * W::kTokensPerBlock, count = min(W::kTokensPerBlock, problem.tokens - begin);
#pragma unroll 4
  for (int i = threadIdx.x; i < count * 9; i += kThreads) {
    neighbours[i / 9][i % 9] = neighbour(problem, begin + i / 9, i % 9 / 3 - 1, i % 3 - 1);
  }
  __syncthreads();
  W window;
#pragma unroll
  for (int s = 0; s < kTaps; ++s) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      window.filter[s][v] = stage[(lane * kVec + v) * kTaps + (kBackward ? kTaps - 1 - s : s)];
    }
  }
  if constexpr (kBackward) {
#pragma unroll
    for (int s = 0; s <= kTaps; ++s) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) window.filter_sum[s][v] = 0.0f;
    }
  }

  const int stride = channels, token_stride = kPixels * channels;
  for (int i = warp; i < count; i += kWarps) {
    const int64_t here = static_cast<int64_t>(begin + i) * token_stride + channel;
    // Lane n holds neighbour n, and all lanes one word of which are visible.
    const int around = lane < 9 ? neighbours[i][lane] : -1;
    const unsigned seen = __ballot_sync(kAllLanes, around >= 0);

    // The next token's pixels are on their way to L2 while this one is computed.
    if (i + kWarps < count && lane < kPixels) {
      const int64_t ahead = static_cast<int64_t>(begin + i + kWarps) * token_stride + lane * stride + first;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(problem.source + ahead));
      if constexpr (kBackward) asm volatile("prefetch.global.L2 [%0];" ::"l"(problem.x + ahead));
    }

    if constexpr (kBackward) {
#pragma unroll
      for (int pixel = 0; pixel < kPixels; ++pixel) {
        load(problem.x + here + static_cast<int64_t>(stride) * pixel, window.own[pixel / kQ][pixel % kQ]);
      }
    }
#pragma unroll
    for (int pixel = 0; pixel < kPixels; ++pixel) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        window.sum[pixel / kQ][pixel % kQ][v] = kBackward ? 0.0f : biases[lane * kVec + v];
      }
    }
    window.template add<0, 0>(problem.source + here, stride);
    const auto pixels_of = [&](int n) {
      return problem.source + (static_cast<int64_t>(__shfl_sync(kAllLanes, around, n)) * token_stride + channel);
    };
    if (seen & 1u << 0) window.template add<-1, -1>(pixels_of(0), stride);
    if (seen & 1u << 1) window.template add<-1, 0>(pixels_of(1), stride);
    if (seen & 1u << 2) window.template add<-1, 1>(pixels_of(2), stride);
    if (seen & 1u << 3) window.template add<0, -1>(pixels_of(3), stride);
    if (seen & 1u << 5) window.template add<0, 1>(pixels_of(5), stride);
    if (seen & 1u << 6) window.template add<1, -1>(pixels_of(6), stride);
    if (seen & 1u << 7) window.template add<1, 0>(pixels_of(7), stride);
    if (seen & 1u << 8) window.template add<1, 1>(pixels_of(8), stride);

    if (real) {
#pragma unroll
      for (int pixel = 0; pixel < kPixels; ++pixel) {
        store(window.sum[pixel / kQ][pixel % kQ], problem.result + here + static_cast<int64_t>(stride) * pixel);
      }
    }
  }

  if constexpr (kBackward) {
    // One warp after the other, so that the order of summation is fixed.
    for (int turn = 0; turn < kWarps; ++turn) {
      __syncthreads();
      if (warp != turn) continue;
#pragma unroll
      for (int s = 0; s <= kTaps; ++s) {
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
          float& total = stage[s * kChannels + lane * kVec + v];
          total = turn == 0 ? window.filter_sum[s][v] : total + window.filter_sum[s][v];
        }
      }
    }
    __syncthreads();
    float* const partials = problem.partials + static_cast<int64_t>(chunk) * (kTaps + 1) * channels;
    for (int i = threadIdx.x; i < (kTaps + 1) * kChannels; i += kThreads) {
      const int s = i / kChannels, at = first + i % kChannels;
      if (at < channels) partials[static_cast<int64_t>(s) * channels + at] = stage[i];
    }
  }
}

}  // namespace dmjd
