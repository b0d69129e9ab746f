// The fast HOG kernel: 9 bins, cells of 8 x 8 pixels, any channels, layout and pixel type but float64.
//
// A unit of work is a run of patches in one row of patches. Its pixels and the ring around them are staged in shared
// memory as float planes, which is where the layouts and types end; then one thread takes one cell of one channel down
// its 8 rows with the last three in registers, so a histogram belongs to one thread and needs no atomics. Results are
// gathered in shared memory to leave in order, as whole vectors.
//
// The kernel is bound by instructions and not by memory (about 30 per pixel and channel). What that suggests:
//   - Both halves of the orientations share the tests of four edges. `both` sums magnitudes per steepness, `opposed` the
//     same with the sign of the half; half their sum and difference are the bins, and exact zeros stay zeros.
//   - One comparison yields "beyond this edge" and "between the last edge and this one" (PTX setp with two results).
//   - Columns are stored in chunks of four, exchanged in every second group of eight, so that the threads of eight cells
//     in a row hit eight different groups of banks with 16-byte reads.
#pragma once

#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "../../core/hog.h"
#include "launch.h"

namespace dmjd {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;

// Pixels in any layout; strides in elements.
struct HogSource {
  const void* data;
  ScalarType type;
  int64_t image_stride, row_stride, column_stride, channel_stride;
};

struct HogResult {
  void* data;
  ScalarType type;
};

namespace hog_tile {

constexpr int kCell = 8, kBins = 9, kEdges = 4;
constexpr int kMaxThreads = 384;

// How the host cuts the work; sizes in patches, pixels, or floats of shared memory.
struct Tiling {
  int unit_patches, units_per_row, units_per_block;
  uint32_t units;
  int plane, pitch;        // of one channel and of one row of staged pixels
  int unit_pixels, unit_values;
  bool packed_rgb;         // uint8, three channels, neighbours in memory, rows on 8 bytes
};

struct Unit {
  int64_t image;
  int patch_row, first_column, patches;
};

__device__ inline Unit find_unit(const HogPlan& plan, const Tiling& tiling, uint32_t index) {
  const uint32_t rows = static_cast<uint32_t>(plan.patch_rows()), columns = static_cast<uint32_t>(plan.patch_columns());
  const uint32_t row = index / tiling.units_per_row, tile = index - row * tiling.units_per_row;
  const uint32_t image = row / rows;
  const int first = static_cast<int>(tile) * tiling.unit_patches;
  return {image, static_cast<int>(row - image * rows), first, min(tiling.unit_patches, static_cast<int>(columns) - first)};
}

// Where a column of a staged row lies; -1 is the ring's.
__device__ inline int chunk_at(int chunk) { return 4 * (chunk ^ (chunk >> 3 & 1)); }
__device__ inline int column_at(int column) { return chunk_at((column + 4) >> 2) + (column & 3); }

// A byte as a float without the slow conversion unit: it becomes the low mantissa of 2^23. Differences of such numbers are
// exact, so central differences do without the subtraction of 2^23.
template <HogGradient kGradient>
__device__ inline float byte_as_float(uint32_t word, int byte) {
  const float above = __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7440 | byte));
  return kGradient == HogGradient::central ? above : above - 8388608.0f;
}

