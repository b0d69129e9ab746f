#include <pybind11/numpy.h>

#include <algorithm>
#include <initializer_list>
#include <string>

#include "../core/hog_rows.h"
#include "bindings.h"

namespace py = pybind11;

namespace dmjd {
namespace {

using Values = py::array_t<float, py::array::c_style>;

void require_name(const char* argument, const std::string& value, std::initializer_list<const char*> allowed) {
  if (std::find(allowed.begin(), allowed.end(), value) != allowed.end()) return;
  std::string names;
  for (const char* name : allowed) names += (names.empty() ? "" : ", ") + std::string(name);
  throw py::value_error(std::string("hog: ") + argument + " must be one of " + names + ", got '" + value + "'");
}

void require(bool holds, const std::string& message) {
  if (!holds) throw py::value_error("hog: " + message);
}

template <typename Pixel>
void run(const py::array& images, const HogPlan& plan, bool channels_last, Values& result) {
  const int row = channels_last ? 1 : 2, channel = channels_last ? 3 : 1;
  const auto stride = [&](int axis) { return static_cast<int64_t>(images.strides(axis)) / images.itemsize(); };
  const HogImages<Pixel> source = {static_cast<const Pixel*>(images.data()), stride(0), stride(row), stride(row + 1),
                                   stride(channel)};
  const int64_t batch = images.shape(0), row_values = plan.patch_columns() * plan.patch_values();
  float* out = result.mutable_data();
  const py::gil_scoped_release release;
  HogRows<Pixel, float> rows(plan, source);
  for (int64_t image = 0; image < batch; ++image) {
    for (int64_t r = 0; r < plan.patch_rows(); ++r, out += row_values) rows.run(image, r, out);
  }
}

Values hog(const py::array& images, int cell, int bins, int patch, const std::string& flavour, const std::string& norm,
           const std::string& layout) {
  const bool bytes = py::isinstance<py::array_t<uint8_t>>(images);
  if (!bytes && !py::isinstance<py::array_t<float>>(images)) {
    throw py::type_error("hog: images must be uint8 or float32, got " + py::str(images.dtype()).cast<std::string>());
  }
  require_name("flavour", flavour, {"dmjd", "maskfeat", "maskfeat_gauss", "skimage"});
  require_name("norm", norm, {"none", "l2", "layernorm"});
  require_name("layout", layout, {"nhwc", "nchw"});
  require(images.ndim() == 4, "images must have 4 axes, got " + std::to_string(images.ndim()));
  require(bins >= 1 && bins <= kHogMaxBins, "bins must be in 1..180, got " + std::to_string(bins));
  require(patch >= 1, "patch must be at least 1 pixel, got " + std::to_string(patch));
  require(cell >= 1 && patch % cell == 0,
          "cell must be a divisor of patch " + std::to_string(patch) + ", got " + std::to_string(cell));
  const bool channels_last = layout == "nhwc";
  const int64_t height = images.shape(channels_last ? 1 : 2), width = images.shape(channels_last ? 2 : 3);
  const int64_t channels = images.shape(channels_last ? 3 : 1);
  const std::string size = std::to_string(height) + " x " + std::to_string(width);
  require(height >= patch && width >= patch && height % patch == 0 && width % patch == 0,
          "image height and width must be multiples of patch " + std::to_string(patch) + ", got " + size);
  require(channels >= 1, "images must have at least 1 channel, got 0");

  const HogPlan plan(height, width, channels, cell, bins, patch, flavour, norm);
  require(plan.gradient == HogGradient::central || (height > 1 && width > 1),
          "flavour " + flavour + " needs 2 x 2 pixels to reflect, got " + size);
  Values result({static_cast<py::ssize_t>(images.shape(0)),
                 static_cast<py::ssize_t>(plan.patch_rows() * plan.patch_columns()),
                 static_cast<py::ssize_t>(plan.patch_values())});
  if (bytes) {
    run<uint8_t>(images, plan, channels_last, result);
  } else {
    run<float>(images, plan, channels_last, result);
  }
  return result;
}

}  // namespace

void bind_hog(py::module_& m) {
  m.def("hog", &hog, py::arg("images"), py::arg("cell") = 8, py::arg("bins") = 9, py::arg("patch") = 16,
        py::arg("flavour") = "dmjd", py::arg("norm") = "layernorm", py::arg("layout") = "nhwc",
        "Histogram of oriented gradients of every patch, as dmjd.ops.hog: images uint8 or float32 [B, H, W, C]\n"
        "(layout nhwc) or [B, C, H, W] (nchw), of any strides -> float32 [B, N, patch values].\n\n"
        "One thread; releases the GIL. Raises TypeError for another dtype, ValueError for another shape or name.");
}

}  // namespace dmjd
