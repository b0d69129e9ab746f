// A product that ends in GELU, and two that end in GELU and in its gradient.
//
// A persistent block has three warpgroups: one brings tiles of the operands into a ring in shared memory, two multiply,
// each 64 rows of a tile of 128 x 256, which asks of L2 half of what 128 x 128 would. The two blocks of a cluster lie
// below each other and bring each other half of the weights. What leaves goes through shared memory to the copy engine.
#pragma once

#include "bulk_copy.cuh"
#include "gelu.cuh"
#include "warpgroup_product.cuh"

namespace dmjd::hopper {

constexpr int kTileRows = 128;
constexpr int kTileHidden = 256;
constexpr int kDepth = 64;  // of a step: a swizzled line of 128 bytes
constexpr int kStages = 4;
constexpr int kConsumers = 2;
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kCluster = 2;
constexpr int kChunk = 64;  // columns that leave a warpgroup at once

constexpr int kInputBytes = kTileRows * kDepth * 2;
constexpr int kWeightBytes = kTileHidden * kDepth * 2;
constexpr int kStageBytes = kInputBytes + kWeightBytes;
constexpr int kOutBytes = 64 * kChunk * 2;
constexpr int kSharedBytes = 1024 + kStages * kStageBytes + kConsumers * 2 * kOutBytes + 8 * (2 * kStages + 1);
static_assert(kSharedBytes <= 227 * 1024, "more than a block of Hopper may have");

// x and grad in boxes of 128 rows, weight1 of 128, weight2, hidden and grad_hidden of 64.
struct Maps {
  CUtensorMap x, weight1, grad, weight2, hidden, grad_hidden;
};

struct Shared {
  uint32_t stages, out, full, empty, lead;

  __device__ explicit Shared(uint32_t start) {
    stages = (start + 1023) & ~1023u;  // where the pattern of the swizzle begins
    out = stages + kStages * kStageBytes;
    full = out + kConsumers * 2 * kOutBytes;
    empty = full + 8 * kStages;
    lead = empty + 8 * kStages;
  }
  __device__ uint32_t input(int stage) const { return stages + stage * kStageBytes; }
  __device__ uint32_t weight(int stage) const { return input(stage) + kInputBytes; }
};

// A stage's place in the ring and the parity of its turn.
struct Turn {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// The rows and columns of hidden layers that a block works on, one tile after the other.
struct Tiles {
  int across, count, next, stride;

  __device__ Tiles(int rows, int width) {
    across = width / kTileHidden;
    count = (rows + kCluster * kTileRows - 1) / (kCluster * kTileRows) * across;
    next = blockIdx.x / kCluster, stride = gridDim.x / kCluster;
  }
  // Tiles of a row of tiles are neighbours in time, so their rows of the input come from L2.
  __device__ bool advance(int& row, int& column) {
    if (next >= count) return false;
    row = (next / across * kCluster + cluster_rank()) * kTileRows, column = next % across * kTileHidden;
    next += stride;
    return true;
  }
};

// 64 x 64 results of a warpgroup on their way through shared memory, in two buffers by turns.
template <class T>
struct Outlet {
  uint32_t buffers;
  int group, thread, turn = 0;

  // `packed` holds what the sums of 64 columns became: two neighbours of a row each.
  __device__ void send(const CUtensorMap& map, const uint32_t (&packed)[16], int column, int row) {
    const uint32_t buffer = buffers + turn * kOutBytes;
    if (thread == 0) stores_read<1>();
    warpgroup_sync(group);
    const int lane = thread % 32, matrix = lane / 8;
    const int own = thread / 32 * 16 + (matrix & 1) * 8 + lane % 8;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const uint32_t at = buffer + own * 128 + (((j + (matrix >> 1)) ^ (own & 7)) << 4);
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(packed[2 * j]),
                   "r"(packed[2 * j + 1]), "r"(packed[2 * j + 2]), "r"(packed[2 * j + 3])
                   : "memory");
    }
    publish();
    warpgroup_sync(group);
    if (thread == 0) store(map, buffer, column, row);
    turn ^= 1;
  }

