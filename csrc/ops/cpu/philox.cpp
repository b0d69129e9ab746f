#include "../../core/philox.h"
#include "../common.h"
#include "parallel_for.h"

namespace dmjd {
namespace {

// Below this many blocks (a few microseconds) a second thread costs more than it saves.
constexpr int64_t kGrain = 4096;

Tensor philox4x32_cpu(const Tensor& counter, const Tensor& key) {
  const Tensor counters = torch::stable::contiguous(counter);
  const Tensor keys = torch::stable::contiguous(key);
  Tensor result = torch::stable::new_empty(counters, counters.sizes());

  const int64_t* words = counters.const_data_ptr<int64_t>();
  const int64_t* key_words = keys.const_data_ptr<int64_t>();
  const PhiloxKey philox_key = {{static_cast<uint32_t>(key_words[0]), static_cast<uint32_t>(key_words[1])}};
  int64_t* out = result.mutable_data_ptr<int64_t>();

  parallel_for(0, counters.numel() / 4, kGrain, [=](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      PhiloxCounter state;
      for (int i = 0; i < 4; ++i) state.word[i] = static_cast<uint32_t>(words[4 * block + i]);
      state = philox4x32(state, philox_key);
      for (int i = 0; i < 4; ++i) out[4 * block + i] = state.word[i];
    }
  });
  return result;
}

}  // namespace
}  // namespace dmjd

STABLE_TORCH_LIBRARY_IMPL(dmjd, CPU, m) {
  m.impl("philox4x32", DMJD_BOX(&dmjd::philox4x32_cpu));
}
