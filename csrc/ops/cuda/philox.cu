#include "key.h"

namespace dmjd {
namespace {

__global__ void philox4x32_kernel(const int64_t* __restrict__ words, KeySource source, int64_t blocks,
                                  int64_t* __restrict__ out) {
  const PhiloxKey key = source.read();
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t block = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; block < blocks; block += stride) {
    PhiloxCounter state;
    for (int i = 0; i < 4; ++i) state.word[i] = static_cast<uint32_t>(words[4 * block + i]);
    state = philox4x32(state, key);
    for (int i = 0; i < 4; ++i) out[4 * block + i] = state.word[i];
  }
}

Tensor philox4x32_cuda(const Tensor& counter, const Tensor& key) {
  // A CUDA key sends the call here whatever the counter's device is.
  STD_TORCH_CHECK(counter.is_cuda(), "philox4x32: key must be on the CPU or on counter's device");
  const int32_t device = counter.get_device_index();
  STD_TORCH_CHECK(key.is_cpu() || key.get_device_index() == device,
                  "philox4x32: key must be on the CPU or on counter's device");
  const torch::stable::accelerator::DeviceGuard guard(device);

  const Tensor counters = torch::stable::contiguous(counter);
  const Tensor keys = torch::stable::contiguous(key);
  Tensor result = torch::stable::new_empty(counters, counters.sizes());
  const int64_t blocks = counters.numel() / 4;
  if (blocks == 0) return result;

  philox4x32_kernel<<<blocks_for(blocks), kThreads, 0, current_stream(device)>>>(
      counters.const_data_ptr<int64_t>(), KeySource::of(keys), blocks, result.mutable_data_ptr<int64_t>());
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return result;
}

}  // namespace
}  // namespace dmjd

STABLE_TORCH_LIBRARY_IMPL(dmjd, CUDA, m) {
  m.impl("philox4x32", DMJD_BOX(&dmjd::philox4x32_cuda));
}
