// How the copy engine sees a matrix: in boxes of 64 columns, each row of which is one swizzled line of 128 bytes.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <torch/csrc/stable/macros.h>

#include "../common.h"

namespace dmjd::hopper {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Asked of the runtime, since linking libcuda would leave a library that cannot load where there is no driver.
inline Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
  STD_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
#else
  STD_CUDA_CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found));
#endif
  STD_TORCH_CHECK(found == cudaDriverEntryPointSuccess && function != nullptr,
                  "the CUDA driver has no cuTensorMapEncodeTiled: it is older than 12.0");
  return reinterpret_cast<Encode>(function);
}

// Of `data` [rows, columns], contiguous, in half precision. What lies outside reads as 0 and is not written.
inline CUtensorMap tensor_map(const void* data, bool bfloat16, int64_t rows, int64_t columns, int box_rows) {
  static const Encode encode = find_encode();
  const cuuint64_t size[2] = {cuuint64_t(columns), cuuint64_t(rows)}, stride[1] = {cuuint64_t(columns) * 2};
  const cuuint32_t box[2] = {64, cuuint32_t(box_rows)}, every[2] = {1, 1};
  CUtensorMap map;
  const CUresult result =
      encode(&map, bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, const_cast<void*>(data),
             size, stride, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  STD_TORCH_CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled failed with ", static_cast<int>(result));
  return map;
}

}  // namespace dmjd::hopper
