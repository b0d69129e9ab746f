// From a tensor's dtype to a C++ type, for the ops that do arithmetic.
#pragma once

#include "common.h"

#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

namespace dmjd {

// What values of T are added up in.
template <typename T>
struct SumOf {
  using type = float;
};
template <>
struct SumOf<double> {
  using type = double;
};
template <typename T>
using Sum = typename SumOf<T>::type;

// Calls action with a value of the C++ type that `dtype` names.
template <typename Action>
void for_floating_type(torch::headeronly::ScalarType dtype, const char* op, const Action& action) {
  using torch::headeronly::ScalarType;
  switch (dtype) {
    case ScalarType::Float:
      return action(float{});
    case ScalarType::Double:
      return action(double{});
    case ScalarType::BFloat16:
      return action(torch::headeronly::BFloat16{});
    case ScalarType::Half:
      return action(torch::headeronly::Half{});
    default:
      STD_TORCH_CHECK(false, op, ": dtype must be float32, float64, bfloat16 or float16, got ",
                      torch::headeronly::toString(dtype));
  }
}

}  // namespace dmjd
