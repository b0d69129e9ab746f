#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "../core/mask_sampler.h"
#include "bindings.h"

namespace py = pybind11;

namespace {

using Ids = py::array_t<int64_t, py::array::c_style>;

uint32_t key_word(int64_t value, const char* name) {
  if (value < 0 || value > UINT32_MAX) {
    throw py::value_error(std::string("disjoint_masks: ") + name + " must be in [0, 2**32), got " +
                          std::to_string(value));
  }
  return static_cast<uint32_t>(value);
}

py::tuple disjoint_masks(const py::array& sample_ids, int64_t seed, int64_t epoch, const std::vector<int64_t>& grid,
                         const std::vector<int64_t>& block, int64_t hidden, const std::vector<int64_t>& fresh,
                         const std::string& regulation, int64_t smallest, const std::vector<int64_t>& aspects) {
  if (!py::isinstance<py::array_t<int64_t>>(sample_ids)) {
    throw py::type_error("disjoint_masks: sample_ids must be int64, got " +
                         py::str(sample_ids.dtype()).cast<std::string>());
  }
  if (sample_ids.ndim() != 1) {
    throw py::value_error("disjoint_masks: sample_ids must be one-dimensional [B], got " +
                          std::to_string(sample_ids.ndim()) + " dimensions");
  }
  const dmjd::PhiloxKey key = {{key_word(seed, "seed"), key_word(epoch, "epoch")}};
  const dmjd::MaskPlan plan = dmjd::make_mask_plan(grid, block, hidden, fresh, regulation, smallest, aspects);

  const Ids ids = Ids::ensure(sample_ids);
  const py::ssize_t views = plan.views, batch = ids.size();
  py::array_t<int64_t> visible({views, batch, py::ssize_t{plan.visible()}});
  py::array_t<int64_t> masked({views, batch, py::ssize_t{plan.masked()}});
  py::array_t<int64_t> restore({views, batch, py::ssize_t{plan.tokens()}});
  py::array_t<bool> mask({views, batch, py::ssize_t{plan.tokens()}});
  const int64_t* samples = ids.data();
  const dmjd::MaskRows rows = {visible.mutable_data(), masked.mutable_data(), restore.mutable_data(),
                               mask.mutable_data()};
  {
    const py::gil_scoped_release release;
    dmjd::MaskSampler sampler(plan);
    for (py::ssize_t row = 0; row < batch; ++row) {
      sampler.draw(samples[row], key, batch, rows.advanced(row, plan));
    }
  }
  return py::make_tuple(visible, masked, restore, mask);
}

}  // namespace

void dmjd::bind_masks(py::module_& m) {
  m.def("disjoint_masks", &disjoint_masks, py::arg("sample_ids"), py::arg("seed"), py::arg("epoch"), py::arg("grid"),
        py::arg("block"), py::arg("hidden"), py::arg("fresh"), py::arg("regulation"), py::arg("smallest") = 1,
        py::arg("aspects") = std::vector<int64_t>(),
        "The op dmjd::disjoint_masks for numpy arrays, bit for bit: int64 sample_ids [B] -> (visible, masked, restore,\n"
        "mask) of [K, B, ...]. What follows `epoch` is MaskPlan.op_arguments of dmjd.ops.mask_plan.\n\n"
        "Releases the GIL. Raises TypeError for another dtype, ValueError for another shape, a seed or epoch beyond 32\n"
        "bits, or counts that cannot be.");
}
