// One block of threads draws all views of one sample, and writes every output once. dmjd/ops/masks.py says what is drawn.
//
// A sample's words and states stay in shared memory; where a grid has too many units for that (9,000 and more) they lie
// in global memory, which is slower and changes nothing else.
#include "../../core/cut.h"
#include "../../core/keyed.h"
#include "../../core/rectangle.h"
#include "../masks.h"
#include "key.h"

namespace dmjd {
namespace {

constexpr int kWarp = 32;
constexpr unsigned int kAllLanes = 0xFFFFFFFFu;
constexpr int kMaxThreads = 1024;
constexpr int kMaxViews = 128, kMaxAspects = 128;  // both travel with the launch
constexpr size_t kMaxShared = 45 * 1024;           // what every card gives without asking, less the static part
constexpr int64_t kScratchBlocks = 1024;           // bounds the global memory that stands in for shared memory

// The state of a unit.
constexpr uint8_t kCovered = 1;  // an earlier view hid it ("complementary": kept it)
constexpr uint8_t kChosen = 2;   // this view does

struct Launch {
  MaskShape shape;
  int aspect_count;
  int fresh[kMaxViews];
  int aspects[kMaxAspects];
};

struct Outputs {
  int64_t* visible;
  int64_t* masked;
  int64_t* restore;
  bool* mask;
};

// Sums over a block of whole warps. Two slots take turns, so that one barrier a sum is enough: who writes a slot again
// has passed the barrier of the other, which nobody passes before reading the first.
class BlockSums {
 public:
  __device__ explicit BlockSums(int (*slots)[kWarp]) : slots_(slots) {}

  __device__ int sum(int value) {
    int ahead;
    return sum(value, ahead);
  }

  // `ahead`: the sum over the warps before this thread's.
  __device__ int sum(int value, int& ahead) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    int* slot = slots_[turn_];
    turn_ ^= 1;
    value = __reduce_add_sync(kAllLanes, value);
    if (lane == 0) slot[warp] = value;
    __syncthreads();
    value = lane < warps ? slot[lane] : 0;
    ahead = __reduce_add_sync(kAllLanes, lane < warp ? value : 0);
    return __reduce_add_sync(kAllLanes, value);
  }

 private:
  int (*slots_)[kWarp];
  int turn_ = 0;
};

__device__ int lanes_before(unsigned int ballot) {
  return __popc(ballot & ((1u << (threadIdx.x % kWarp)) - 1));
}

// Every 32nd unit of a rectangle in raster order, with divisions at the start only.
class LaneWalk {
 public:
  __device__ LaneWalk(const Rectangle& rectangle, int grid_columns)
      : width_(max(rectangle.width, 1)),
        skip_(kWarp / width_ * grid_columns + kWarp % width_),
        wrap_(grid_columns - width_) {
    const int lane = threadIdx.x % kWarp;
    column_ = lane % width_;
    unit_ = (rectangle.top + lane / width_) * grid_columns + rectangle.left + column_;
  }

  __device__ int unit() const { return unit_; }

  __device__ void advance() {
    column_ += kWarp % width_;
    unit_ += skip_;
    if (column_ >= width_) {
      column_ -= width_;
      unit_ += wrap_;
    }
  }

 private:
  int width_, skip_, wrap_, column_, unit_;
};

// One warp takes rectangles into `states`; `quota` is of units never hidden and of units hidden before, and shrinks.
__device__ void draw_rectangles(const PhiloxCounter* attempts, const RectangleLaw& law, uint8_t* states,
                                int (&quota)[2]) {
  const int lane = threadIdx.x % kWarp;
  for (int attempt = 0, failures = 0; attempt < kMaxAttempts && failures < kMaxFailures; ++attempt) {
    const int remaining = quota[0] + quota[1];
    if (remaining == 0) return;
    const Rectangle rectangle = draw_rectangle(attempts[attempt], remaining, law);
    const int units = rectangle.units();
    int added = 0;
    LaneWalk counting(rectangle, law.columns);
    for (int i = lane; i < units; i += kWarp, counting.advance()) added += (states[counting.unit()] & kChosen) == 0;
    added = __reduce_add_sync(kAllLanes, added);
    int left = remaining;
    if (added > 0 && added <= remaining) {
      LaneWalk taking(rectangle, law.columns);
      for (int first = 0; first < units; first += kWarp, taking.advance()) {
        const uint8_t state = first + lane < units ? states[taking.unit()] : kChosen;
        const unsigned int is_new = __ballot_sync(kAllLanes, state == 0);
        const unsigned int is_old = __ballot_sync(kAllLanes, state == kCovered);
        if ((state == 0 && lanes_before(is_new) < quota[0]) || (state == kCovered && lanes_before(is_old) < quota[1])) {
          states[taking.unit()] = state | kChosen;
        }
        quota[0] -= min(quota[0], __popc(is_new));
        quota[1] -= min(quota[1], __popc(is_old));
      }
      left = quota[0] + quota[1];
    }
    __syncwarp();  // the next attempt reads states that other lanes wrote
    failures = left < remaining ? 0 : failures + 1;
  }
}

// Chooses the `count` lowest (word, unit) of the `free` units whose state is `kind`. Threads touch their own units only.
__device__ void choose(const uint32_t* words, uint8_t* states, int units, uint8_t kind, int free, int count,
                       BlockSums& sums) {
  if (count == 0) return;
  Cut cut = {0, 0};
  if (count < free) {
    cut = find_cut(free, count, [&](uint32_t limit) {
      if (units <= blockDim.x) {
        const int unit = threadIdx.x;
        return __syncthreads_count(unit < units && states[unit] == kind && words[unit] < limit);
      }
      int below = 0;
      for (int unit = threadIdx.x; unit < units; unit += blockDim.x) below += states[unit] == kind && words[unit] < limit;
      return sums.sum(below);
    });
  }
  if (cut.ties > 0) {
    // Two of some hundred words of 32 bits are equal, and at the cut: one sample in ten million.
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int unit = 0; cut.ties > 0; ++unit) {
        if (states[unit] != kind || words[unit] != cut.word) continue;
        states[unit] = kind | kChosen;
        --cut.ties;
      }
    }
    __syncthreads();
  }
  for (int unit = threadIdx.x; unit < units; unit += blockDim.x) {
    if (states[unit] == kind && (count == free || words[unit] < cut.word)) states[unit] = kind | kChosen;
  }
}

