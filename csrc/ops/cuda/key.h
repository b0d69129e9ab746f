// The Philox key of a launch.
#pragma once

#include "../../core/philox.h"
#include "launch.h"

namespace dmjd {

// A key from the CPU travels with the launch; one on the device is read by the kernel, so that a captured graph follows
// it and the host never waits. `words` must outlive the launch.
struct KeySource {
  const int64_t* device;
  PhiloxKey host;

  static KeySource of(const Tensor& words) {
    const int64_t* data = words.const_data_ptr<int64_t>();
    if (!words.is_cpu()) return {data, {{0, 0}}};
    return {nullptr, {{static_cast<uint32_t>(data[0]), static_cast<uint32_t>(data[1])}}};
  }

  __device__ PhiloxKey read() const {
    if (device == nullptr) return host;
    return {{static_cast<uint32_t>(device[0]), static_cast<uint32_t>(device[1])}};
  }
};

}  // namespace dmjd
