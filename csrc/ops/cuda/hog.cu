#include <algorithm>
#include <string>
#include <type_traits>

#include "hog_tile.cuh"

namespace dmjd {
namespace {

template <typename Real>
__device__ void store(const HogResult& result, int64_t at, Real value) {
  switch (result.type) {
    case ScalarType::Double: static_cast<double*>(result.data)[at] = value; break;
    case ScalarType::Half: static_cast<Half*>(result.data)[at] = static_cast<float>(value); break;
    case ScalarType::BFloat16: static_cast<BFloat16*>(result.data)[at] = static_cast<float>(value); break;
    default: static_cast<float*>(result.data)[at] = static_cast<float>(value);
  }
}

// What hog_tile.cuh does not serve: any cell and number of bins, and float64. A thread takes one cell of one channel,
// its histogram in a column of shared memory of its own.
template <typename Pixel, typename Real>
__global__ void any_cell_kernel(const __grid_constant__ HogPlan plan, const __grid_constant__ HogEdges<Real> edges,
                                const __grid_constant__ HogWindow<Real> window, HogSource source, int64_t cells,
                                HogResult result) {
  extern __shared__ double shared[];
  Real* sums = reinterpret_cast<Real*>(shared) + threadIdx.x;
  const int stride = static_cast<int>(blockDim.x), per_patch = plan.cells_per_patch();
  const int64_t columns = plan.width / plan.cell, rows = plan.height / plan.cell;

  const int64_t grid = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; item < cells; item += grid) {
    const int64_t channel = item % plan.channels, column = item / plan.channels % columns;
    const int64_t row = item / (plan.channels * columns) % rows, image = item / (plan.channels * columns * rows);
    const Pixel* pixels = static_cast<const Pixel*>(source.data) + image * source.image_stride +
                          channel * source.channel_stride;
    const auto pixel = [&](int64_t r, int64_t c) {
      return static_cast<Real>(pixels[hog_reflect(r, plan.height) * source.row_stride +
                                      hog_reflect(c, plan.width) * source.column_stride]);
    };

    for (int b = 0; b < plan.bins; ++b) sums[b * stride] = 0;
    for (int64_t r = row * plan.cell; r < (row + 1) * plan.cell; ++r) {
      for (int64_t c = column * plan.cell; c < (column + 1) * plan.cell; ++c) {
        Real rise, run, weight = 1;
        if (plan.gradient == HogGradient::central) {
          rise = pixel(r + 1, c) - pixel(r - 1, c);
          run = pixel(r, c + 1) - pixel(r, c - 1);
        } else {
          rise = hog_smooth(pixel(r - 1, c - 1), pixel(r, c - 1), pixel(r + 1, c - 1)) -
                 hog_smooth(pixel(r - 1, c + 1), pixel(r, c + 1), pixel(r + 1, c + 1));
          run = hog_smooth(pixel(r - 1, c - 1) - pixel(r + 1, c - 1), pixel(r - 1, c) - pixel(r + 1, c),
                           pixel(r - 1, c + 1) - pixel(r + 1, c + 1));
        }
        if (plan.gradient == HogGradient::sobel_gauss) {
          weight = window.weight[r % kHogWindow] * window.weight[c % kHogWindow];
        }
        sums[hog_bin(rise, run, edges, plan.bins) * stride] += std::sqrt(rise * rise + run * run) * weight;
      }
    }

    const HogScale<Real> scale = hog_scale(plan, sums, plan.bins, stride);
    const int64_t patch_row = row / per_patch, patch_column = column / per_patch;
    const int64_t token = (image * plan.patch_rows() + patch_row) * plan.patch_columns() + patch_column;
    const int64_t cell = (row - patch_row * per_patch) * per_patch + column - patch_column * per_patch;
    const int64_t at = token * plan.patch_values() + cell * plan.cell_stride + channel * plan.channel_stride;
    for (int b = 0; b < plan.bins; ++b) {
      store(result, at + b * plan.bin_stride, (sums[b * stride] - scale.shift) * scale.factor);
    }
  }
}

template <typename Pixel>
void launch_any_cell(const HogPlan& plan, const HogSource& source, int64_t batch, const HogResult& result,
                     cudaStream_t stream) {
  using Real = std::conditional_t<std::is_same_v<Pixel, double>, double, float>;
  const int64_t cells = batch * plan.channels * (plan.height / plan.cell) * (plan.width / plan.cell);
  // Threads whose histograms fit in the 48 KB that every block may have.
  const int64_t column = plan.bins * static_cast<int64_t>(sizeof(Real));
  const int threads = static_cast<int>(std::min<int64_t>(128, 49152 / column / 32 * 32));
  const int64_t blocks = std::min<int64_t>((cells + threads - 1) / threads, 1 << 20);
  any_cell_kernel<Pixel, Real><<<static_cast<unsigned>(blocks), threads, threads * column, stream>>>(
      plan, HogEdges<Real>(plan.bins), HogWindow<Real>(), source, cells, result);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

Tensor hog_cuda(const Tensor& images, int64_t cell, int64_t bins, int64_t patch, std::string flavour, std::string norm,
                std::string layout, ScalarType out_dtype) {
  const int32_t device = images.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const int row = layout == "nhwc" ? 1 : 2, column = row + 1, channel = layout == "nhwc" ? 3 : 1;
  const HogPlan plan(images.size(row), images.size(column), images.size(channel), static_cast<int>(cell),
                     static_cast<int>(bins), static_cast<int>(patch), flavour, norm);
  const int64_t batch = images.size(0);
  Tensor output = torch::stable::new_empty(
      images, {batch, plan.patch_rows() * plan.patch_columns(), plan.patch_values()}, out_dtype);
  if (batch == 0) return output;

  const HogSource source = {images.const_data_ptr(),  images.scalar_type(),   images.stride(0),
                            images.stride(row), images.stride(column), images.stride(channel)};
  const HogResult result = {output.mutable_data_ptr(), out_dtype};
  const cudaStream_t stream = current_stream(device);

  int shared_limit = 0;
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&shared_limit, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
  hog_tile::Tiling tiling;
  int threads;
  if (hog_tile::plan_tiling(plan, source, out_dtype, batch, shared_limit, tiling, threads)) {
    switch (plan.gradient) {
      case HogGradient::central:
        hog_tile::launch<HogGradient::central>(plan, source, tiling, threads, result, stream);
        break;
      case HogGradient::sobel:
        hog_tile::launch<HogGradient::sobel>(plan, source, tiling, threads, result, stream);
        break;
      case HogGradient::sobel_gauss:
        hog_tile::launch<HogGradient::sobel_gauss>(plan, source, tiling, threads, result, stream);
        break;
    }
    return output;
  }
  switch (source.type) {
    case ScalarType::Byte: launch_any_cell<uint8_t>(plan, source, batch, result, stream); break;
    case ScalarType::Float: launch_any_cell<float>(plan, source, batch, result, stream); break;
    case ScalarType::Double: launch_any_cell<double>(plan, source, batch, result, stream); break;
    case ScalarType::Half: launch_any_cell<Half>(plan, source, batch, result, stream); break;
    case ScalarType::BFloat16: launch_any_cell<BFloat16>(plan, source, batch, result, stream); break;
    default: STD_TORCH_CHECK(false, "hog: images must be uint8, float64, float32, float16 or bfloat16");
  }
  return output;
}

}  // namespace
}  // namespace dmjd

STABLE_TORCH_LIBRARY_IMPL(dmjd, CUDA, m) {
  m.impl("hog", DMJD_BOX(&dmjd::hog_cuda));
}
