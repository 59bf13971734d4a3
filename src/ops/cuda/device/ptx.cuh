// One-instruction wrappers for what CUDA C++ does not spell (sm_90).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace cachalot::ops::cuda {

// The block's dynamic shared memory, aligned for the swizzled operands of wgmma.
__device__ __forceinline__ uint8_t* dynamic_shared() {
  extern __shared__ __align__(1024) uint8_t dynamic_shared_memory[];
  return dynamic_shared_memory;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Programmatic dependent launch. Every kernel waits before it touches anything that an earlier
// kernel wrote, and lets the next kernel start its prologue as soon as all blocks run. Only data
// that no kernel writes (weights) may be read before the wait.
__device__ __forceinline__ void wait_for_previous_kernels() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void allow_next_kernel() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// d[16 x 8] += a[16 x 16] b[16 x 8], BF16 operands, FP32 accumulators. With g = lane / 4 and
// t = lane % 4: a0, a1 hold rows g and g + 8 of columns 2t, 2t + 1; a2, a3 those of columns 2t + 8,
// 2t + 9; b0, b1 hold column g of rows 2t, 2t + 1 and 2t + 8, 2t + 9; d0, d1 are row g, columns 2t,
// 2t + 1; d2, d3 row g + 8.
__device__ __forceinline__ void mma_bf16(
    float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Warpgroup matrix products. The four warps of an aligned group of 128 threads multiply 64 rows by
// 8 kTiles columns: a warp's rows and d[n] of column tile n are laid out as in mma_bf16, whose sums
// they equal to the last bit, and so are the registers of A. B lies in shared memory as rows of 64
// elements (128 bytes), K inside a row, with the 16-byte pieces of row r at piece index ^ (r % 8);
// its address is a multiple of 1024 bytes plus 32 bytes for every 16 of K.
//
// They run asynchronously: wgmma_fence() after writing registers that they use, then any number of
// them, wgmma_commit(), and wgmma_wait<n>() until at most n commits are under way. Other writers of
// B call async_proxy_fence() before the barrier that tells of it.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// The same, and the compiler moves no write of `a` behind it.
template <int kCount>
__device__ __forceinline__ void wgmma_fence(uint32_t (&a)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
  }
  wgmma_fence();
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kLeft>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
__device__ __forceinline__ void async_proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ uint64_t wgmma_operand(const void* b) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{1024 / 16} << 32;
  return kSwizzle128 | kEightRows | uint64_t{1} << 16 | (shared_address(b) & 0x3FFFF) >> 4;
}
// With kAdd false the product replaces d: a sum that starts at zero.
#define CACHALOT_ACC(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define CACHALOT_ACC4(n) \
  CACHALOT_ACC(n), CACHALOT_ACC(n + 1), CACHALOT_ACC(n + 2), CACHALOT_ACC(n + 3)
template <bool kAdd = true>
__device__ __forceinline__ void wgmma_bf16(float (&d)[2][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7"
      "}, {%8, %9, %10, %11}, %12, %13, 1, 1, 0;"
      : CACHALOT_ACC(0), CACHALOT_ACC(1)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdd ? 1 : 0));
}
template <bool kAdd = true>
__device__ __forceinline__ void wgmma_bf16(float (&d)[4][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, {%16, %17, %18, %19}, %20, %21, 1, 1, 0;"
      : CACHALOT_ACC4(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdd ? 1 : 0));
}
template <bool kAdd = true>
__device__ __forceinline__ void wgmma_bf16(float (&d)[6][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
      "%20, %21, %22, %23"
      "}, {%24, %25, %26, %27}, %28, %29, 1, 1, 0;"
      : CACHALOT_ACC4(0), CACHALOT_ACC(4), CACHALOT_ACC(5)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdd ? 1 : 0));
}
template <bool kAdd = true>
__device__ __forceinline__ void wgmma_bf16(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, %37, 1, 1, 0;"
      : CACHALOT_ACC4(0), CACHALOT_ACC4(4)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdd ? 1 : 0));
}
template <bool kAdd = true>
__device__ __forceinline__ void wgmma_bf16(float (&d)[9][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n72k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
      "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35"
      "}, {%36, %37, %38, %39}, %40, %41, 1, 1, 0;"
      : CACHALOT_ACC4(0), CACHALOT_ACC4(4), CACHALOT_ACC(8)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdd ? 1 : 0));
}
template <bool kAdd = true>
__device__ __forceinline__ void wgmma_bf16(float (&d)[10][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
      "%34, %35, %36, %37, %38, %39"
      "}, {%40, %41, %42, %43}, %44, %45, 1, 1, 0;"
      : CACHALOT_ACC4(0), CACHALOT_ACC4(4), CACHALOT_ACC(8), CACHALOT_ACC(9)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdd ? 1 : 0));
}
template <bool kAdd = true>
__device__ __forceinline__ void wgmma_bf16(float (&d)[12][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
      "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
      "}, {%48, %49, %50, %51}, %52, %53, 1, 1, 0;"
      : CACHALOT_ACC4(0), CACHALOT_ACC4(4), CACHALOT_ACC4(8)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdd ? 1 : 0));
}
template <bool kAdd = true>
__device__ __forceinline__ void wgmma_bf16(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
      "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
      "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, %69, 1, 1, 0;"
      : CACHALOT_ACC4(0), CACHALOT_ACC4(4), CACHALOT_ACC4(8), CACHALOT_ACC4(12)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdd ? 1 : 0));
}

