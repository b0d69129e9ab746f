// Shared by every header of csrc/core: plain C++17, no torch, usable from host and device code.
#pragma once

#ifdef __CUDACC__
#define DMJD_HD __host__ __device__
#else
#define DMJD_HD
#endif

// For a function whose loops gain from wider registers than x86-64 promises: compiled twice, chosen when the library is
// loaded. AVX2 without FMA, so that both give the same bits.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define DMJD_WIDE __attribute__((target_clones("avx2", "default")))
#else
#define DMJD_WIDE
#endif
