// Clusters: blocks of a grid that run at the same time and reach each other's shared memory.
//
// Before the first access every block must run, and none may leave before the last one:
// cluster_sync() at both ends.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/cuda/device/ptx.cuh"

namespace cachalot::ops::cuda {

__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
// A barrier of all threads of the cluster, which see each other's writes before it.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// Makes barriers that this thread has initialized known to the cluster, before cluster_arrive().
__device__ __forceinline__ void cluster_barriers_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// The barrier of cluster_sync() in two parts, without the writes: between them a thread does what
// needs no other block.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Address of `pointer`, in this block's shared memory, in that of block `rank`.
__device__ __forceinline__ uint32_t remote_address(const void* pointer, int rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(shared_address(pointer)), "r"(rank));
  return address;
}
// Stores two floats at `place` of block `rank`, whose `barrier` counts the 8 bytes.
__device__ __forceinline__ void remote_store_counted(
    const void* place, float a, float b, uint64_t* barrier, int rank) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          remote_address(place, rank)),
      "f"(a),
      "f"(b),
      "r"(remote_address(barrier, rank))
      : "memory");
}
// One of the arrivals of `barrier` of block `rank`, which also sees what this thread saw.
__device__ __forceinline__ void remote_arrive(uint64_t* barrier, int rank) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(
                   remote_address(barrier, rank))
               : "memory");
}
__device__ __forceinline__ void cluster_barrier_wait(uint64_t* barrier, int phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(phase)
      : "memory");
}
// Bulk copy by one thread from this block's shared memory to the same place in that of block
// `rank`, whose `barrier` counts its bytes.
__device__ __forceinline__ void remote_copy_bulk(const void* place,
                                                 int bytes,
                                                 uint64_t* barrier,
                                                 int rank) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(remote_address(place, rank)),
      "r"(shared_address(place)),
      "r"(bytes),
      "r"(remote_address(barrier, rank))
      : "memory");
}

}  // namespace cachalot::ops::cuda