// A warp takes a row, a thread 8 pixels = 24 bytes of it.
template <HogGradient kGradient>
__device__ inline void stage_rgb(const HogPlan& plan, const Tiling& tiling, const HogSource& source, const Unit& unit,
                                 float* __restrict__ pixels) {
  const int width = unit.patches * plan.patch, first = unit.first_column * plan.patch;
  const uint8_t* image = static_cast<const uint8_t*>(source.data) + unit.image * source.image_stride;
  const int lane = threadIdx.x & 31;
  for (int row = threadIdx.x >> 5; row < plan.patch + 2; row += blockDim.x >> 5) {
    const int from = static_cast<int>(hog_reflect(unit.patch_row * plan.patch + row - 1, plan.height));
    const uint8_t* line = image + from * source.row_stride + 3 * first;
    float* out = pixels + row * tiling.pitch;
    for (int group = lane; group < width / 8; group += 32) {
      const uint2* words = reinterpret_cast<const uint2*>(line + 24 * group);
      const uint2 w0 = __ldg(words), w1 = __ldg(words + 1), w2 = __ldg(words + 2);
      const uint32_t word[6] = {w0.x, w0.y, w1.x, w1.y, w2.x, w2.y};
      const int chunk0 = chunk_at(2 * group + 1), chunk1 = chunk_at(2 * group + 2);
#pragma unroll
      for (int c = 0; c < 3; ++c) {
        float value[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) value[i] = byte_as_float<kGradient>(word[(3 * i + c) / 4], (3 * i + c) % 4);
        float* plane = out + c * tiling.plane;
        *reinterpret_cast<float4*>(plane + chunk0) = make_float4(value[0], value[1], value[2], value[3]);
        *reinterpret_cast<float4*>(plane + chunk1) = make_float4(value[4], value[5], value[6], value[7]);
        // The ring to the left and right: a neighbouring unit's pixel, or the reflected one, which is at hand.
        if (group == 0) plane[column_at(-1)] = first == 0 ? value[1] : byte_as_float<kGradient>(line[c - 3], 0);
        if (8 * group + 8 == width) {
          plane[column_at(width)] = first + width == plan.width ? value[6] : byte_as_float<kGradient>(line[3 * width + c], 0);
        }
      }
    }
  }
}

// A warp takes a row of one channel.
template <typename Pixel>
__device__ inline void stage_any(const HogPlan& plan, const Tiling& tiling, const HogSource& source, const Unit& unit,
                                 float* __restrict__ pixels) {
  const int width = unit.patches * plan.patch, first = unit.first_column * plan.patch;
  const Pixel* image = static_cast<const Pixel*>(source.data) + unit.image * source.image_stride;
  const int lane = threadIdx.x & 31, rows = plan.patch + 2;
  for (int line = threadIdx.x >> 5; line < rows * static_cast<int>(plan.channels); line += blockDim.x >> 5) {
    const int row = line / static_cast<int>(plan.channels), channel = line - row * static_cast<int>(plan.channels);
    const int64_t from = hog_reflect(unit.patch_row * plan.patch + row - 1, plan.height);
    const Pixel* in = image + from * source.row_stride + channel * source.channel_stride;
    float* out = pixels + channel * tiling.plane + row * tiling.pitch;
    for (int column = lane - 1; column <= width; column += 32) {
      out[column_at(column)] = static_cast<float>(in[hog_reflect(first + column, plan.width) * source.column_stride]);
    }
  }
}

template <HogGradient kGradient>
__device__ inline void stage(const HogPlan& plan, const Tiling& tiling, const HogSource& source, const Unit& unit,
                             float* pixels) {
  if (tiling.packed_rgb) return stage_rgb<kGradient>(plan, tiling, source, unit, pixels);
  switch (source.type) {
    case ScalarType::Byte: return stage_any<uint8_t>(plan, tiling, source, unit, pixels);
    case ScalarType::Half: return stage_any<Half>(plan, tiling, source, unit, pixels);
    case ScalarType::BFloat16: return stage_any<BFloat16>(plan, tiling, source, unit, pixels);
    default: return stage_any<float>(plan, tiling, source, unit, pixels);
  }
}

// Per steepness, from flat to steep: magnitudes of both halves of the orientations, and of the lower less the upper. The
// steepest bin lies across 90 degrees, so its halves are not told apart.
struct Sums {
  float both[kEdges + 1], opposed[kEdges];
};

__device__ inline float fast_sqrt(float x) {
  float root;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
}

