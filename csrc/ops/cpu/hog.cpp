#include "../../core/hog_rows.h"

#include <string>
#include <type_traits>

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "../common.h"
#include "parallel_for.h"

namespace dmjd {
namespace {

using torch::headeronly::ScalarType;

template <typename Pixel, typename Value>
void run(const Tensor& images, const HogPlan& plan, bool channels_last, Tensor& result) {
  using Real = std::conditional_t<std::is_same_v<Pixel, double>, double, float>;
  const HogImages<Pixel> source = {images.const_data_ptr<Pixel>(), images.stride(0),
                                   images.stride(channels_last ? 1 : 2), images.stride(channels_last ? 2 : 3),
                                   images.stride(channels_last ? 3 : 1)};
  Value* out = result.mutable_data_ptr<Value>();
  const int64_t rows = plan.patch_rows();
  // A row of patches takes tens of microseconds, so one is work enough for a thread.
  parallel_for(0, images.size(0) * rows, 1, [&](int64_t begin, int64_t end) {
    HogRows<Pixel, Real> hog(plan, source);
    for (int64_t i = begin; i < end; ++i) {
      hog.run(i / rows, i % rows, out + i * plan.patch_columns() * plan.patch_values());
    }
  });
}

template <typename Pixel>
void run(const Tensor& images, const HogPlan& plan, bool channels_last, Tensor& result) {
  switch (result.scalar_type()) {
    case ScalarType::Float: return run<Pixel, float>(images, plan, channels_last, result);
    case ScalarType::Double: return run<Pixel, double>(images, plan, channels_last, result);
    case ScalarType::Half: return run<Pixel, torch::headeronly::Half>(images, plan, channels_last, result);
    case ScalarType::BFloat16: return run<Pixel, torch::headeronly::BFloat16>(images, plan, channels_last, result);
    default: STD_TORCH_CHECK(false, "hog: out_dtype must be float64, float32, float16 or bfloat16");
  }
}

Tensor hog_cpu(const Tensor& images, int64_t cell, int64_t bins, int64_t patch, std::string flavour, std::string norm,
               std::string layout, ScalarType out_dtype) {
  const bool channels_last = layout == "nhwc";
  const HogPlan plan(images.size(channels_last ? 1 : 2), images.size(channels_last ? 2 : 3),
                     images.size(channels_last ? 3 : 1), static_cast<int>(cell), static_cast<int>(bins),
                     static_cast<int>(patch), flavour, norm);
  Tensor result = torch::stable::new_empty(
      images, {images.size(0), plan.patch_rows() * plan.patch_columns(), plan.patch_values()}, out_dtype);
  switch (images.scalar_type()) {
    case ScalarType::Byte: run<uint8_t>(images, plan, channels_last, result); break;
    case ScalarType::Float: run<float>(images, plan, channels_last, result); break;
    case ScalarType::Double: run<double>(images, plan, channels_last, result); break;
    case ScalarType::Half: run<torch::headeronly::Half>(images, plan, channels_last, result); break;
    case ScalarType::BFloat16: run<torch::headeronly::BFloat16>(images, plan, channels_last, result); break;
    default: STD_TORCH_CHECK(false, "hog: images must be uint8, float64, float32, float16 or bfloat16");
  }
  return result;
}

}  // namespace
}  // namespace dmjd

STABLE_TORCH_LIBRARY_IMPL(dmjd, CPU, m) {
  m.impl("hog", DMJD_BOX(&dmjd::hog_cpu));
}
