// What every op kernel includes: LibTorch's stable ABI and nothing else of torch.
//
// TORCH_TARGET_VERSION (set by the build) makes any other torch header an #error, so a binary stays good for every torch
// from 2.11 on. Schemas, fakes and gradients live in Python (dmjd/ops); a file here only registers a CPU or CUDA kernel.
// Arguments have been checked by the Python front end, which can raise ValueError and TypeError; a kernel checks only
// what it alone can know.
#pragma once

#include <cstdint>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

namespace dmjd {

using torch::stable::Tensor;

}  // namespace dmjd