// hog_bin() for 9 bins and the addition to it. The sign of `product` is that of rise * run, and plus where either is 0
// (also when the product underflows), so it says which half the orientation lies in. In the upper half a strict
// comparison is wanted: `steep` is then the next float below |rise|.
__device__ inline void add(float rise, float run, float weight, const float (&tangent)[kEdges], Sums& sums) {
  const float magnitude = fast_sqrt(rise * rise + run * run) * weight;
  const int product = __float_as_int(__fmaf_rn(rise, run, 0.0f));
  const float steep = fabsf(__int_as_float(__float_as_int(rise) + (product >> 31)));
  const float flat = fabsf(run);
  const float opposed = __int_as_float(__float_as_int(magnitude) ^ (product & 0x80000000));
  asm("{\n\t"
      ".reg .pred beyond, within;\n\t"
      "setp.ge.f32 beyond|within, %9, %10;\n\t"
      "@within add.f32 %0, %0, %14;\n\t"
      "@within add.f32 %5, %5, %15;\n\t"
      "setp.ge.and.f32 beyond|within, %9, %11, beyond;\n\t"
      "@within add.f32 %1, %1, %14;\n\t"
      "@within add.f32 %6, %6, %15;\n\t"
      "setp.ge.and.f32 beyond|within, %9, %12, beyond;\n\t"
      "@within add.f32 %2, %2, %14;\n\t"
      "@within add.f32 %7, %7, %15;\n\t"
      "setp.ge.and.f32 beyond|within, %9, %13, beyond;\n\t"
      "@within add.f32 %3, %3, %14;\n\t"
      "@within add.f32 %8, %8, %15;\n\t"
      "@beyond add.f32 %4, %4, %14;\n\t"
      "}"
      : "+f"(sums.both[0]), "+f"(sums.both[1]), "+f"(sums.both[2]), "+f"(sums.both[3]), "+f"(sums.both[4]),
        "+f"(sums.opposed[0]), "+f"(sums.opposed[1]), "+f"(sums.opposed[2]), "+f"(sums.opposed[3])
      : "f"(steep), "f"(tangent[0] * flat), "f"(tangent[1] * flat), "f"(tangent[2] * flat), "f"(tangent[3] * flat),
        "f"(magnitude), "f"(opposed));
}

// Ten pixels of a staged row: the cell's eight and one on either side. `chunk` holds the places of their four chunks.
__device__ inline void load_row(const float* row, const int (&chunk)[4], float (&pixel)[kCell + 2]) {
  const float4 low = *reinterpret_cast<const float4*>(row + chunk[1]);
  const float4 high = *reinterpret_cast<const float4*>(row + chunk[2]);
  pixel[0] = row[chunk[0] + 3];
  pixel[1] = low.x, pixel[2] = low.y, pixel[3] = low.z, pixel[4] = low.w;
  pixel[5] = high.x, pixel[6] = high.y, pixel[7] = high.z, pixel[8] = high.w;
  pixel[9] = row[chunk[3]];
}

template <HogGradient kGradient>
__device__ inline void sum_cell(const float* pixels, int pitch, int cell_column, const float* row_weight,
                                const float* column_weight, const float (&tangent)[kEdges], Sums& sums) {
  int chunk[4];
  float rows[3][kCell + 2];
#pragma unroll
  for (int i = 0; i < 4; ++i) chunk[i] = chunk_at(2 * cell_column + i);
  load_row(pixels, chunk, rows[0]);
  load_row(pixels + pitch, chunk, rows[1]);
#pragma unroll
  for (int r = 0; r < kCell; ++r) {
    const float(&above)[kCell + 2] = rows[r % 3], (&here)[kCell + 2] = rows[(r + 1) % 3];
    float(&below)[kCell + 2] = rows[(r + 2) % 3];
    load_row(pixels + (r + 2) * pitch, chunk, below);
#pragma unroll
    for (int i = 1; i <= kCell; ++i) {
      if constexpr (kGradient == HogGradient::central) {
        add(below[i] - above[i], here[i + 1] - here[i - 1], 1.0f, tangent, sums);
      } else {
        const float rise = hog_smooth(above[i - 1], here[i - 1], below[i - 1]) -
                           hog_smooth(above[i + 1], here[i + 1], below[i + 1]);
        const float run = hog_smooth(above[i - 1] - below[i - 1], above[i] - below[i], above[i + 1] - below[i + 1]);
        const float weight = kGradient == HogGradient::sobel_gauss ? row_weight[r] * column_weight[i - 1] : 1.0f;
        add(rise, run, weight, tangent, sums);
      }
    }
  }
}

// The nine values of a cell, into the unit's part of the result in shared memory.
__device__ inline void finish_cell(const HogPlan& plan, const Sums& sums, float* out) {
  float bin[kBins];
#pragma unroll
  for (int k = 0; k < kEdges; ++k) {
    bin[k] = 0.5f * (sums.both[k] + sums.opposed[k]);
    bin[kBins - 1 - k] = 0.5f * (sums.both[k] - sums.opposed[k]);
  }
  bin[kEdges] = sums.both[kEdges];
  const HogScale<float> scale = hog_scale(plan, bin, kBins, 1);
#pragma unroll
  for (int b = 0; b < kBins; ++b) out[b * static_cast<int>(plan.bin_stride)] = (bin[b] - scale.shift) * scale.factor;
}

