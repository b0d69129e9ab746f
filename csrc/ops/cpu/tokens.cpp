// gather_tokens and scatter_tokens: rows of C elements move as they are; sums over views and rows are taken in fp32
// (fp64) and rounded once. No result depends on the number of threads. A wrong id gives wrong values and never leaves a
// tensor.
#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "../common.h"
#include "../dtypes.h"
#include "parallel_for.h"

namespace dmjd {
namespace {

// A thread's share is at least this many elements: below, starting it costs more than it saves.
constexpr int64_t kGrain = 16384;

// The scatter gradient adds up the rows of this many groups of images apart, whatever the number of threads.
constexpr int64_t kGroups = 32;

int64_t rows_per_task(int64_t elements_per_row) {
  return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, elements_per_row));
}

bool in_range(int64_t id, int64_t size) { return id >= 0 && id < size; }

Tensor gather_tokens_cpu(const Tensor& x, const Tensor& ids, int64_t prefix) {
  const Tensor tokens = torch::stable::contiguous(x);
  const Tensor indices = torch::stable::contiguous(ids);
  const int64_t views = ids.size(0), batch = ids.size(1), visible = ids.size(2), channels = x.size(2);
  Tensor result = torch::stable::new_empty(tokens, {views * batch, prefix + visible, channels});

  const int64_t row_bytes = channels * static_cast<int64_t>(x.element_size());
  const int64_t in_rows = x.size(1), out_rows = prefix + visible;
  const auto* source = static_cast<const char*>(tokens.const_data_ptr());
  const int64_t* index = indices.const_data_ptr<int64_t>();
  auto* out = static_cast<char*>(result.mutable_data_ptr());

  parallel_for(0, views * batch, rows_per_task(out_rows * channels), [=](int64_t begin, int64_t end) {
    for (int64_t view_row = begin; view_row < end; ++view_row) {
      const char* from = source + (view_row % batch) * in_rows * row_bytes;
      char* to = out + view_row * out_rows * row_bytes;
      std::memcpy(to, from, prefix * row_bytes);
      for (int64_t slot = 0; slot < visible; ++slot) {
        const int64_t id = index[view_row * visible + slot];
        char* row = to + (prefix + slot) * row_bytes;
        if (in_range(id, in_rows - prefix)) {
          std::memcpy(row, from + (prefix + id) * row_bytes, row_bytes);
        } else {
          std::memset(row, 0, row_bytes);
        }
      }
    }
  });
  return result;
}

template <typename T>
void gather_backward(const T* grad, const int64_t* ids, T* out, int64_t views, int64_t batch, int64_t visible,
                     int64_t tokens, int64_t prefix, int64_t channels) {
  const int64_t in_rows = prefix + visible, out_rows = prefix + tokens;
  parallel_for(0, batch, rows_per_task(out_rows * channels), [=](int64_t begin, int64_t end) {
    std::vector<const T*> sources(views * out_rows);  // [out_rows][views]: the rows that add up to an output row
    std::vector<Sum<T>> sum(channels);
    for (int64_t sample = begin; sample < end; ++sample) {
      std::fill(sources.begin(), sources.end(), nullptr);
      for (int64_t view = 0; view < views; ++view) {
        const int64_t view_row = view * batch + sample;
        const T* from = grad + view_row * in_rows * channels;
        for (int64_t row = 0; row < prefix; ++row) sources[row * views + view] = from + row * channels;
        for (int64_t slot = 0; slot < visible; ++slot) {
          const int64_t id = ids[view_row * visible + slot];
          if (in_range(id, tokens)) sources[(prefix + id) * views + view] = from + (prefix + slot) * channels;
        }
      }
      for (int64_t row = 0; row < out_rows; ++row) {
        T* to = out + (sample * out_rows + row) * channels;
        const T* const* first = sources.data() + row * views;
        const int64_t count = views - std::count(first, first + views, nullptr);
        if (count < 2) {  // most rows: nothing to add
          const T* const* only = std::find_if(first, first + views, [](const T* from) { return from != nullptr; });
          if (count == 0) {
            std::memset(static_cast<void*>(to), 0, channels * sizeof(T));
          } else {
            std::memcpy(static_cast<void*>(to), *only, channels * sizeof(T));
          }
          continue;
        }
        std::fill(sum.begin(), sum.end(), Sum<T>(0));
        for (int64_t view = 0; view < views; ++view) {
          if (first[view] == nullptr) continue;
          for (int64_t c = 0; c < channels; ++c) sum[c] += static_cast<Sum<T>>(first[view][c]);
        }
        for (int64_t c = 0; c < channels; ++c) to[c] = static_cast<T>(sum[c]);
      }
    }
  });
}