__device__ void write_view(const MaskShape& shape, const uint8_t* states, bool chosen_is_hidden, int64_t row,
                           BlockSums& sums, const Outputs& out) {
  const int tokens = shape.tokens(), visible = shape.visible();
  int64_t* shown = out.visible + row * visible;
  int64_t* gone = out.masked + row * shape.masked();
  int masked = 0;
  for (int first = 0; first < tokens; first += blockDim.x) {
    const int token = first + threadIdx.x;
    const bool inside = token < tokens;
    const bool hidden = inside && ((states[shape.unit_of(token)] & kChosen) != 0) == chosen_is_hidden;
    int ahead;
    const int total = sums.sum(hidden, ahead);
    const int before = masked + ahead + lanes_before(__ballot_sync(kAllLanes, hidden));
    if (inside) {
      const int slot = hidden ? before : token - before;
      (hidden ? gone : shown)[slot] = token;
      out.restore[row * tokens + token] = hidden ? visible + slot : slot;
      out.mask[row * tokens + token] = hidden;
    }
    masked += total;
  }
}

__host__ __device__ size_t words_bytes(int units) { return static_cast<size_t>((units + 3) / 4) * sizeof(PhiloxCounter); }

// Words first, then states, in whole 16 bytes.
__host__ __device__ size_t sample_bytes(int units) {
  return words_bytes(units) + (static_cast<size_t>(units) + 15) / 16 * 16;
}

template <bool kInShared>
__global__ void __launch_bounds__(kMaxThreads)
    disjoint_masks_kernel(const int64_t* __restrict__ sample_ids, KeySource source, int64_t batch,
                          const __grid_constant__ Launch launch, unsigned char* scratch, Outputs out) {
  extern __shared__ uint4 shared_memory[];
  __shared__ int slots[2][kWarp];
  __shared__ PhiloxCounter attempts[kMaxAttempts];
  __shared__ int left[2];

  const MaskShape& shape = launch.shape;
  const int units = shape.units();
  unsigned char* memory = reinterpret_cast<unsigned char*>(shared_memory);
  if (!kInShared) memory = scratch + blockIdx.x * sample_bytes(units);
  PhiloxCounter* word_blocks = reinterpret_cast<PhiloxCounter*>(memory);
  const uint32_t* words = reinterpret_cast<const uint32_t*>(memory);
  uint8_t* states = memory + words_bytes(units);

  const PhiloxKey key = source.read();
  const bool complementary = shape.regulation == Regulation::complementary;
  const bool disjoint = shape.regulation == Regulation::disjoint;
  BlockSums sums(slots);

  for (int64_t row = blockIdx.x; row < batch; row += gridDim.x) {
    const int64_t sample = sample_ids[row];
    for (int unit = threadIdx.x; unit < units; unit += blockDim.x) states[unit] = 0;
    int covered = 0;
    for (int view = 0; view < shape.views; ++view) {
      if (!complementary || view == 0) {
        for (int block = threadIdx.x; block < (units + 3) / 4; block += blockDim.x) {
          word_blocks[block] = philox4x32(keyed_counter(block, Domain::mask, view, sample), key);
        }
      }
      const int fresh = disjoint ? launch.fresh[view] : shape.hidden;
      int quota[2] = {fresh, shape.hidden - fresh};
      int free[2] = {units - covered, covered};
      if (launch.aspect_count > 0) {
        for (int attempt = threadIdx.x; attempt < kMaxAttempts; attempt += blockDim.x) {
          attempts[attempt] = philox4x32(keyed_counter(attempt, Domain::rectangle, view, sample), key);
        }
        __syncthreads();
        if (threadIdx.x < kWarp) {
          const RectangleLaw law = {shape.unit_rows(), shape.unit_columns(), shape.smallest, launch.aspect_count,
                                    launch.aspects};
          draw_rectangles(attempts, law, states, quota);
          if (threadIdx.x < 2) left[threadIdx.x] = threadIdx.x == 0 ? quota[0] : quota[1];
        }
        __syncthreads();
        free[0] -= fresh - left[0];
        free[1] -= shape.hidden - fresh - left[1];
        quota[0] = left[0];
        quota[1] = left[1];
      } else {
        __syncthreads();
      }

      if (complementary) {
        choose(words, states, units, 0, free[0], units - shape.hidden, sums);
      } else {
        choose(words, states, units, 0, free[0], quota[0], sums);
        choose(words, states, units, kCovered, free[1], quota[1], sums);
      }
      __syncthreads();
      write_view(shape, states, !complementary, view * batch + row, sums, out);
      __syncthreads();  // everyone has read states and words before they change
      for (int unit = threadIdx.x; unit < units; unit += blockDim.x) {
        states[unit] = states[unit] != 0 && shape.regulation != Regulation::none ? kCovered : 0;
      }
      covered += complementary ? units - shape.hidden : disjoint ? fresh : 0;
    }
  }
}

