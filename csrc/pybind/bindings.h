// What each file here adds to dmjd._core.
#pragma once

#include <pybind11/pybind11.h>

namespace dmjd {

void bind_hog(pybind11::module_& m);
void bind_masks(pybind11::module_& m);

}  // namespace dmjd
