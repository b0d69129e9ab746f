// The tensor cores of a warpgroup of four warps: sum [64, 256] (+)= a [64, 16] @ b, operands in shared memory in rows of
// 128 bytes, swizzled as the copy engine lays them.
//
// Thread t holds row 16 * (t / 32) + (t % 32) / 4, and 8 below: sum[4 * j + {0, 1}] are columns 8 * j + 2 * (t % 4) +
// {0, 1} of the former, sum[4 * j + {2, 3}] of the latter.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace dmjd::hopper {

// Of an operand, with offsets between its blocks of eight rows in units of 16 bytes.
__device__ __forceinline__ uint64_t descriptor(uint32_t address, uint64_t leading, uint64_t stride) {
  return (uint64_t(1) << 62) | (stride << 32) | (leading << 16) | ((address & 0x3FFFF) >> 4);
}

#define DMJD_SUM8(i) \
  "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3]), "+f"(sum[i + 4]), "+f"(sum[i + 5]), "+f"(sum[i + 6]), \
      "+f"(sum[i + 7])
#define DMJD_SUM32(i) DMJD_SUM8(i), DMJD_SUM8(i + 8), DMJD_SUM8(i + 16), DMJD_SUM8(i + 24)
#define DMJD_WGMMA(TYPE, TRANSPOSED)                                                                      \
  asm volatile(                                                                                           \
      "{\n"                                                                                               \
      ".reg .pred adds;\n"                                                                                \
      "setp.ne.b32 adds, %130, 0;\n"                                                                      \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE                                        \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                          \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                  \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                  \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                  \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                  \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                  \
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "      \
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, " \
      "%128, %129, adds, 1, 1, 0, " TRANSPOSED ";\n"                                                      \
      "}\n"                                                                                               \
      : DMJD_SUM32(0), DMJD_SUM32(32), DMJD_SUM32(64), DMJD_SUM32(96)                                     \
      : "l"(a), "l"(b), "r"(int(adds)))

// The depth of a lies side by side in memory; b's too, or, where it is transposed, its columns do.
template <class T, bool kTransposed>
__device__ __forceinline__ void multiply(float (&sum)[128], uint64_t a, uint64_t b, bool adds) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    if constexpr (kTransposed) DMJD_WGMMA("bf16", "1");
    else DMJD_WGMMA("bf16", "0");
  } else {
    if constexpr (kTransposed) DMJD_WGMMA("f16", "1");
    else DMJD_WGMMA("f16", "0");
  }
}
#undef DMJD_WGMMA
#undef DMJD_SUM32
#undef DMJD_SUM8

// The registers of a sum, as they are now, may be read by the products that follow.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes a group of products.
__device__ __forceinline__ void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until all but kPending groups are done.
template <int kPending>
__device__ __forceinline__ void products_done() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void warpgroup_sync(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

// Two values of T in a register.
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t both;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

template <class T>
__device__ __forceinline__ float2 unpack(uint32_t both) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(both));
  else return __half22float2(reinterpret_cast<const __half2&>(both));
}

}  // namespace dmjd::hopper