  // The buffers may be used for something else.
  __device__ void drain() {
    if (thread == 0) stores_read<0>();
    warpgroup_sync(group);
  }
};

// A warpgroup that multiplies.
struct Consumer {
  Shared shared;
  int group;
  bool leads;  // speaks for the warpgroup
  Turn turn;
  uint32_t lead_parity = 0;

  // sum = its 64 rows of the input @ the tile of the weights.
  template <class T, bool kTransposed>
  __device__ void product(float (&sum)[128], int steps) {
    // Where the ring holds a product as a whole, the second warpgroup begins when the first has issued its own, and one
    // multiplies while the other computes GELUs: 9 % of a gradient on an H200.
    const bool staggered = steps == kStages;
    if (staggered && group == 1) barrier_wait(shared.lead, lead_parity), lead_parity ^= 1;
    int before = -1;
    for (int step = 0; step < steps; ++step) {
      barrier_wait(shared.full + 8 * turn.stage, turn.parity);
      const uint64_t a = descriptor(shared.input(turn.stage) + group * 64 * kDepth * 2, 1, 64);
      const uint32_t weight = shared.weight(turn.stage);
      const uint64_t b = kTransposed ? descriptor(weight, 512, 64) : descriptor(weight, 1, 64);
      products_begin();
#pragma unroll
      for (int k = 0; k < kDepth / 16; ++k) {
        multiply<T, kTransposed>(sum, a + 2 * k, b + (kTransposed ? 128 : 2) * k, step > 0 || k > 0);
      }
      products_end();
      if (staggered && group == 0 && step == steps - 1 && leads) barrier_arrive(shared.lead);
      products_done<1>();
      if (before >= 0) release(before);
      before = turn.stage;
      turn.advance();
    }
    products_done<0>();
#pragma unroll
    for (float& value : sum) asm volatile("" : "+f"(value)::"memory");  // not to be read before
    release(before);
  }

 private:
  // Both blocks write into a stage, so both have to know that it is free.
  __device__ void release(int stage) const {
    if (leads) {
      for (int rank = 0; rank < kCluster; ++rank) barrier_arrive(shared.empty + 8 * stage, rank);
    }
  }
};

template <bool kGradient>
__device__ __forceinline__ void bring(const Shared& shared, const Maps& maps, Tiles tiles, int depth, int grad_depth) {
  const uint32_t rank = cluster_rank();
  Turn turn;
  int row, column;
  while (tiles.advance(row, column)) {
    for (int part = 0; part <= kGradient; ++part) {
      const int steps = (part ? grad_depth : depth) / kDepth;
      for (int step = 0; step < steps; ++step, turn.advance()) {
        const uint32_t full = shared.full + 8 * turn.stage, weight = shared.weight(turn.stage);
        barrier_wait(shared.empty + 8 * turn.stage, turn.parity ^ 1);
        barrier_expect(full, kStageBytes);
        load(shared.input(turn.stage), part ? maps.grad : maps.x, full, step * kDepth, row);
        if (part == 0) {
          load_for_all<kCluster>(weight + rank * (kWeightBytes / 2), maps.weight1, full, step * kDepth, column + rank * 128);
        } else {
          for (int box = 2 * rank; box < 2 * rank + 2; ++box) {
            load_for_all<kCluster>(weight + box * (kWeightBytes / 4), maps.weight2, full, column + 64 * box, step * kDepth);
          }
        }
      }
    }
  }
}

// Columns of `sum` added up over the 64 rows, in an order that is always the same: of a thread, of a warp, of the
// warpgroup. `partial` has room for 4 x 256 values, and `to` for 256.
__device__ __forceinline__ void sum_columns(const float (&sum)[128], float* partial, float* to, int group, int thread) {
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    float left = sum[4 * j] + sum[4 * j + 2], right = sum[4 * j + 1] + sum[4 * j + 3];
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
      left += __shfl_xor_sync(~0u, left, distance);
      right += __shfl_xor_sync(~0u, right, distance);
    }
    if (thread % 32 < 4) *reinterpret_cast<float2*>(partial + thread / 32 * kTileHidden + 8 * j + 2 * (thread % 4)) = {left, right};
  }
  warpgroup_sync(group);
  if (to != nullptr) {
#pragma unroll
    for (int at = thread; at < kTileHidden; at += 128) {
      to[at] = partial[at] + partial[kTileHidden + at] + partial[2 * kTileHidden + at] + partial[3 * kTileHidden + at];
    }
  }
  warpgroup_sync(group);
}

