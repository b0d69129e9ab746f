// The fast HOG kernel: 9 bins, cells of 8 x 8 pixels, any channels, layout and pixel type but float64.
//
// A unit of work is a run of patches in one row of patches. Its pixels and the ring around them are staged in shared
// memory as float planes, which is where the layouts and types end; then one thread takes one cell of one channel down
// its 8 rows with the last three in registers, so a histogram belongs to one thread and needs no atomics. Results are
// gathered in shared memory to leave in order, as whole vectors.
//
// The kernel is bound by instructions and not by memory (about 25 per pixel and channel). What that suggests:
//   - Both halves of the orientations share the tests of four edges. `both` sums magnitudes per edge passed, `opposed`
//     the same with the sign of the half; half their sum and difference are the halves' own.
//   - The sums are over all orientations beyond an edge, so a pixel costs one comparison an edge and no logic; bins are
//     differences of neighbours. Their error is some 1e-7 of the cell's total and not of the bin, but a bin that no
//     pixel falls in is exactly 0, since both sums took the same additions.
//   - Bytes are staged times kByteScale. |rise| - tangent * |run| is then at least 1 or at most 0, so that saturated to
//     0..1 it is the indicator of an edge passed: one instruction, and no predicate.
//   - Half of a cell's rows is one pass of a loop: all eight unrolled were code of 27 KB.
//   - Columns are stored in chunks of four, exchanged in pairs in every second group of eight, so that the threads of
//     eight cells in a row hit eight different groups of banks with 16-byte reads.
#pragma once

#include <type_traits>

#include "hog_tiling.h"
#include "launch.h"

namespace dmjd {
namespace hog_tile {

struct Unit {
  uint32_t row;  // of patches, counted through the batch
  int first_column, patches;
};

__device__ inline Unit find_unit(const Tiling& tiling, uint32_t index) {
  if (tiling.units_per_row == 1) return {index, 0, tiling.unit_patches};
  const uint32_t row = index / tiling.units_per_row;
  const int first = static_cast<int>(index - row * tiling.units_per_row) * tiling.unit_patches;
  return {row, first, min(tiling.unit_patches, tiling.patch_columns - first)};
}

// The pixels that a unit is staged from.
template <typename Pixel>
struct Window {
  const Pixel* image;
  int top, left, width;

