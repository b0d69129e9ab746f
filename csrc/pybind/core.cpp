// dmjd._core: csrc/core for numpy arrays, for workers that must not touch torch. Links nothing of torch.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "../core/philox.h"
#include "bindings.h"

namespace py = pybind11;

namespace {

using Words = py::array_t<uint32_t, py::array::c_style>;

void require_words(const py::array& array, const char* name) {
  if (!py::isinstance<py::array_t<uint32_t>>(array)) {
    throw py::type_error(std::string("philox4x32: ") + name + " must be uint32, got " +
                         py::str(array.dtype()).cast<std::string>());
  }
}

Words philox4x32(const py::array& counter, const py::array& key) {
  require_words(counter, "counter");
  require_words(key, "key");
  if (counter.ndim() < 1 || counter.shape(counter.ndim() - 1) != 4) {
    throw py::value_error("philox4x32: counter must be [..., 4]");
  }
  if (key.ndim() != 1 || key.shape(0) != 2) throw py::value_error("philox4x32: key must be [2]");

  const Words counters = Words::ensure(counter);
  const Words keys = Words::ensure(key);
  Words result(std::vector<py::ssize_t>(counter.shape(), counter.shape() + counter.ndim()));
  const uint32_t* words = counters.data();
  const dmjd::PhiloxKey philox_key = {{keys.data()[0], keys.data()[1]}};
  uint32_t* out = result.mutable_data();
  const py::ssize_t blocks = result.size() / 4;
  {
    const py::gil_scoped_release release;
    for (py::ssize_t block = 0; block < blocks; ++block) {
      dmjd::PhiloxCounter state;
      for (int i = 0; i < 4; ++i) state.word[i] = words[4 * block + i];
      state = dmjd::philox4x32(state, philox_key);
      for (int i = 0; i < 4; ++i) out[4 * block + i] = state.word[i];
    }
  }
  return result;
}

#ifdef __clang__
constexpr const char* kCompiler = __VERSION__;  // names itself
#else
constexpr const char* kCompiler = "GCC " __VERSION__;
#endif

py::dict build_info() {
  py::dict info;
  info["compiler"] = kCompiler;
  info["torch_target"] = DMJD_TORCH_TARGET;
#ifdef DMJD_CUDA_VERSION
  info["cuda"] = DMJD_CUDA_VERSION;
  info["cuda_archs"] = py::str(DMJD_CUDA_ARCHS).attr("split")(",");
#else
  info["cuda"] = py::none();
  info["cuda_archs"] = py::list();
#endif
  return info;
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "The device-independent arithmetic of dmjd for numpy arrays.";
  m.def("philox4x32", &philox4x32, py::arg("counter"), py::arg("key"),
        "Ten rounds of Philox4x32: counter uint32 [..., 4] and key uint32 [2] -> uint32 of counter's shape.\n\n"
        "Releases the GIL. Raises TypeError for another dtype, ValueError for another shape.");
  dmjd::bind_hog(m);
  dmjd::bind_masks(m);
  m.def("build_info", &build_info,
        "How the native libraries were built: compiler, torch_target (oldest torch they run on), cuda (toolkit version,\n"
        "None without CUDA kernels), cuda_archs (as in TORCH_CUDA_ARCH_LIST).");
}