template <typename Value>
__device__ inline void write_values(const float* values, int count, void* result, int64_t offset) {
  struct alignas(4 * sizeof(Value)) Four {
    Value value[4];
  };
  Value* out = static_cast<Value*>(result) + offset;
  if (count % 4 == 0 && offset % 4 == 0) {
    for (int i = threadIdx.x; i < count / 4; i += blockDim.x) {
      const float4 from = reinterpret_cast<const float4*>(values)[i];
      reinterpret_cast<Four*>(out)[i] = {{static_cast<Value>(from.x), static_cast<Value>(from.y),
                                          static_cast<Value>(from.z), static_cast<Value>(from.w)}};
    }
  } else {
    for (int i = threadIdx.x; i < count; i += blockDim.x) out[i] = static_cast<Value>(values[i]);
  }
}

template <HogGradient kGradient>
__global__ void __launch_bounds__(kMaxThreads, 2)
    kernel(const __grid_constant__ HogPlan plan, const __grid_constant__ HogEdges<float> edges,
           const __grid_constant__ HogWindow<float> window, const __grid_constant__ Tiling tiling, HogSource source,
           HogResult result) {
  extern __shared__ float4 shared[];
  float* const pixels = reinterpret_cast<float*>(shared);
  float* const values = pixels + tiling.units_per_block * tiling.unit_pixels;
  const float tangent[kEdges] = {edges.tangent[0], edges.tangent[1], edges.tangent[2], edges.tangent[3]};
  const int per_patch = plan.cells_per_patch(), channels = static_cast<int>(plan.channels);
  const int patch_values = static_cast<int>(plan.patch_values());

  const uint32_t first = blockIdx.x * tiling.units_per_block;
  const int units = static_cast<int>(min(tiling.units - first, static_cast<uint32_t>(tiling.units_per_block)));
  for (int u = 0; u < units; ++u) {
    stage<kGradient>(plan, tiling, source, find_unit(plan, tiling, first + u), pixels + u * tiling.unit_pixels);
  }
  __syncthreads();

  const int row_cells = tiling.unit_patches * per_patch;
  for (int item = threadIdx.x; item < units * per_patch * channels * row_cells; item += blockDim.x) {
    int rest = item / row_cells;
    const int cell_column = item - rest * row_cells;
    const int row_channel = rest;
    rest /= channels;
    const int channel = row_channel - rest * channels;
    const int u = rest / per_patch, cell_row = rest - u * per_patch;
    const Unit unit = find_unit(plan, tiling, first + u);
    const int patch = cell_column / per_patch;
    if (patch >= unit.patches) continue;  // the last unit of a row may be shorter

    float row_weight[kCell], column_weight[kCell];
    if constexpr (kGradient == HogGradient::sobel_gauss) {
      const int top = unit.patch_row * plan.patch + cell_row * kCell;
      const int left = unit.first_column * plan.patch + cell_column * kCell;
#pragma unroll
      for (int i = 0; i < kCell; ++i) {
        row_weight[i] = window.weight[(top + i) % kHogWindow];
        column_weight[i] = window.weight[(left + i) % kHogWindow];
      }
    }
    Sums sums = {};
    sum_cell<kGradient>(pixels + u * tiling.unit_pixels + channel * tiling.plane + cell_row * kCell * tiling.pitch,
                        tiling.pitch, cell_column, row_weight, column_weight, tangent, sums);
    const int cell = cell_row * per_patch + cell_column - patch * per_patch;
    finish_cell(plan, sums,
                values + u * tiling.unit_values + patch * patch_values + cell * static_cast<int>(plan.cell_stride) +
                    channel * static_cast<int>(plan.channel_stride));
  }
  __syncthreads();

  for (int u = 0; u < units; ++u) {
    const Unit unit = find_unit(plan, tiling, first + u);
    const float* from = values + u * tiling.unit_values;
    const int64_t token = (unit.image * plan.patch_rows() + unit.patch_row) * plan.patch_columns() + unit.first_column;
    switch (result.type) {
      case ScalarType::Half: write_values<Half>(from, unit.patches * patch_values, result.data, token * patch_values); break;
      case ScalarType::BFloat16:
        write_values<BFloat16>(from, unit.patches * patch_values, result.data, token * patch_values);
        break;
      default: write_values<float>(from, unit.patches * patch_values, result.data, token * patch_values);
    }
  }
}

