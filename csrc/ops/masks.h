// What the CPU and the CUDA sampler return.
#pragma once

#include <tuple>

#include "../core/mask_plan.h"
#include "common.h"

namespace dmjd {

using MaskTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // visible, masked, restore, mask

inline MaskTensors empty_masks(const Tensor& sample_ids, const MaskPlan& plan) {
  const auto empty = [&](int64_t length, torch::headeronly::ScalarType dtype) {
    return torch::stable::new_empty(sample_ids, {plan.views, sample_ids.numel(), length}, dtype);
  };
  using torch::headeronly::ScalarType;
  return {empty(plan.visible(), ScalarType::Long), empty(plan.masked(), ScalarType::Long),
          empty(plan.tokens(), ScalarType::Long), empty(plan.tokens(), ScalarType::Bool)};
}

}  // namespace dmjd
