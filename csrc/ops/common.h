// What every op kernel includes: LibTorch's stable ABI and nothing else of torch.
//
// TORCH_TARGET_VERSION (set by the build) makes any other torch header an #error, so a binary stays good for every torch
// from 2.11 on. Schemas, fakes and gradients live in Python (dmjd/ops); a file here only registers a CPU or CUDA kernel.
// Arguments have been checked by the Python front end, which can raise ValueError and TypeError; a kernel checks only
// what it alone can know.
#pragma once

#include <cstdint>
#include <cstdio>
#include <exception>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

namespace dmjd {

using torch::stable::Tensor;

using BoxedKernel = void (*)(StableIValue*, uint64_t, uint64_t);

// False if the kernel threw, with the text of what it threw. Not inlined, so that the frame of `guarded`, which torch's
// exception passes through, has no handlers.
template <BoxedKernel kernel>
__attribute__((noinline)) bool succeeds(StableIValue* stack, uint64_t inputs, uint64_t outputs, char* text,
                                        size_t size) noexcept {
  try {
    kernel(stack, inputs, outputs);
    return true;
  } catch (const std::exception& error) {
    std::snprintf(text, size, "%s", error.what());
  } catch (...) {
    std::snprintf(text, size, "an exception of unknown type");
  }
  return false;
}

// A kernel whose exceptions do not leave this library: torch throws in their place. An exception is unwound by the C++
// runtime that threw it, and where libgcc is linked statically ours cannot unwind torch's frames: the process aborts.
template <BoxedKernel kernel>
void guarded(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
  char text[2048];
  if (!succeeds<kernel>(stack, inputs, outputs, text, sizeof(text))) {
    aoti_torch_check(false, __func__, __FILE__, __LINE__, text);
  }
}

}  // namespace dmjd

// For STABLE_TORCH_LIBRARY_IMPL, in place of TORCH_BOX.
#define DMJD_BOX(function) dmjd::guarded<TORCH_BOX(function)>