  __device__ Window(const HogPlan& plan, const Tiling& tiling, const HogSource& source, const Unit& unit) {
    const uint32_t index = unit.row / tiling.patch_rows;
    image = static_cast<const Pixel*>(source.data) + index * source.image_stride;
    top = static_cast<int>(unit.row - index * tiling.patch_rows) * plan.patch;
    left = unit.first_column * plan.patch;
    width = unit.patches * plan.patch;
  }
};

// Where a chunk of four columns, or a column, of a staged row lies. Column -1 is the ring's.
__device__ inline int chunk_at(int chunk) { return 4 * (chunk ^ (chunk >> 3 & 1)); }
__device__ inline int column_at(int column) { return chunk_at((column + 4) >> 2) + (column & 3); }

// Of staged bytes. Over all differences and Sobel sums of bytes and the edges of 9 bins, the least positive
// |rise| - tangent * |run| is 1.0e-4, and 0 occurs where both are 0 alone (csrc/tests/test_hog.cpp).
constexpr float kByteScale = 1 << 20;

// A byte times kByteScale without the slow conversion unit: it becomes the low mantissa of 2^43. Differences of such
// numbers are exact, so central differences do without the subtraction of 2^43.
template <HogGradient kGradient>
__device__ inline float byte_as_float(uint32_t word, int byte) {
  const float above = __uint_as_float(__byte_perm(word, 0x55000000u, 0x7440 | byte));
  return kGradient == HogGradient::central ? above : above - 8388608.0f * kByteScale;
}

// A warp takes rows, a thread 8 pixels = 24 bytes of each, of several rows before it waits for the first.
template <HogGradient kGradient>
__device__ inline void stage_rgb(const HogPlan& plan, const Tiling& tiling, const HogSource& source, uint32_t first,
                                 int units, float* __restrict__ pixels) {
  constexpr int kAhead = 4;
  struct Line {
    const uint8_t* pixel;  // null where there is nothing to do
    uint2 word[3];
    int out;
    bool starts, ends, last;  // the image's row on the left and on the right, the unit's on the right
  };
  const int rows = plan.patch + 2, warps = blockDim.x >> 5;
  for (int group = threadIdx.x & 31; group < tiling.unit_patches * plan.patch / 8; group += 32) {
    int row = threadIdx.x >> 5, u = 0;
    Window<uint8_t> window(plan, tiling, source, find_unit(tiling, first));
    while (u < units) {
      Line lines[kAhead];
#pragma unroll
      for (Line& line : lines) {
        while (row >= rows && u < units) {
          row -= rows;
          if (++u < units) window = Window<uint8_t>(plan, tiling, source, find_unit(tiling, first + u));
        }
        line.pixel = nullptr;
        if (u < units && 8 * group < window.width) {
          const int from = static_cast<int>(hog_reflect(window.top + row - 1, plan.height));
          line.pixel = window.image + from * source.row_stride + 3 * (window.left + 8 * group);
          line.out = u * tiling.unit_pixels + row * tiling.pitch;
          line.starts = window.left == 0, line.ends = window.left + window.width == plan.width;
          line.last = 8 * group + 8 == window.width;
#pragma unroll
          for (int i = 0; i < 3; ++i) line.word[i] = __ldg(reinterpret_cast<const uint2*>(line.pixel) + i);
        }
        row += warps;
      }
#pragma unroll
      for (const Line& line : lines) {
        if (line.pixel == nullptr) continue;
        const uint32_t word[6] = {line.word[0].x, line.word[0].y, line.word[1].x,
                                  line.word[1].y, line.word[2].x, line.word[2].y};
#pragma unroll
        for (int c = 0; c < 3; ++c) {
          float value[8];
#pragma unroll
          for (int i = 0; i < 8; ++i) value[i] = byte_as_float<kGradient>(word[(3 * i + c) / 4], (3 * i + c) % 4);
          float* out = pixels + line.out + c * tiling.plane;
          float4* const low = reinterpret_cast<float4*>(out + chunk_at(2 * group + 1));
          float4* const high = reinterpret_cast<float4*>(out + chunk_at(2 * group + 2));
          *low = make_float4(value[0], value[1], value[2], value[3]);
          *high = make_float4(value[4], value[5], value[6], value[7]);
          // The ring to the left and right: a neighbouring unit's pixel, or the reflected one, which is at hand.
          if (group == 0) {
            out[column_at(-1)] = line.starts ? value[1] : byte_as_float<kGradient>(line.pixel[c - 3], 0);
          }
          if (line.last) {
            out[column_at(8 * group + 8)] = line.ends ? value[6] : byte_as_float<kGradient>(line.pixel[24 + c], 0);
          }
        }
      }
    }
  }
}

// A warp takes a row of one channel.
template <typename Pixel>
__device__ inline void stage_any(const HogPlan& plan, const Tiling& tiling, const HogSource& source, uint32_t first,
                                 int units, float* __restrict__ pixels) {
  const int channels = tiling.channels.value, lines = (plan.patch + 2) * channels;
  for (int u = 0; u < units; ++u) {
    const Window<Pixel> window(plan, tiling, source, find_unit(tiling, first + u));
    for (int line = threadIdx.x >> 5; line < lines; line += blockDim.x >> 5) {
      const int row = tiling.channels.divide(line), channel = line - row * channels;
      const Pixel* in = window.image + hog_reflect(window.top + row - 1, plan.height) * source.row_stride +
                        channel * source.channel_stride;
      float* out = pixels + u * tiling.unit_pixels + channel * tiling.plane + row * tiling.pitch;
      for (int column = static_cast<int>(threadIdx.x & 31) - 1; column <= window.width; column += 32) {
        const float value =
            static_cast<float>(in[hog_reflect(window.left + column, plan.width) * source.column_stride]);
        out[column_at(column)] = std::is_same_v<Pixel, uint8_t> ? value * kByteScale : value;
      }
    }
  }
}

template <HogGradient kGradient, bool kBytes>
__device__ inline void stage(const HogPlan& plan, const Tiling& tiling, const HogSource& source, uint32_t first,
                             int units, float* pixels) {
  if constexpr (kBytes) {
    if (tiling.packed_rgb) return stage_rgb<kGradient>(plan, tiling, source, first, units, pixels);
    return stage_any<uint8_t>(plan, tiling, source, first, units, pixels);
  }
  switch (source.type) {
    case ScalarType::Half: return stage_any<Half>(plan, tiling, source, first, units, pixels);
    case ScalarType::BFloat16: return stage_any<BFloat16>(plan, tiling, source, first, units, pixels);
    default: return stage_any<float>(plan, tiling, source, first, units, pixels);
  }
}

// Over the pixels beyond k edges: magnitudes of both halves of the orientations, and of the lower less the upper.
struct Sums {
  float both[kEdges + 1], opposed[kEdges + 1];
};

__device__ inline float fast_sqrt(float x) {
  float root;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
}

// hog_bin() for 9 bins and the addition to it. The sign of `product` is that of rise * run, and plus where either is 0
// (also when the product underflows), so it says which half the orientation lies in. Gradients of bytes lie on no edge;
// for others a strict comparison is wanted in the upper half: `steep` is then the next float below |rise|.
template <bool kBytes>
__device__ inline void add(float rise, float run, float weight, const float (&tangent)[kEdges], Sums& sums) {
  const float magnitude = fast_sqrt(rise * rise + run * run) * weight;
  const int product = __float_as_int(__fmaf_rn(rise, run, 0.0f));
  const float flat = fabsf(run);
  const float opposed = __int_as_float(__float_as_int(magnitude) ^ (product & 0x80000000));
  sums.both[0] += magnitude;
  sums.opposed[0] += opposed;
  if constexpr (kBytes) {
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
      const float passed = __saturatef(__fmaf_rn(-flat, tangent[k], fabsf(rise)));
      sums.both[k + 1] = __fmaf_rn(passed, magnitude, sums.both[k + 1]);
      sums.opposed[k + 1] = __fmaf_rn(passed, opposed, sums.opposed[k + 1]);
    }
  } else {
    const float steep = fabsf(__int_as_float(__float_as_int(rise) + (product >> 31)));
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
      if (steep >= tangent[k] * flat) {
        sums.both[k + 1] += magnitude;
        sums.opposed[k + 1] += opposed;
      }
    }
  }
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

// `row` is the cell's first in the image, for maskfeat_gauss.
template <HogGradient kGradient, bool kBytes>
__device__ inline void sum_cell(const float* pixels, int pitch, int cell_column, const HogWindow<float>& window,
                                int row, const float* column_weight, const float (&tangent)[kEdges], Sums& sums) {
  constexpr int kUnrolled = kCell / 2;
  int chunk[4];
  float rows[4][kCell + 2];
#pragma unroll
  for (int i = 0; i < 4; ++i) chunk[i] = chunk_at(2 * cell_column + i);
  load_row(pixels, chunk, rows[0]);
  load_row(pixels + pitch, chunk, rows[1]);
  pixels += 2 * pitch;
#pragma unroll 1
  for (int half = 0; half < kCell; half += kUnrolled, pixels += kUnrolled * pitch, row += kUnrolled) {
#pragma unroll
    for (int r = 0; r < kUnrolled; ++r) {
      const float(&above)[kCell + 2] = rows[r % 4], (&here)[kCell + 2] = rows[(r + 1) % 4];
      float(&below)[kCell + 2] = rows[(r + 2) % 4];
      load_row(pixels + r * pitch, chunk, below);
      const float row_weight = kGradient == HogGradient::sobel_gauss ? window.weight[(row + r) % kHogWindow] : 1.0f;
#pragma unroll
      for (int i = 1; i <= kCell; ++i) {
        if constexpr (kGradient == HogGradient::central) {
          add<kBytes>(below[i] - above[i], here[i + 1] - here[i - 1], 1.0f, tangent, sums);
        } else {
          const float rise = hog_smooth(above[i - 1], here[i - 1], below[i - 1]) -
                             hog_smooth(above[i + 1], here[i + 1], below[i + 1]);
          const float run = hog_smooth(above[i - 1] - below[i - 1], above[i] - below[i], above[i + 1] - below[i + 1]);
          const float weight = kGradient == HogGradient::sobel_gauss ? row_weight * column_weight[i - 1] : 1.0f;
          add<kBytes>(rise, run, weight, tangent, sums);
        }
      }
    }
  }
}

// The nine values of a cell, into the unit's part of the result in shared memory.
template <bool kBytes>
__device__ inline void finish_cell(const HogPlan& plan, const Sums& sums, float* out) {
  constexpr float kScale = kBytes ? 1 / kByteScale : 1.0f;
  float bin[kBins];
#pragma unroll
  for (int k = 0; k < kEdges; ++k) {
    const float both = sums.both[k] - sums.both[k + 1], opposed = sums.opposed[k] - sums.opposed[k + 1];
    bin[k] = 0.5f * kScale * (both + opposed);
    bin[kBins - 1 - k] = 0.5f * kScale * (both - opposed);
  }
  bin[kEdges] = kScale * sums.both[kEdges];  // the steepest lies across 90 degrees
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

template <HogGradient kGradient, bool kBytes>
__global__ void __launch_bounds__(kMaxThreads, 2)
    kernel(const __grid_constant__ HogPlan plan, const __grid_constant__ HogEdges<float> edges,
           const __grid_constant__ HogWindow<float> window, const __grid_constant__ Tiling tiling, HogSource source,
           HogResult result) {
  extern __shared__ float4 shared[];
  float* const pixels = reinterpret_cast<float*>(shared);
  float* const values = pixels + tiling.units_per_block * tiling.unit_pixels;
  const float tangent[kEdges] = {edges.tangent[0], edges.tangent[1], edges.tangent[2], edges.tangent[3]};
  const uint32_t first = blockIdx.x * tiling.units_per_block;
  const int units = static_cast<int>(min(tiling.units - first, static_cast<uint32_t>(tiling.units_per_block)));
  stage<kGradient, kBytes>(plan, tiling, source, first, units, pixels);
  __syncthreads();

  const int row_cells = tiling.row_cells.value, channels = tiling.channels.value, per_patch = tiling.per_patch.value;
  for (int item = threadIdx.x; item < units * per_patch * channels * row_cells; item += blockDim.x) {
    const int line = tiling.row_cells.divide(item), cell_column = item - line * row_cells;
    const int cell_line = tiling.channels.divide(line), channel = line - cell_line * channels;
    const int u = tiling.per_patch.divide(cell_line), cell_row = cell_line - u * per_patch;
    const int patch = tiling.per_patch.divide(cell_column);
    const Unit unit = find_unit(tiling, first + u);
    if (patch >= unit.patches) continue;  // the last unit of a row may be shorter

    int row = 0;
    float column_weight[kCell];
    if constexpr (kGradient == HogGradient::sobel_gauss) {
      row = static_cast<int>(unit.row % tiling.patch_rows) * plan.patch + cell_row * kCell;
      const int left = unit.first_column * plan.patch + cell_column * kCell;
#pragma unroll
      for (int i = 0; i < kCell; ++i) column_weight[i] = window.weight[(left + i) % kHogWindow];
    }
    Sums sums = {};
    const float* top = pixels + u * tiling.unit_pixels + channel * tiling.plane + cell_row * kCell * tiling.pitch;
    sum_cell<kGradient, kBytes>(top, tiling.pitch, cell_column, window, row, column_weight, tangent, sums);
    const int cell = cell_row * per_patch + cell_column - patch * per_patch;
    const int place = cell * static_cast<int>(plan.cell_stride) + channel * static_cast<int>(plan.channel_stride);
    finish_cell<kBytes>(plan, sums, values + u * tiling.unit_values + patch * tiling.patch_values + place);
  }
  __syncthreads();

  for (int u = 0; u < units; ++u) {
    const Unit unit = find_unit(tiling, first + u);
    const float* from = values + u * tiling.unit_values;
    const int count = unit.patches * tiling.patch_values;
    const int64_t at =
        (static_cast<int64_t>(unit.row) * tiling.patch_columns + unit.first_column) * tiling.patch_values;
    switch (result.type) {
      case ScalarType::Half: write_values<Half>(from, count, result.data, at); break;
      case ScalarType::BFloat16: write_values<BFloat16>(from, count, result.data, at); break;
      default: write_values<float>(from, count, result.data, at);
    }
  }
}

template <HogGradient kGradient, bool kBytes>
void launch(const HogPlan& plan, const HogSource& source, const Tiling& tiling, int threads, const HogResult& result,
            cudaStream_t stream) {
  const int bytes = static_cast<int>(shared_bytes(tiling));
  STD_TORCH_CHECK(static_cast<size_t>(bytes) <= kMaxSharedBytes, "hog: a tile that no block can hold");
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel<kGradient, kBytes>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const uint32_t blocks = (tiling.units + tiling.units_per_block - 1) / tiling.units_per_block;
  kernel<kGradient, kBytes><<<blocks, threads, bytes, stream>>>(plan, HogEdges<float>(kBins), HogWindow<float>(),
                                                                tiling, source, result);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <HogGradient kGradient>
void launch(const HogPlan& plan, const HogSource& source, const Tiling& tiling, int threads, const HogResult& result,
            cudaStream_t stream) {
  const auto run = source.type == ScalarType::Byte ? launch<kGradient, true> : launch<kGradient, false>;
  run(plan, source, tiling, threads, result, stream);
}

}  // namespace hog_tile
}  // namespace dmjd
