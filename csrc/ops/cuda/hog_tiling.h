// How the host cuts a batch into blocks of the fast HOG kernel (hog_tile.cuh).
#pragma once

#include <algorithm>
#include <cstdint>

#include <cuda_runtime.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "../../core/hog.h"

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

// Division by a number known to the host, exact while numerator * divisor < 2^32. The hardware has none, and a thread
// has only 64 pixels to spread its cost over.
struct Divisor {
  uint32_t value, inverse;

  Divisor() = default;
  explicit Divisor(int64_t value) : value(static_cast<uint32_t>(value)), inverse(UINT32_MAX / this->value + 1) {}

  __device__ int divide(int numerator) const {
    return value == 1 ? numerator : static_cast<int>(__umulhi(static_cast<uint32_t>(numerator), inverse));
  }
};

// How the host cuts the work; sizes in patches, pixels, or floats of shared memory.
struct Tiling {
  int unit_patches, units_per_row, units_per_block;
  uint32_t units;
  int patch_rows, patch_columns, patch_values;
  Divisor row_cells, per_patch, channels;
  int plane, pitch;        // of one channel and of one row of staged pixels
  int unit_pixels, unit_values;
  bool packed_rgb;         // uint8, three channels, neighbours in memory, rows on 8 bytes
};

// Shared memory of a block, in bytes.
inline int64_t shared_bytes(const Tiling& tiling) {
  return static_cast<int64_t>(tiling.units_per_block) * (tiling.unit_pixels + tiling.unit_values) * sizeof(float);
}

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// False where the kernel does not apply or the pixels of a patch do not fit in half of a multiprocessor's shared memory,
// of which there are `shared_limit` bytes.
inline bool plan_tiling(const HogPlan& plan, const HogSource& source, ScalarType out, int64_t batch,
                        int64_t shared_limit, Tiling& tiling, int& threads) {
  if (plan.cell != kCell || plan.bins != kBins || source.type == ScalarType::Double || out == ScalarType::Double) {
    return false;
  }
  const int64_t row_floats = plan.channels * (plan.patch + 2);
  const auto floats = [&](int64_t patches) {
    return row_floats * (patches * plan.patch + 8) + patches * plan.patch_values();
  };
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
  tiling.patch_rows = static_cast<int>(plan.patch_rows());
  tiling.patch_columns = static_cast<int>(columns);
  tiling.row_cells = Divisor(tiling.unit_patches * plan.cells_per_patch());
  tiling.per_patch = Divisor(plan.cells_per_patch());
  tiling.channels = Divisor(plan.channels);
  tiling.patch_values = static_cast<int>(plan.patch_values());
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

}  // namespace hog_tile
}  // namespace dmjd
