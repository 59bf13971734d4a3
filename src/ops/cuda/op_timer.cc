// Event pairs around the ops of a stream.
#include "ops/op_timer.h"

#include <cuda_runtime.h>

#include <string>
#include <utility>

namespace cachalot::ops {
namespace {

class CudaTimer : public OpTimer {
 public:
  explicit CudaTimer(cudaStream_t stream) : stream_(stream) {}
  ~CudaTimer() override {
    for (const cudaEvent_t event : events_) {
      static_cast<void>(cudaEventDestroy(event));
    }
  }
  CudaTimer(const CudaTimer&) = delete;
  CudaTimer& operator=(const CudaTimer&) = delete;

  void begin(std::string name, const OpCost& cost) override {
    records_.push_back({std::move(name), cost, 0});
    record(2 * records_.size() - 2);
  }
  void end() override { record(2 * records_.size() - 1); }

  Result<std::vector<OpRecord>> take() override {
    keep(cudaStreamSynchronize(stream_));
    for (size_t i = 0; i < records_.size() && error_ == cudaSuccess; ++i) {
      float milliseconds = 0;
      keep(cudaEventElapsedTime(&milliseconds, events_[2 * i], events_[2 * i + 1]));
      records_[i].seconds = milliseconds * 1e-3;
    }
    if (error_ != cudaSuccess) {
      return Status(Code::kInternal, std::string("CUDA timing: ") + cudaGetErrorString(error_));
    }
    return std::exchange(records_, {});
  }

 private:
  void keep(cudaError_t error) { error_ = error_ == cudaSuccess ? error : error_; }
  void record(size_t index) {
    while (events_.size() <= index) {
      cudaEvent_t event = nullptr;
      keep(cudaEventCreate(&event));
      events_.push_back(event);
    }
    keep(cudaEventRecord(events_[index], stream_));
  }

  cudaStream_t stream_;
  std::vector<cudaEvent_t> events_;
  std::vector<OpRecord> records_;
  cudaError_t error_ = cudaSuccess;  // the first
};

}  // namespace

Result<std::unique_ptr<OpTimer>> cuda_op_timer(void* stream) {
  return std::unique_ptr<OpTimer>(new CudaTimer(static_cast<cudaStream_t>(stream)));
}

}  // namespace cachalot::ops
