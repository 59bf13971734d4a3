// Host side of a kernel launch.
#pragma once

#include <cuda_runtime.h>
#include <nvtx3/nvToolsExt.h>

#include <cstdint>
#include <string>
#include <utility>

#include "base/math.h"
#include "base/status.h"
#include "ops/context.h"
#include "ops/cuda/device/num.cuh"
#include "ops/weight.h"
#include "tensor/tensor.h"

namespace cachalot::ops::cuda {

constexpr int64_t kDefaultShared = 48 << 10;
constexpr int64_t kSharedCapacity = 232448;  // of one SM90 block, after opting in
constexpr int64_t kMultiprocessors = 132;    // of an H100 or H200: sizes grids, decides no result

inline unsigned extent(int64_t n) {
  return static_cast<unsigned>(n);
}

inline Param param(const TensorView& view) {
  return {view.data, view.dtype == DType::kBF16};
}

inline Status cuda_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) {
    return {};
  }
  return {Code::kInternal, std::string(what) + ": CUDA: " + cudaGetErrorString(error)};
}

// Runs `kernel` on the context's stream, allowed to start its prologue while the previous kernel
// drains (device/ptx.cuh: wait_for_previous_kernels).
template <class... Params, class... Args>
Status launch(const OpContext& ctx,
              const char* name,
              void (*kernel)(Params...),
              dim3 grid,
              dim3 block,
              int64_t shared_bytes,
              Args&&... args) {
  if (shared_bytes > kDefaultShared) {
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (error != cudaSuccess) {
      return cuda_status(error, name);
    }
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = static_cast<cudaStream_t>(ctx.stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  nvtxRangePushA(name);
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
  nvtxRangePop();
  return cuda_status(error, name);
}

// Takes temporaries from the context's arena and gives them back when it goes out of scope. Kernels
// that use them run later, in stream order, before any op that can be given the same memory.
class Scratch {
 public:
  explicit Scratch(OpContext& ctx) : arena_(ctx.scratch) {
    if (arena_ != nullptr) {
      mark_ = arena_->mark();
    }
  }
  ~Scratch() {
    if (arena_ != nullptr) {
      arena_->release(mark_);
    }
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // Null if the arena is missing or too small; status() then says so.
  template <class T>
  T* array(int64_t count) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    if (arena_ == nullptr || !arena_->fits(bytes)) {
      missing_ += bytes;
      return nullptr;
    }
    return static_cast<T*>(arena_->allocate_bytes(bytes));
  }
  Status status(const char* op) const {
    if (missing_ == 0) {
      return {};
    }
    return {Code::kResourceExhausted,
            std::string("op ") + op + ": " + std::to_string(missing_) +
                " bytes of device scratch memory are missing"};
  }

 private:
  Arena* arena_;
  Arena::Mark mark_{};
  int64_t missing_ = 0;
};

// Calls body(T()) with the element type of an activation tensor.
template <class Body>
Status with_act(DType dtype, Body&& body) {
  return dtype == DType::kBF16 ? body(Bf16()) : body(float());
}

}  // namespace cachalot::ops::cuda
