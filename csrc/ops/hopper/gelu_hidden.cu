// gelu_hidden and gelu_hidden_gradient: the two kernels of gelu_mlp for Hopper.
#include "gelu_hidden.cuh"

#include <algorithm>
#include <array>
#include <mutex>
#include <tuple>

#include <torch/headeronly/core/ScalarType.h>

#include "../cuda/launch.h"
#include "tensor_map.h"

namespace dmjd::hopper {
namespace {

constexpr int kMaxDevices = 64;

// As many blocks as run at once, in whole clusters: the rest of a grid would wait for a whole pass over its tiles.
template <class T, bool kGradient>
int resident_blocks(int32_t device) {
  static std::array<int, kMaxDevices> blocks{};
  static std::mutex mutex;
  STD_TORCH_CHECK(device < kMaxDevices, "gelu_hidden: at most ", kMaxDevices, " devices, got cuda:", device);
  const std::lock_guard lock(mutex);
  if (blocks[device] == 0) {
    void (*const kernel)(Maps, const T*, float*, int, int, int, int) = gelu_hidden_kernel<T, kGradient>;
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = kCluster, cluster.val.clusterDim.y = 1, cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = kCluster, config.blockDim = kThreads, config.dynamicSmemBytes = kSharedBytes;
    config.attrs = &cluster, config.numAttrs = 1;
    int clusters = 0;
    STD_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
    blocks[device] = std::max(clusters, 1) * kCluster;  // none where others hold most of the card, for a while
  }
  return blocks[device];
}

template <bool kGradient>
void launch(const Tensor& x, const Tensor& bias, float* sums, const Maps& maps, int64_t width, int64_t grad_depth) {
  const int64_t rows = x.size(0);
  STD_TORCH_CHECK(rows <= INT32_MAX - kCluster * kTileRows, "gelu_hidden: too many rows: ", rows);
  const int64_t tiles = (rows + kCluster * kTileRows - 1) / (kCluster * kTileRows) * (width / kTileHidden);
  const int32_t device = x.get_device_index();
  const auto run = [&](auto element) {
    using T = decltype(element);
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(tiles * kCluster, resident_blocks<T, kGradient>(device)));
    gelu_hidden_kernel<T, kGradient><<<blocks, kThreads, kSharedBytes, current_stream(device)>>>(
        maps, static_cast<const T*>(bias.data_ptr()), sums, static_cast<int>(rows), static_cast<int>(width),
        static_cast<int>(x.size(1)), static_cast<int>(grad_depth));
  };
  if (x.scalar_type() == torch::headeronly::ScalarType::BFloat16) run(__nv_bfloat16{});
  else run(__half{});
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// What served() and dense() in dmjd/ops/gelu_hidden.py see to. Against a caller of the op itself, whom tiles would give
// results with holes, or a fault from which a process cannot recover.
void check(const Tensor& tensor, const char* name, const Tensor& x, std::initializer_list<int64_t> sizes, int64_t unit) {
  const auto type = x.scalar_type();
  const bool half = type == torch::headeronly::ScalarType::BFloat16 || type == torch::headeronly::ScalarType::Half;
  STD_TORCH_CHECK(half && tensor.scalar_type() == type, "gelu_hidden: ", name, " must be bfloat16 or float16, as x is");
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == x.get_device_index(), "gelu_hidden: ", name,
                  " must be on x's device");
  const auto found = tensor.sizes();
  STD_TORCH_CHECK(std::equal(found.begin(), found.end(), sizes.begin(), sizes.end()), "gelu_hidden: the shape of ", name,
                  " does not fit");
  const int64_t columns = *(sizes.end() - 1);
  STD_TORCH_CHECK(tensor.numel() > 0 && columns % unit == 0, "gelu_hidden: the last size of ", name,
                  " must be a multiple of ", unit, ", got ", columns);
  STD_TORCH_CHECK(tensor.is_contiguous() && reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0, "gelu_hidden: ", name,
                  " must be contiguous from a multiple of 16 bytes on");
}

CUtensorMap map_of(const Tensor& matrix, int box_rows) {
  const bool bfloat16 = matrix.scalar_type() == torch::headeronly::ScalarType::BFloat16;
  return tensor_map(matrix.data_ptr(), bfloat16, matrix.size(0), matrix.size(1), box_rows);
}

// A thread that has not used CUDA yet, as one of autograd's, has no context, and the driver's own calls do not make one.
void bind_context(int32_t device) { STD_CUDA_CHECK(cudaSetDevice(device)); }

Tensor gelu_hidden(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  bind_context(x.get_device_index());
  check(x, "x", x, {x.size(0), x.size(1)}, kDepth);
  check(bias, "bias", x, {bias.size(0)}, kTileHidden);
  check(weight, "weight", x, {bias.size(0), x.size(1)}, kDepth);
  const Tensor hidden = torch::stable::new_empty(x, {x.size(0), weight.size(0)});
  Maps maps{};
  maps.x = map_of(x, kTileRows), maps.weight1 = map_of(weight, 128), maps.hidden = map_of(hidden, 64);
  launch<false>(x, bias, nullptr, maps, weight.size(0), 0);
  return hidden;
}

std::tuple<Tensor, Tensor, Tensor> gelu_hidden_gradient(const Tensor& x, const Tensor& weight1, const Tensor& bias1,
                                                        const Tensor& grad, const Tensor& weight2) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  bind_context(x.get_device_index());
  const int64_t rows = x.size(0), width = weight1.size(0);
  check(x, "x", x, {rows, x.size(1)}, kDepth);
  check(bias1, "bias1", x, {width}, kTileHidden);
  check(weight1, "weight1", x, {width, x.size(1)}, kDepth);
  check(grad, "grad", x, {rows, grad.size(1)}, kDepth);
  check(weight2, "weight2", x, {grad.size(1), width}, kTileHidden);
  const Tensor grad_hidden = torch::stable::new_empty(x, {rows, width});
  const Tensor hidden = torch::stable::new_empty(x, {rows, width});
  const Tensor sums = torch::stable::new_empty(x, {(rows + 63) / 64, width}, torch::headeronly::ScalarType::Float);
  const Maps maps{map_of(x, kTileRows), map_of(weight1, 128), map_of(grad, kTileRows),
                  map_of(weight2, 64),  map_of(hidden, 64),   map_of(grad_hidden, 64)};
  launch<true>(x, bias1, sums.mutable_data_ptr<float>(), maps, width, grad.size(1));
  return {grad_hidden, hidden, sums};
}

}  // namespace
}  // namespace dmjd::hopper

STABLE_TORCH_LIBRARY_IMPL(dmjd, CUDA, m) {
  m.impl("gelu_hidden", DMJD_BOX(&dmjd::hopper::gelu_hidden));
  m.impl("gelu_hidden_gradient", DMJD_BOX(&dmjd::hopper::gelu_hidden_gradient));
}
