// Shared by every header of csrc/core: plain C++17, no torch, usable from host and device code.
#pragma once

#ifdef __CUDACC__
#define DMJD_HD __host__ __device__
#else
#define DMJD_HD
#endif
