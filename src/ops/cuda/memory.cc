// Memory of the CUDA device 0.
#include "ops/memory.h"

#include <cuda_runtime.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace cachalot::ops {
namespace {

Status cuda_error(cudaError_t code, const char* what) {
  if (code == cudaSuccess) {
    return {};
  }
  return {code == cudaErrorMemoryAllocation ? Code::kResourceExhausted : Code::kInternal,
          std::string("CUDA ") + what + ": " + cudaGetErrorString(code)};
}

class CudaStaging : public Staging {
 public:
  static Result<std::unique_ptr<Staging>> make(int64_t piece_bytes, int pieces) {
    std::unique_ptr<CudaStaging> staging(new CudaStaging(piece_bytes));
    CACHALOT_RETURN_IF_ERROR(cuda_error(cudaMallocHost(reinterpret_cast<void**>(&staging->memory_),
                                                       static_cast<size_t>(piece_bytes * pieces)),
                                        "allocation of pinned host memory"));
    for (int i = 0; i < pieces; ++i) {
      cudaEvent_t event = nullptr;
      CACHALOT_RETURN_IF_ERROR(
          cuda_error(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event"));
      staging->copied_.push_back(event);
    }
    return std::unique_ptr<Staging>(std::move(staging));
  }
  ~CudaStaging() override {
    for (cudaEvent_t event : copied_) {
      static_cast<void>(cudaEventSynchronize(event));
      static_cast<void>(cudaEventDestroy(event));
    }
    static_cast<void>(cudaFreeHost(memory_));
  }
  CudaStaging(const CudaStaging&) = delete;
  CudaStaging& operator=(const CudaStaging&) = delete;

  Result<uint8_t*> next() override {
    now_ = (now_ + 1) % copied_.size();
    CACHALOT_RETURN_IF_ERROR(cuda_error(cudaEventSynchronize(copied_[now_]), "wait for a copy"));
    return memory_ + static_cast<int64_t>(now_) * piece_bytes_;
  }
  Status send(void* target, const void* piece, int64_t bytes, void* stream) override {
    auto* const on = static_cast<cudaStream_t>(stream);
    CACHALOT_RETURN_IF_ERROR(cuda_error(
        cudaMemcpyAsync(target, piece, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, on),
        "copy"));
    return cuda_error(cudaEventRecord(copied_[now_], on), "event");
  }

 private:
  explicit CudaStaging(int64_t piece_bytes) : piece_bytes_(piece_bytes) {}

  int64_t piece_bytes_;
  uint8_t* memory_ = nullptr;
  std::vector<cudaEvent_t> copied_;  // per piece, its last copy
  size_t now_ = 0;
};

class CudaStream : public BackgroundStream {
 public:
  static Result<std::unique_ptr<BackgroundStream>> make() {
    int least = 0, greatest = 0;
    cudaStream_t stream = nullptr;
    CACHALOT_RETURN_IF_ERROR(
        cuda_error(cudaDeviceGetStreamPriorityRange(&least, &greatest), "stream"));
    CACHALOT_RETURN_IF_ERROR(
        cuda_error(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, least), "stream"));
    return std::unique_ptr<BackgroundStream>(new CudaStream(stream));
  }
  ~CudaStream() override { static_cast<void>(cudaStreamDestroy(stream_)); }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  void* handle() const override { return stream_; }

 private:
  explicit CudaStream(cudaStream_t stream) : stream_(stream) {}

  cudaStream_t stream_;
};

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
  Result<std::unique_ptr<Staging>> staging(int64_t piece_bytes, int pieces) override {
    return CudaStaging::make(piece_bytes, pieces);
  }
  Result<std::unique_ptr<BackgroundStream>> background_stream() override {
    return CudaStream::make();
  }
  Result<int64_t> available() override {
    size_t free = 0, total = 0;
    CACHALOT_RETURN_IF_ERROR(cuda_error(cudaMemGetInfo(&free, &total), "memory"));
    return static_cast<int64_t>(free);
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
