// Must not compile: 96 values in at most 32 registers. See spills_are_errors in CMakeLists.txt.
extern "C" __global__ void __launch_bounds__(1024, 2) spill(const float* in, float* out) {
  float kept[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) kept[i] = in[threadIdx.x + 1024 * i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 96; ++i) out[threadIdx.x + 1024 * i] = kept[i] * kept[95 - i];
}
