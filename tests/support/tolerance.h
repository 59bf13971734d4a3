// Tolerances per op and precision, each with its derivation. eps = 2^-24, the FP32 half ulp.
#pragma once

#include "tensor/dtype.h"

namespace cachalot::test {

struct Tolerance {
  double of_rms = 0;    // absolute, in units of the output's RMS
  double relative = 0;  // of the expected value
  double cosine = 1e-7;
};

// Sums of up to 20480 products in 8 chains of fused multiply-adds: 2560 roundings per chain, each
// half an ulp of a partial sum that is at most the RMS of the result times a few: sqrt(2560) * 4 *
// eps = 1.2e-5 for the worst of many outputs.
constexpr Tolerance kDotF32 = {1.2e-5, 1e-6};
// One BF16 ulp: a sum within kDotF32 of a rounding boundary may fall on its other side.
constexpr Tolerance kDotBf16 = {1.2e-5, 0x1.0p-7, 1e-5};
constexpr const Tolerance& dot_tolerance(DType dtype) {
  return dtype == DType::kBF16 ? kDotBf16 : kDotF32;
}

// A norm and an elementwise step behind it: the sum's error is shared by the row, the rest is a few
// eps.
constexpr Tolerance kRowF32 = {1e-6, 2e-6};
constexpr Tolerance kRowBf16 = {1e-6, 0x1.0p-7, 1e-5};
constexpr const Tolerance& row_tolerance(DType dtype) {
  return dtype == DType::kBF16 ? kRowBf16 : kRowF32;
}

// Two products in a row, FP32: the hidden values carry kDotF32 each, which adds in quadrature.
constexpr Tolerance kExpertsF32 = {2e-5, 1e-6};
// Official: a gate or up value on the other side of a BF16 boundary moves one hidden value by 2^-8,
// and one in 16 such moves flips its FP8 code by 2^-4. Among F >= 32 hidden values one flip moves
// an output by 2^-4 / sqrt(F) of the RMS; three of them: 3e-2. Plus one ulp of the output.
constexpr Tolerance kExpertsBf16 = {3e-2, 0x1.0p-7, 1e-4};

// Attention in FP32: dots of 512, exp to 1 ulp, up to 640 weights: errors of the scores (512^1/2
// eps relative to |s| <= 8) dominate: 2e-5 of the RMS.
constexpr Tolerance kAttendF32 = {2e-5, 2e-6, 1e-7};
// Official: a probability within FP32 error of a BF16 boundary flips by 2^-8 of itself; the output
// moves by at most 2^-8 of the flipped key's share. Rounding before and after the inverse rotation:
// 1 ulp of the pair's magnitude each.
constexpr Tolerance kAttendBf16 = {1.6e-2, 0x1.0p-7, 1e-4};

// Sinkhorn contracts, so coefficients carry the error of the logits: kDotF32 times a scale near 1.
constexpr Tolerance kCoefficients = {1e-5, 1e-5};

// A sum of V <= 2^18 exponentials of x <= 0. Each is off by 4 eps, and by 4 eps |x| for its
// argument; the mean of |x| under the softmax is at most ln V = 12.5. Up to 32 roundings of partial
// sums: eps (4 + 50 + 32) = 5.2e-6.
constexpr Tolerance kMass = {0, 5.2e-6};

// Share of quantized bytes that may differ: codes whose value lies within 2^-20 of a boundary
// (FP32) or whose BF16 input flipped by one ulp first (a 2^-8 step across codes that are 2^-4
// apart).
constexpr double kCodesF32 = 1e-3;
constexpr double kCodesBf16 = 1e-2;

}  // namespace cachalot::test
