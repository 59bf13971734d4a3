// wgmma with A in registers (device/ptx.cuh) for 112, 144 and 160 tokens.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace cachalot::ops::cuda {

#define CACHALOT_ACC(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define CACHALOT_ACC4(n) \
  CACHALOT_ACC(n), CACHALOT_ACC(n + 1), CACHALOT_ACC(n + 2), CACHALOT_ACC(n + 3)
template <bool kAdd = true>
__device__ __forceinline__ void wgmma_bf16(float (&d)[14][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n112k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55"
      "}, {%56, %57, %58, %59}, %60, %61, 1, 1, 0;"
      : CACHALOT_ACC4(0), CACHALOT_ACC4(4), CACHALOT_ACC4(8), CACHALOT_ACC(12), CACHALOT_ACC(13)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdd ? 1 : 0));
}
template <bool kAdd = true>
__device__ __forceinline__ void wgmma_bf16(float (&d)[18][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n144k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71"
      "}, {%72, %73, %74, %75}, %76, %77, 1, 1, 0;"
      : CACHALOT_ACC4(0),
        CACHALOT_ACC4(4),
        CACHALOT_ACC4(8),
        CACHALOT_ACC4(12),
        CACHALOT_ACC(16),
        CACHALOT_ACC(17)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdd ? 1 : 0));
}
template <bool kAdd = true>
__device__ __forceinline__ void wgmma_bf16(float (&d)[20][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n160k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
      "}, {%80, %81, %82, %83}, %84, %85, 1, 1, 0;"
      : CACHALOT_ACC4(0), CACHALOT_ACC4(4), CACHALOT_ACC4(8), CACHALOT_ACC4(12), CACHALOT_ACC4(16)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdd ? 1 : 0));
}
#undef CACHALOT_ACC4
#undef CACHALOT_ACC

}  // namespace cachalot::ops::cuda
