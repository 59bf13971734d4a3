// The instruction sets that Highway compiles the SIMD sources for. Included before any Highway
// header.
//
// x86: SSE4 as the baseline (no FMA: its results differ in the last bits), AVX2 and AVX-512. Arm:
// NEON. Vectors are capped at 8 floats (simd_inl.h), so AVX2 and AVX-512 machines compute the same
// bits; the variable-length sets stay off because kernels keep vectors in arrays.
#pragma once

#define HWY_WANT_SSE4 1
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
