#include "../../core/mask_sampler.h"
#include "../common.h"
#include "../masks.h"
#include "parallel_for.h"

namespace dmjd {
namespace {

// Below this many samples (some ten microseconds) a second thread costs more than it saves.
constexpr int64_t kGrain = 16;

MaskTensors disjoint_masks_cpu(const Tensor& sample_ids, const Tensor& key, const std::vector<int64_t>& grid,
                               const std::vector<int64_t>& block, int64_t hidden, const std::vector<int64_t>& fresh,
                               const std::string& regulation, int64_t smallest, const std::vector<int64_t>& aspects) {
  const MaskPlan plan = make_mask_plan(grid, block, hidden, fresh, regulation, smallest, aspects);
  const Tensor ids = torch::stable::contiguous(sample_ids);
  const Tensor keys = torch::stable::contiguous(key);
  const MaskTensors outputs = empty_masks(ids, plan);
  const auto& [visible, masked, restore, mask] = outputs;

  const int64_t* samples = ids.const_data_ptr<int64_t>();
  const int64_t* key_words = keys.const_data_ptr<int64_t>();
  const PhiloxKey philox_key = {{static_cast<uint32_t>(key_words[0]), static_cast<uint32_t>(key_words[1])}};
  const MaskRows rows = {visible.mutable_data_ptr<int64_t>(), masked.mutable_data_ptr<int64_t>(),
                         restore.mutable_data_ptr<int64_t>(), mask.mutable_data_ptr<bool>()};
  const int64_t batch = ids.numel();

  parallel_for(0, batch, kGrain, [&](int64_t begin, int64_t end) {
    MaskSampler sampler(plan);
    for (int64_t row = begin; row < end; ++row) {
      sampler.draw(samples[row], philox_key, batch, rows.advanced(row, plan));
    }
  });
  return outputs;
}

}  // namespace
}  // namespace dmjd

STABLE_TORCH_LIBRARY_IMPL(dmjd, CPU, m) {
  m.impl("disjoint_masks", DMJD_BOX(&dmjd::disjoint_masks_cpu));
}
