// A window of any size, for what depthwise_window.cuh was not built for. masked_depthwise_conv2d.cu says what slides.
#pragma once

#include "depthwise_problem.cuh"

namespace dmjd {

constexpr int kMaxTaps = 49;

// Any q and k, one warp a block. A lane keeps the filter of its channel and its gradient in a column of shared memory.
constexpr int kTokensPerWarp = 32;

template <typename T, bool kBackward>
__global__ void __launch_bounds__(kLanes) any_window_kernel(const Problem<T> problem) {
  using Sum = typename Problem<T>::Sum;
  __shared__ Sum filter[kMaxTaps][kLanes];
  __shared__ Sum filter_sum[kBackward ? kMaxTaps + 1 : 1][kLanes];

  const int lane = threadIdx.x, channels = problem.channels, slices = (channels + kLanes - 1) / kLanes;
  const int channel = blockIdx.x % slices * kLanes + lane, chunk = blockIdx.x / slices;
  if (channel >= channels) return;
  const int q = problem.q, k = problem.k, half = k / 2, taps = k * k, pixels = q * q;
  const int reach = (half + q - 1) / q;
  for (int s = 0; s < taps; ++s) {
    filter[s][lane] = problem.weight[static_cast<int64_t>(channel) * taps + (kBackward ? taps - 1 - s : s)];
  }
  if constexpr (kBackward) {
    for (int s = 0; s <= taps; ++s) filter_sum[s][lane] = 0;
  }
  const Sum bias = !kBackward && problem.bias ? problem.bias[channel] : Sum(0);

  const int begin = chunk * kTokensPerWarp, end = min(begin + kTokensPerWarp, problem.tokens);
  for (int token = begin; token < end; ++token) {
    for (int pixel = 0; pixel < pixels; ++pixel) {
      const int y = pixel / q, x = pixel % q;
      const int64_t here = (static_cast<int64_t>(token) * pixels + pixel) * channels + channel;
      Sum sum = bias, own = 0;
      if constexpr (kBackward) {
        own = widen(problem.x[here]);
        filter_sum[taps][lane] += widen(problem.source[here]);
      }
      for (int dy = -reach; dy <= reach; ++dy) {
        // The window's rows that the tokens dy down hold, as rows of those tokens; likewise columns below.
        const int top = max(0, y - half - dy * q), bottom = min(q, y + half + 1 - dy * q);
        if (top >= bottom) continue;
        for (int dx = -reach; dx <= reach; ++dx) {
          const int left = max(0, x - half - dx * q), right = min(q, x + half + 1 - dx * q);
          if (left >= right) continue;
          const int found = neighbour(problem, token, dy, dx);
          if (found < 0) continue;
          const T* const from = problem.source + static_cast<int64_t>(found) * pixels * channels + channel;
          for (int row = top; row < bottom; ++row) {
            for (int column = left; column < right; ++column) {
              const Sum value = widen(from[static_cast<int64_t>(row * q + column) * channels]);
              const int s = (dy * q + row - y + half) * k + dx * q + column - x + half;
              sum += filter[s][lane] * value;
              if constexpr (kBackward) filter_sum[s][lane] += own * value;
            }
          }
        }
      }
      narrow(sum, problem.result + here);
    }
  }
  if constexpr (kBackward) {
    for (int s = 0; s <= taps; ++s) {
      problem.partials[(static_cast<int64_t>(chunk) * (taps + 1) + s) * channels + channel] = filter_sum[s][lane];
    }
  }
}

}  // namespace dmjd
