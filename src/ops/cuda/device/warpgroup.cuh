// Warpgroups with roles of their own, and wgmma with both operands in shared memory (device/ptx.cuh
// has the fences and the form with A in registers).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/cuda/device/ptx.cuh"

namespace cachalot::ops::cuda {

// Registers per thread of this warpgroup from here on; all of its warps call it. Every warpgroup of
// the block does, in its branch of one if, and together they may not exceed what the launch gave.
template <int kRegisters>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// This thread's warp in the block, in a form that the compiler knows to be the same in all lanes.
__device__ __forceinline__ int uniform_warp() {
  return __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0);
}

// A barrier of `threads` threads, whole warps. Number 0 is that of __syncthreads().
__device__ __forceinline__ void group_barrier(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
// Counts this thread's warp as there, without waiting.
__device__ __forceinline__ void group_barrier_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Counts this thread at such a barrier without waiting.
__device__ __forceinline__ void group_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Brings the line of an address from memory to L2.
__device__ __forceinline__ void prefetch_to_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// What load_matrices() of device/ptx.cuh would read: lane l gives the address of row l % 8 of
// matrix l / 8, and its register i holds columns 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of matrix
// i.
__device__ __forceinline__ void store_matrices(void* row, const uint32_t (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
      "r"(r[0]),
      "r"(r[1]),
      "r"(r[2]),
      "r"(r[3])
      : "memory");
}

// B whose rows are K instead of columns: blocks of 64 columns, `block_bytes` apart, each [K][64]
// with the 16-byte pieces of row r at piece index ^ (r % 8). Aligned to 1024 bytes, plus 2048 for
// every 16 of K.
__device__ __forceinline__ uint64_t wgmma_operand_transposed(const void* b, int block_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{1024 / 16} << 32;
  return kSwizzle128 | kEightRows | static_cast<uint64_t>(block_bytes / 16) << 16 |
         (shared_address(b) & 0x3FFFF) >> 4;
}
// A or B of 16 columns of K without swizzling: eight rows of eight elements (128 bytes) by eight
// rows, the first half of K before the second one.
__device__ __forceinline__ uint64_t wgmma_operand_narrow(const void* a) {
  constexpr uint64_t kEightRows = uint64_t{256 / 16} << 32, kHalf = uint64_t{128 / 16} << 16;
  return kEightRows | kHalf | (shared_address(a) & 0x3FFFF) >> 4;
}
// What to add to an operand to move it by so many bytes.
constexpr uint64_t operand_bytes(int bytes) {
  return static_cast<uint64_t>(bytes / 16);
}

#define CACHALOT_ACC(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define CACHALOT_ACC4(n) \
  CACHALOT_ACC(n), CACHALOT_ACC(n + 1), CACHALOT_ACC(n + 2), CACHALOT_ACC(n + 3)
#define CACHALOT_ACC8(n) CACHALOT_ACC4(n), CACHALOT_ACC4(n + 4)
// d[64 x 8 tiles] += a[64 x 16] b[16 x 8 tiles], both operands as wgmma_operand() says; d = a b
// without kAdd, whatever d holds.
template <bool kAdd>
__device__ __forceinline__ void wgmma_bf16(float (&d)[8][4], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, %34, 1, 1, 0, 0;"
      : CACHALOT_ACC8(0)
      : "l"(a), "l"(b), "n"(kAdd ? 1 : 0));
}
template <bool kAdd>
__device__ __forceinline__ void wgmma_bf16(float (&d)[9][4], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n72k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
      "%34, %35}, %36, %37, %38, 1, 1, 0, 0;"
      : CACHALOT_ACC8(0), CACHALOT_ACC(8)
      : "l"(a), "l"(b), "n"(kAdd ? 1 : 0));
}

template <bool kAdd>
__device__ __forceinline__ void wgmma_bf16(float (&d)[4][4], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, %16, %17, %18, 1, 1, 0, 0;"
      : CACHALOT_ACC4(0)
      : "l"(a), "l"(b), "n"(kAdd ? 1 : 0));
}
template <bool kAdd>
__device__ __forceinline__ void wgmma_bf16(float (&d)[10][4], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39"
      "}, %40, %41, %42, 1, 1, 0, 0;"
      : CACHALOT_ACC8(0), CACHALOT_ACC(8), CACHALOT_ACC(9)
      : "l"(a), "l"(b), "n"(kAdd ? 1 : 0));
}

// The same with b as wgmma_operand_transposed() says.
__device__ __forceinline__ void wgmma_bf16_transposed(float (&d)[8][4], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, 1, 1, 1, 0, 1;"
      : CACHALOT_ACC8(0)
      : "l"(a), "l"(b));
}
__device__ __forceinline__ void wgmma_bf16_transposed(float (&d)[16][4], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "
      "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
      "%62, %63"
      "}, %64, %65, 1, 1, 1, 0, 1;"
      : CACHALOT_ACC8(0), CACHALOT_ACC8(8)
      : "l"(a), "l"(b));
}
__device__ __forceinline__ void wgmma_bf16_transposed(float (&d)[32][4], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "
      "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
      "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, "
      "%77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, "
      "%92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, "
      "%106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, "
      "%119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, %128, %129, 1, 1, 1, 0, 1;"
      : CACHALOT_ACC8(0), CACHALOT_ACC8(8), CACHALOT_ACC8(16), CACHALOT_ACC8(24)
      : "l"(a), "l"(b));
}
#undef CACHALOT_ACC8
#undef CACHALOT_ACC4
#undef CACHALOT_ACC

}  // namespace cachalot::ops::cuda