// Shared memory of a block, in bytes.
inline int64_t shared_bytes(const Tiling& tiling) {
  return static_cast<int64_t>(tiling.units_per_block) * (tiling.unit_pixels + tiling.unit_values) * sizeof(float);
}

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// False where this kernel does not apply or the pixels of one patch do not fit in `shared_limit` bytes.
inline bool plan_tiling(const HogPlan& plan, const HogSource& source, ScalarType out, int64_t batch, int64_t shared_limit,
                        Tiling& tiling, int& threads) {
  if (plan.cell != kCell || plan.bins != kBins || source.type == ScalarType::Double || out == ScalarType::Double) {
    return false;
  }
  const int64_t row_floats = plan.channels * (plan.patch + 2);
  const auto floats = [&](int64_t patches) { return row_floats * (patches * plan.patch + 8) + patches * plan.patch_values(); };
  // Two blocks a multiprocessor at least; four if whole rows allow it.
  const int64_t columns = plan.patch_columns(), most = shared_limit / 2 / static_cast<int64_t>(sizeof(float)) - 256;
  if (floats(1) > most) return false;
  int64_t tiles = 1;
  while (floats((columns + tiles - 1) / tiles) > (tiles < columns ? most / 2 + 128 : most)) ++tiles;
  const int64_t units = batch * plan.patch_rows() * tiles;
  if (units >= int64_t(1) << 31) return false;

  tiling.unit_patches = static_cast<int>((columns + tiles - 1) / tiles);
  tiling.units_per_row = static_cast<int>((columns + tiling.unit_patches - 1) / tiling.unit_patches);
  tiling.units = static_cast<uint32_t>(batch * plan.patch_rows() * tiling.units_per_row);
  tiling.pitch = tiling.unit_patches * plan.patch + 8;
  tiling.plane = tiling.pitch * (plan.patch + 2);
  tiling.unit_pixels = static_cast<int>(tiling.plane * plan.channels);
  tiling.unit_values = static_cast<int>(round_up(tiling.unit_patches * plan.patch_values(), 4));
  tiling.packed_rgb = source.type == ScalarType::Byte && plan.channels == 3 && source.channel_stride == 1 &&
                      source.column_stride == 3 && source.row_stride % 8 == 0 && source.image_stride % 8 == 0 &&
                      reinterpret_cast<uintptr_t>(source.data) % 8 == 0;

  // As many units a block as leave the fewest threads of its last warp idle.
  const int64_t cells = tiling.unit_patches * plan.cells_per_patch() * plan.cells_per_patch() * plan.channels;
  int64_t best_idle = INT64_MAX;
  tiling.units_per_block = 1;
  threads = kMaxThreads;
  for (int64_t count = 1; count <= 4 && (count == 1 || count * cells <= kMaxThreads); ++count) {
    Tiling candidate = tiling;
    candidate.units_per_block = static_cast<int>(count);
    if (count > 1 && shared_bytes(candidate) > most * static_cast<int64_t>(sizeof(float))) break;
    const int64_t rounds = (count * cells + kMaxThreads - 1) / kMaxThreads;
    const int64_t wanted = round_up((count * cells + rounds - 1) / rounds, 32);
    const int64_t idle = (rounds * wanted - count * cells) * 1000 / (count * cells);
    if (idle < best_idle) best_idle = idle, tiling = candidate, threads = static_cast<int>(wanted);
  }
  return true;
}

template <HogGradient kGradient>
void launch(const HogPlan& plan, const HogSource& source, const Tiling& tiling, int threads, const HogResult& result,
            cudaStream_t stream) {
  const int bytes = static_cast<int>(shared_bytes(tiling));
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel<kGradient>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const uint32_t blocks = (tiling.units + tiling.units_per_block - 1) / tiling.units_per_block;
  kernel<kGradient><<<blocks, threads, bytes, stream>>>(plan, HogEdges<float>(kBins), HogWindow<float>(), tiling, source,
                                                        result);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace hog_tile
}  // namespace dmjd