// hidden = gelu(x @ weight1.T + bias); with kGradient also grad_hidden = (grad @ weight2) * gelu'(x @ weight1.T + bias), and
// sums [rows / 64, width] of its columns over 64 rows each. width is a multiple of 256, depths are of 64.
template <class T, bool kGradient>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    gelu_hidden_kernel(const __grid_constant__ Maps maps, const T* __restrict__ bias, float* __restrict__ sums, int rows,
                       int width, int depth, int grad_depth) {
  extern __shared__ char memory[];
  const Shared shared(shared_address(memory));
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(shared.full + 8 * stage, 1);
      barrier_init(shared.empty + 8 * stage, kConsumers * kCluster);
    }
    barrier_init(shared.lead, 1);
    barriers_ready();
  }
  cluster_sync();

  Tiles tiles(rows, width);
  if (group == kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (thread == 0) bring<kGradient>(shared, maps, tiles, depth, grad_depth);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int pair = 2 * (thread % 4);
    Outlet<T> outlet{shared.out + group * 2 * kOutBytes, group, thread};
    Consumer consumer{shared, group, thread == 0};
    float sum[128];
    int row, column;
    while (tiles.advance(row, column)) {
      row += 64 * group;
      consumer.product<T, false>(sum, depth / kDepth);
      // float16 holds a slope, which is at most 1.13, to four times bfloat16's precision.
      uint32_t slope[kGradient ? 64 : 1];
#pragma unroll
      for (int chunk = 0; chunk < kTileHidden / kChunk; ++chunk) {
        uint32_t packed[16];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int at = 32 * chunk + 4 * j;
          const float2 add =
              unpack<T>(__ldg(reinterpret_cast<const uint32_t*>(bias + column + kChunk * chunk + 8 * j + pair)));
          const Gelu upper0 = gelu(sum[at] + add.x), upper1 = gelu(sum[at + 1] + add.y);
          const Gelu lower0 = gelu(sum[at + 2] + add.x), lower1 = gelu(sum[at + 3] + add.y);
          packed[2 * j] = pack<T>(upper0.value, upper1.value);
          packed[2 * j + 1] = pack<T>(lower0.value, lower1.value);
          if constexpr (kGradient) {
            slope[at / 2] = pack<__half>(upper0.slope, upper1.slope);
            slope[at / 2 + 1] = pack<__half>(lower0.slope, lower1.slope);
          }
        }
        outlet.send(maps.hidden, packed, column + kChunk * chunk, row);
      }
      if constexpr (kGradient) {
        consumer.product<T, true>(sum, grad_depth / kDepth);
#pragma unroll
        for (int i = 0; i < 64; ++i) {
          const float2 by = unpack<__half>(slope[i]);
          sum[2 * i] *= by.x, sum[2 * i + 1] *= by.y;
        }
#pragma unroll
        for (int chunk = 0; chunk < kTileHidden / kChunk; ++chunk) {
          uint32_t packed[16];
#pragma unroll
          for (int i = 0; i < 16; ++i) packed[i] = pack<T>(sum[32 * chunk + 2 * i], sum[32 * chunk + 2 * i + 1]);
          outlet.send(maps.grad_hidden, packed, column + kChunk * chunk, row);
        }
        outlet.drain();
        float* const partial = reinterpret_cast<float*>(memory + (outlet.buffers - shared_address(memory)));
        sum_columns(sum, partial, row < rows ? sums + int64_t(row / 64) * width + column : nullptr, group, thread);
      }
    }
    if (thread == 0) stores_done();
  }
  __syncwarp();
  cluster_sync();  // none may leave while the other still writes into its shared memory
}

}  // namespace dmjd::hopper
