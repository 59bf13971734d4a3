// Element types of kernels: loads, stores and roundings.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/cuda/device/ptx.cuh"

namespace cachalot::ops::cuda {

struct Bf16 {
  uint16_t bits;
};

__device__ __forceinline__ float to_float(float x) {
  return x;
}
__device__ __forceinline__ float to_float(Bf16 x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}
template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ Bf16 from_float<Bf16>(float x) {
  return {bf16_bits(x)};
}
// `x` as it reads back after a store as T.
template <class T>
__device__ __forceinline__ float rounded(float x) {
  return to_float(from_float<T>(x));
}

__device__ __forceinline__ float low_bf16(uint32_t pair) {
  return __uint_as_float(pair << 16);
}
__device__ __forceinline__ float high_bf16(uint32_t pair) {
  return __uint_as_float(pair & 0xFFFF0000u);
}

__device__ __forceinline__ void unpack_elements(const uint4& w, float (&v)[8]) {
  v[0] = low_bf16(w.x), v[1] = high_bf16(w.x), v[2] = low_bf16(w.y), v[3] = high_bf16(w.y);
  v[4] = low_bf16(w.z), v[5] = high_bf16(w.z), v[6] = low_bf16(w.w), v[7] = high_bf16(w.w);
}

// kCount consecutive elements at p: 16-byte accesses for 8, scalar ones for 1.
template <int kCount>
__device__ __forceinline__ void load_elements(const Bf16* p, float (&v)[kCount]) {
  if constexpr (kCount == 8) {
    unpack_elements(*reinterpret_cast<const uint4*>(p), v);
  } else {
    static_assert(kCount == 1);
    v[0] = to_float(*p);
  }
}
template <int kCount>
__device__ __forceinline__ void load_elements(const float* p, float (&v)[kCount]) {
  if constexpr (kCount == 8) {
    const float4 a = *reinterpret_cast<const float4*>(p);
    const float4 b = *reinterpret_cast<const float4*>(p + 4);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  } else {
    static_assert(kCount == 1);
    v[0] = *p;
  }
}
template <int kCount>
__device__ __forceinline__ void store_elements(Bf16* p, const float (&v)[kCount]) {
  if constexpr (kCount == 8) {
    *reinterpret_cast<uint4*>(p) = make_uint4(
        bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3]), bf16_pair(v[4], v[5]), bf16_pair(v[6], v[7]));
  } else {
    *p = from_float<Bf16>(v[0]);
  }
}
template <int kCount>
__device__ __forceinline__ void store_elements(float* p, const float (&v)[kCount]) {
  if constexpr (kCount == 8) {
    *reinterpret_cast<float4*>(p) = make_float4(v[0], v[1], v[2], v[3]);
    *reinterpret_cast<float4*>(p + 4) = make_float4(v[4], v[5], v[6], v[7]);
  } else {
    *p = v[0];
  }
}

// A parameter vector that a checkpoint may store as BF16 or F32.
struct Param {
  const void* data;
  bool is_bf16;

  __device__ __forceinline__ float operator[](int64_t i) const {
    return is_bf16 ? to_float(static_cast<const Bf16*>(data)[i])
                   : static_cast<const float*>(data)[i];
  }
  // Elements i .. i + 7; i is a multiple of 8, and data 16-byte aligned.
  __device__ __forceinline__ void load(int64_t i, float (&v)[8]) const {
    if (is_bf16) {
      load_elements<8>(static_cast<const Bf16*>(data) + i, v);
    } else {
      load_elements<8>(static_cast<const float*>(data) + i, v);
    }
  }
};

}  // namespace cachalot::ops::cuda
