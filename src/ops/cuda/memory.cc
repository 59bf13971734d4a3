// Memory of the CUDA device 0.
#include "ops/memory.h"

#include <cuda_runtime.h>

#include <string>

namespace cachalot::ops {
namespace {

Status cuda_error(cudaError_t code, const char* what) {
  if (code == cudaSuccess) {
    return {};
  }
  return {code == cudaErrorMemoryAllocation ? Code::kResourceExhausted : Code::kInternal,
          std::string("CUDA ") + what + ": " + cudaGetErrorString(code)};
}

class CudaMemory : public Memory {
 public:
  Device device() const override { return Device::kCuda; }
  Result<void*> allocate(int64_t bytes) override {
    void* memory = nullptr;
    CACHALOT_RETURN_IF_ERROR(
        cuda_error(cudaMalloc(&memory, static_cast<size_t>(bytes > 0 ? bytes : 1)), "allocation"));
    return memory;
  }
  void free(void* memory) override { static_cast<void>(cudaFree(memory)); }
  // From pageable memory: the runtime has taken the bytes when the call returns.
  Status write(void* target, const void* host, int64_t bytes, void* stream) override {
    return move(target, host, bytes, cudaMemcpyHostToDevice, stream);
  }
  Status read(void* host, const void* source, int64_t bytes, void* stream) override {
    CACHALOT_RETURN_IF_ERROR(move(host, source, bytes, cudaMemcpyDeviceToHost, stream));
    return cuda_error(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "copy to the host");
  }
  Status copy(void* target, const void* source, int64_t bytes, void* stream) override {
    return move(target, source, bytes, cudaMemcpyDeviceToDevice, stream);
  }

 private:
  Status move(void* to, const void* from, int64_t bytes, cudaMemcpyKind kind, void* stream) {
    if (bytes == 0) {
      return {};
    }
    return cuda_error(
        cudaMemcpyAsync(
            to, from, static_cast<size_t>(bytes), kind, static_cast<cudaStream_t>(stream)),
        "copy");
  }
};

}  // namespace

Result<Memory*> cuda_memory() {
  static CudaMemory memory;
  int count = 0;
  if (const cudaError_t code = cudaGetDeviceCount(&count); code != cudaSuccess || count == 0) {
    return Status(Code::kUnavailable, std::string("no CUDA device: ") + cudaGetErrorString(code));
  }
  return static_cast<Memory*>(&memory);
}

}  // namespace cachalot::ops
