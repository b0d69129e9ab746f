// Philox for the host, many consecutive blocks at once.
#pragma once

#include "philox.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define DMJD_X86_AVX2
#include <immintrin.h>
#endif

namespace dmjd {

// philox_row() writes whole steps: its output needs room for `blocks` rounded up to a multiple of this.
constexpr int kPhiloxStep = 8;

#ifdef DMJD_X86_AVX2
// Compilers do not find this: every word has a 64-bit lane whose upper half is left dirty, because the 32 x 32 -> 64 bit
// multiplication reads only the lower one. Two groups of four blocks hide its latency.
__attribute__((target("avx2"))) inline void philox_row_avx2(PhiloxCounter counter, PhiloxKey key, int blocks,
                                                            uint32_t* words) {
  constexpr int kGroups = kPhiloxStep / 4;
  const __m256i multiplier0 = _mm256_set1_epi64x(0xD2511F53u), multiplier1 = _mm256_set1_epi64x(0xCD9E8D57u);
  const __m256i low_half = _mm256_set1_epi64x(0xFFFFFFFFu);
  for (int block = 0; block < blocks; block += kPhiloxStep) {
    __m256i c0[kGroups], c1[kGroups], c2[kGroups], c3[kGroups];
    for (int g = 0; g < kGroups; ++g) {
      c0[g] = _mm256_add_epi64(_mm256_setr_epi64x(0, 1, 2, 3), _mm256_set1_epi64x(block + 4 * g));
      c1[g] = _mm256_set1_epi64x(counter.word[1]);
      c2[g] = _mm256_set1_epi64x(counter.word[2]);
      c3[g] = _mm256_set1_epi64x(counter.word[3]);
    }
    PhiloxKey round_key = key;
    for (int round = 0; round < 10; ++round) {
      const __m256i key0 = _mm256_set1_epi64x(round_key.word[0]), key1 = _mm256_set1_epi64x(round_key.word[1]);
      for (int g = 0; g < kGroups; ++g) {
        const __m256i product0 = _mm256_mul_epu32(c0[g], multiplier0), product1 = _mm256_mul_epu32(c2[g], multiplier1);
        c0[g] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(product1, 32), c1[g]), key0);
        c1[g] = product1;
        c2[g] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(product0, 32), c3[g]), key1);
        c3[g] = product0;
      }
      round_key.word[0] += 0x9E3779B9u;
      round_key.word[1] += 0xBB67AE85u;
    }
    for (int g = 0; g < kGroups; ++g) {
      const __m256i first = _mm256_or_si256(_mm256_and_si256(c0[g], low_half), _mm256_slli_epi64(c1[g], 32));
      const __m256i second = _mm256_or_si256(_mm256_and_si256(c2[g], low_half), _mm256_slli_epi64(c3[g], 32));
      const __m256i even = _mm256_unpacklo_epi64(first, second), odd = _mm256_unpackhi_epi64(first, second);
      __m256i* out = reinterpret_cast<__m256i*>(words + 4 * (block + 4 * g));
      _mm256_storeu_si256(out, _mm256_permute2x128_si256(even, odd, 0x20));
      _mm256_storeu_si256(out + 1, _mm256_permute2x128_si256(even, odd, 0x31));
    }
  }
}
#endif

// words[4 b + i] = word i of block b, for b < blocks; counter.word[0] is ignored.
inline void philox_row(PhiloxCounter counter, PhiloxKey key, int blocks, uint32_t* words) {
#ifdef DMJD_X86_AVX2
  if (__builtin_cpu_supports("avx2")) return philox_row_avx2(counter, key, blocks, words);
#endif
  for (int block = 0; block < blocks; ++block) {
    counter.word[0] = static_cast<uint32_t>(block);
    const PhiloxCounter drawn = philox4x32(counter, key);
    for (int i = 0; i < 4; ++i) words[4 * block + i] = drawn.word[i];
  }
}

}  // namespace dmjd
