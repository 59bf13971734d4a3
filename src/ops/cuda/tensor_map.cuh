// Tensor maps: what the copy engine needs to know of a matrix in memory.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "ops/cuda/launch.cuh"

namespace cachalot::ops::cuda {

// A map of `rows` rows of 64 BF16 columns, 128 bytes each without gaps, for copies of `box` rows.
// The driver's function is looked up at run time, so that no driver library is linked.
inline Status map_rows(CUtensorMap& map, const void* data, int64_t rows, int box) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    cudaGetDriverEntryPointByVersion(
        "cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  constexpr int kColumns = 64, kBytes = 2 * kColumns;
  const cuuint64_t sizes[] = {kColumns, static_cast<cuuint64_t>(rows)}, strides[] = {kBytes};
  const cuuint32_t boxes[] = {kColumns, static_cast<cuuint32_t>(box)}, steps[] = {1, 1};
  const CUresult result = encode == nullptr ? CUDA_ERROR_NOT_FOUND
                                            : encode(&map,
                                                     CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                                                     2,
                                                     const_cast<void*>(data),
                                                     sizes,
                                                     strides,
                                                     boxes,
                                                     steps,
                                                     CU_TENSOR_MAP_INTERLEAVE_NONE,
                                                     CU_TENSOR_MAP_SWIZZLE_NONE,
                                                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS
             ? Status{}
             : Status{Code::kInternal, "tensor map: CUDA driver error " + std::to_string(result)};
}

}  // namespace cachalot::ops::cuda
