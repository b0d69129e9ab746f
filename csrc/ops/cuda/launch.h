// How every CUDA kernel is launched: on the current stream of its tensor's device, over a grid-stride loop.
#pragma once

#include <algorithm>
#include <cstddef>

#include <cuda_runtime.h>

#include "../common.h"
// Not reached through common.h on torch 2.11; macros.h holds STD_CUDA_KERNEL_LAUNCH_CHECK.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/headeronly/util/shim_utils.h>

namespace dmjd {

constexpr int kThreads = 256;

// What a block may have of shared memory on an A100. A kernel that raises its limit (above 48 KB) holds what it asks for
// against this, in a static_assert where the size is a constant.
constexpr size_t kMaxSharedBytes = 163 * 1024;

// Enough blocks for `work` threads, at most a few waves of the largest cards: the loop in the kernel does the rest, so
// `work` may exceed 2^31.
inline unsigned int blocks_for(int64_t work) {
  return static_cast<unsigned int>(std::min<int64_t>((work + kThreads - 1) / kThreads, 8192));
}

// The stream that torch (and a CUDA graph capture) is using. Stream::id() of the stable API is not a cudaStream_t.
inline cudaStream_t current_stream(int32_t device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

}  // namespace dmjd