Tensor gather_tokens_backward_cpu(const Tensor& grad, const Tensor& ids, int64_t tokens, int64_t prefix) {
  const Tensor grads = torch::stable::contiguous(grad);
  const Tensor indices = torch::stable::contiguous(ids);
  const int64_t views = ids.size(0), batch = ids.size(1), visible = ids.size(2), channels = grad.size(2);
  Tensor result = torch::stable::new_empty(grads, {batch, prefix + tokens, channels});
  for_floating_type(grad.scalar_type(), "gather_tokens_backward", [&](auto zero) {
    using T = decltype(zero);
    gather_backward(static_cast<const T*>(grads.const_data_ptr()), indices.const_data_ptr<int64_t>(),
                    static_cast<T*>(result.mutable_data_ptr()), views, batch, visible, tokens, prefix, channels);
  });
  return result;
}

template <typename T>
void scatter(const T* x, const T* mask_token, const int64_t* restore, const T* positions, T* out, int64_t view_rows,
             int64_t visible, int64_t tokens, int64_t prefix, int64_t channels) {
  const int64_t in_rows = prefix + visible, out_rows = prefix + tokens;
  parallel_for(0, view_rows, rows_per_task(out_rows * channels), [=](int64_t begin, int64_t end) {
    for (int64_t view_row = begin; view_row < end; ++view_row) {
      const T* from = x + view_row * in_rows * channels;
      T* to = out + view_row * out_rows * channels;
      std::memcpy(static_cast<void*>(to), from, prefix * channels * sizeof(T));
      for (int64_t token = 0; token < tokens; ++token) {
        const int64_t slot = restore[view_row * tokens + token];
        const T* source = in_range(slot, visible) ? from + (prefix + slot) * channels : mask_token;
        T* row = to + (prefix + token) * channels;
        if (positions == nullptr) {
          std::memcpy(static_cast<void*>(row), source, channels * sizeof(T));
        } else {
          const T* position = positions + token * channels;
          for (int64_t c = 0; c < channels; ++c) {
            row[c] = static_cast<T>(static_cast<Sum<T>>(source[c]) + static_cast<Sum<T>>(position[c]));
          }
        }
      }
    }
  });
}

Tensor scatter_tokens_cpu(const Tensor& x, const Tensor& mask_token, const Tensor& restore,
                          const std::optional<Tensor>& positions, int64_t prefix) {
  const Tensor tokens = torch::stable::contiguous(x);
  const Tensor mask = torch::stable::contiguous(mask_token);
  const Tensor slots = torch::stable::contiguous(restore);
  std::optional<Tensor> added;
  if (positions.has_value()) added = torch::stable::contiguous(*positions);
  const int64_t view_rows = x.size(0), channels = x.size(2), count = restore.size(2);
  Tensor result = torch::stable::new_empty(tokens, {view_rows, prefix + count, channels});
  for_floating_type(x.scalar_type(), "scatter_tokens", [&](auto zero) {
    using T = decltype(zero);
    scatter(static_cast<const T*>(tokens.const_data_ptr()), static_cast<const T*>(mask.const_data_ptr()),
            slots.const_data_ptr<int64_t>(),
            added.has_value() ? static_cast<const T*>(added->const_data_ptr()) : nullptr,
            static_cast<T*>(result.mutable_data_ptr()), view_rows, x.size(1) - prefix, count, prefix, channels);
  });
  return result;
}