// The same for FP8 operands, E4M3 by E4M3, with K in steps of 32: d += a b, or d = a b if not kAdd.
// Registers a0 and a1 hold rows g and g + 8 of columns 4t to 4t + 3, a2 and a3 those of columns
// 4t + 16 to 4t + 19; B has rows of 128 elements (128 bytes) and 32 bytes for every 32 of K. A step
// aligns its 32 products and the sum so far to the largest of them and keeps about 13 bits behind
// that one's leading bit.
template <bool kAdd>
__device__ __forceinline__ void wgmma_fp8(float (&d)[4][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, {%16, %17, %18, %19}, %20, %21, 1, 1;"
      : CACHALOT_ACC4(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdd ? 1 : 0));
}
template <bool kAdd>
__device__ __forceinline__ void wgmma_fp8(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, %37, 1, 1;"
      : CACHALOT_ACC4(0), CACHALOT_ACC4(4)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdd ? 1 : 0));
}
template <bool kAdd>
__device__ __forceinline__ void wgmma_fp8(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, %69, 1, 1;"
      : CACHALOT_ACC4(0), CACHALOT_ACC4(4), CACHALOT_ACC4(8), CACHALOT_ACC4(12)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdd ? 1 : 0));
}
#undef CACHALOT_ACC4
#undef CACHALOT_ACC

// Byte of 16-byte piece `piece` of row `row` in a swizzled operand of rows of 128 bytes.
__device__ __forceinline__ int tile_place(int row, int piece) {
  return row * 128 + (piece ^ row % 8) * 16;
}

// Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same, transposed: lane l gets elements (2 (l % 4) + i, l / 4) in halves i of its registers.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// The transposed form of what load_matrices() would read: element (l / 4, 2 (l % 4) + i) of a
// matrix in half i of lane l's register goes to row 2 (l % 4) + i, column l / 4 in memory.
__device__ __forceinline__ void store_matrices_transposed(void* row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(row)),
               "r"(r[0]),
               "r"(r[1]),
               "r"(r[2]),
               "r"(r[3])
               : "memory");
}

// Asynchronous 16-byte copy from global to shared memory; zeros if `valid` is false.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
               "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}
// The same for data that is read once: L2 fetches whole 256-byte runs of it.
__device__ __forceinline__ void copy_async_stream(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(from)
               : "memory");
}
__device__ __forceinline__ void copy_async_stream(void* to, const void* from) {
  copy_async_stream(shared_address(to), from);
}
// Four or eight bytes, through L1.
template <int kBytes>
__device__ __forceinline__ void copy_async_small(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(kBytes)
               : "memory");
}
template <int kBytes>
__device__ __forceinline__ void copy_async_small(void* to, const void* from) {
  copy_async_small<kBytes>(shared_address(to), from);
}
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most `kPending` of the newest groups of this thread are under way.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Barriers in shared memory that count arrivals and the bytes of bulk copies. `phase` alternates
// with every completion, beginning with 0.
__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
// One of the barrier's arrivals, as soon as the copies that this thread has started (copy_async)
// are done.
__device__ __forceinline__ void barrier_arrive_after_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}
// Announces `bytes` more before an arrival.
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, int bytes) {
  asm volatile(
      "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
// Arrives and announces `bytes` more.
__device__ __forceinline__ void barrier_arrive_expect(uint64_t* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, int phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(phase)
      : "memory");
}
// Bulk copy to shared memory by one thread; all of it in multiples of 16 bytes.
__device__ __forceinline__ void copy_bulk(void* to,
                                          const void* from,
                                          int bytes,
                                          uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from),
      "r"(bytes),
      "r"(shared_address(barrier))
      : "memory");
}

// Bytes of (a, b), numbered from the low byte of a, picked by the low four nibbles of `select`,
// whose top bits must be 0.
__device__ __forceinline__ uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t select) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(select));
  return d;
}

// Loads from an address in shared memory.
__device__ __forceinline__ uint4 load_shared(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ uint2 load_shared_pair(uint32_t from) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_shared_word(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}

// Products of BF16 pairs; subnormals are kept.
__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// 2^x to two units in the last place; results below 2^-126 are zero.
__device__ __forceinline__ float exp2_flushed(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to within the last bit, for x and 1 / x that are not subnormal.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// BF16 bits of a float, to nearest even.
__device__ __forceinline__ uint16_t bf16_bits(float value) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
__device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

// E4M3 codes of two floats, saturating, to nearest even; `low` goes to the low byte.
__device__ __forceinline__ uint16_t e4m3_pair(float low, float high) {
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}

}  // namespace cachalot::ops::cuda
