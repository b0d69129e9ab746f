// One function per file of this folder; core.cpp calls them all, so that together they make one module.
#pragma once

#include <pybind11/pybind11.h>

namespace dmjd {

void bind_masks(pybind11::module_& m);

}  // namespace dmjd
