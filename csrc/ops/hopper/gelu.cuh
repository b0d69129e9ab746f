// The exact GELU and its derivative.
#pragma once

namespace dmjd::hopper {

struct Gelu {
  float value, slope;
};

// erfc by Abramowitz and Stegun's 7.1.26, whose error of 1.5e-7 is far below what half precision rounds, and which shares
// its exponential with the derivative.
__device__ __forceinline__ Gelu gelu(float h) {
  float t, exp;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(fmaf(0.3275911f * 0.70710678f, fabsf(h), 1.0f)));
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exp) : "f"(h * h * -0.72134752f));
  float series = fmaf(t, 0.5f * 1.061405429f, 0.5f * -1.453152027f);
  series = fmaf(t, series, 0.5f * 1.421413741f);
  series = fmaf(t, series, 0.5f * -0.284496736f);
  series = fmaf(t, series, 0.5f * 0.254829592f);
  const float tail = series * t * exp;
  const float below = h > 0 ? 1.0f - tail : tail;
  return {h * below, fmaf(h * exp, 0.39894228f, below)};
}

}  // namespace dmjd::hopper