// sums[group][width], added up over groups in order and rounded once.
template <typename T>
void add_groups(const std::vector<Sum<T>>& sums, int64_t groups, int64_t width, T* out) {
  const Sum<T>* parts = sums.data();
  parallel_for(0, width, kGrain, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      Sum<T> total = 0;
      for (int64_t group = 0; group < groups; ++group) total += parts[group * width + i];
      out[i] = static_cast<T>(total);
    }
  });
}

template <typename T>
void scatter_backward(const T* grad, const int64_t* restore, T* x, T* mask_token, T* positions, int64_t view_rows,
                      int64_t visible, int64_t tokens, int64_t prefix, int64_t channels) {
  const int64_t out_rows = prefix + visible, in_rows = prefix + tokens;
  const int64_t groups = std::min(view_rows, kGroups);
  std::vector<Sum<T>> mask_sums(groups * channels);
  std::vector<Sum<T>> position_sums(positions == nullptr ? 0 : groups * tokens * channels);
  Sum<T>* all_mask_sums = mask_sums.data();
  Sum<T>* all_position_sums = position_sums.data();
  parallel_for(0, groups, 1, [=](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      Sum<T>* mask_sum = all_mask_sums + group * channels;
      for (int64_t view_row = group * view_rows / groups; view_row < (group + 1) * view_rows / groups; ++view_row) {
        const T* from = grad + view_row * in_rows * channels;
        T* to = x + view_row * out_rows * channels;
        std::memcpy(static_cast<void*>(to), from, prefix * channels * sizeof(T));
        for (int64_t token = 0; token < tokens; ++token) {
          const int64_t slot = restore[view_row * tokens + token];
          const T* row = from + (prefix + token) * channels;
          if (in_range(slot, visible)) {
            std::memcpy(static_cast<void*>(to + (prefix + slot) * channels), row, channels * sizeof(T));
          } else {
            for (int64_t c = 0; c < channels; ++c) mask_sum[c] += static_cast<Sum<T>>(row[c]);
          }
          if (positions != nullptr) {
            Sum<T>* position_sum = all_position_sums + (group * tokens + token) * channels;
            for (int64_t c = 0; c < channels; ++c) position_sum[c] += static_cast<Sum<T>>(row[c]);
          }
        }
      }
    }
  });
  add_groups<T>(mask_sums, groups, channels, mask_token);
  if (positions != nullptr) add_groups<T>(position_sums, groups, tokens * channels, positions);
}

std::tuple<Tensor, Tensor, Tensor> scatter_tokens_backward_cpu(const Tensor& grad, const Tensor& restore,
                                                               int64_t visible, int64_t prefix, bool positions) {
  const Tensor grads = torch::stable::contiguous(grad);
  const Tensor slots = torch::stable::contiguous(restore);
  const int64_t view_rows = grad.size(0), channels = grad.size(2), tokens = restore.size(2);
  Tensor x = torch::stable::new_empty(grads, {view_rows, prefix + visible, channels});
  Tensor mask_token = torch::stable::new_empty(grads, {channels});
  Tensor position =
      positions ? torch::stable::new_empty(grads, {tokens, channels}) : torch::stable::new_empty(grads, {0});
  for_floating_type(grad.scalar_type(), "scatter_tokens_backward", [&](auto zero) {
    using T = decltype(zero);
    scatter_backward(static_cast<const T*>(grads.const_data_ptr()), slots.const_data_ptr<int64_t>(),
                     static_cast<T*>(x.mutable_data_ptr()), static_cast<T*>(mask_token.mutable_data_ptr()),
                     positions ? static_cast<T*>(position.mutable_data_ptr()) : nullptr, view_rows, visible, tokens,
                     prefix, channels);
  });
  return {x, mask_token, position};
}

}  // namespace
}  // namespace dmjd

STABLE_TORCH_LIBRARY_IMPL(dmjd, CPU, m) {
  m.impl("gather_tokens", DMJD_BOX(&dmjd::gather_tokens_cpu));
  m.impl("gather_tokens_backward", DMJD_BOX(&dmjd::gather_tokens_backward_cpu));
  m.impl("scatter_tokens", DMJD_BOX(&dmjd::scatter_tokens_cpu));
  m.impl("scatter_tokens_backward", DMJD_BOX(&dmjd::scatter_tokens_backward_cpu));
}