MaskTensors disjoint_masks_cuda(const Tensor& sample_ids, const Tensor& key, const std::vector<int64_t>& grid,
                                const std::vector<int64_t>& block, int64_t hidden, const std::vector<int64_t>& fresh,
                                const std::string& regulation, int64_t smallest, const std::vector<int64_t>& aspects) {
  // A CUDA key sends the call here whatever sample_ids' device is.
  STD_TORCH_CHECK(sample_ids.is_cuda() && (key.is_cpu() || key.get_device_index() == sample_ids.get_device_index()),
                  "disjoint_masks: key must be on the CPU or on sample_ids' device");
  const MaskPlan plan = make_mask_plan(grid, block, hidden, fresh, regulation, smallest, aspects);
  STD_TORCH_CHECK(plan.views <= kMaxViews && plan.aspects.size() <= kMaxAspects,
                  "disjoint_masks: the CUDA kernel takes at most ", kMaxViews, " views and ", kMaxAspects, " aspects");
  const int32_t device = sample_ids.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Tensor ids = torch::stable::contiguous(sample_ids);
  const Tensor keys = torch::stable::contiguous(key);
  const MaskTensors outputs = empty_masks(ids, plan);
  const auto& [visible, masked, restore, mask] = outputs;
  const int64_t batch = ids.numel();
  if (batch == 0) return outputs;

  Launch launch = {plan, static_cast<int>(plan.aspects.size()), {}, {}};
  std::copy(plan.fresh.begin(), plan.fresh.end(), launch.fresh);
  std::copy(plan.aspects.begin(), plan.aspects.end(), launch.aspects);
  const Outputs out = {visible.mutable_data_ptr<int64_t>(), masked.mutable_data_ptr<int64_t>(),
                       restore.mutable_data_ptr<int64_t>(), mask.mutable_data_ptr<bool>()};
  // One thread a token while a block can hold them.
  const int threads = std::min((plan.tokens() + kWarp - 1) / kWarp * kWarp, kMaxThreads);
  const size_t bytes = sample_bytes(plan.units());
  const cudaStream_t stream = current_stream(device);
  if (bytes <= kMaxShared) {
    const unsigned int blocks = static_cast<unsigned int>(std::min<int64_t>(batch, INT32_MAX));
    disjoint_masks_kernel<true><<<blocks, threads, bytes, stream>>>(ids.const_data_ptr<int64_t>(), KeySource::of(keys),
                                                                    batch, launch, nullptr, out);
  } else {
    const unsigned int blocks = static_cast<unsigned int>(std::min<int64_t>(batch, kScratchBlocks));
    const Tensor scratch = torch::stable::new_empty(ids, {static_cast<int64_t>(blocks * bytes)},
                                                    torch::headeronly::ScalarType::Byte);
    disjoint_masks_kernel<false><<<blocks, threads, 0, stream>>>(
        ids.const_data_ptr<int64_t>(), KeySource::of(keys), batch, launch, scratch.mutable_data_ptr<uint8_t>(), out);
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return outputs;
}

}  // namespace
}  // namespace dmjd

STABLE_TORCH_LIBRARY_IMPL(dmjd, CUDA, m) {
  m.impl("disjoint_masks", DMJD_BOX(&dmjd::disjoint_masks_cuda));
}
