// An importable module without Python functions: importing it runs the static registrations of its kernels.
#pragma once

#include <Python.h>

// PyMODINIT_FUNC exports the symbol even under -fvisibility=hidden. Were it hidden, the import would fail *after* the
// kernels had registered themselves.
#define DMJD_MODULE(name)                                                              \
  PyMODINIT_FUNC PyInit_##name() {                                                     \
    static PyModuleDef definition = {PyModuleDef_HEAD_INIT, #name, nullptr, -1, nullptr, \
                                     nullptr, nullptr, nullptr, nullptr};              \
    return PyModule_Create(&definition);                                               \
  }
