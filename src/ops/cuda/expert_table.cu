// Device tables of expert weights, and the call that makes them before a stream is captured.
#include "ops/cuda/expert_table.cuh"

#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "ops/cuda/prepare.h"

namespace cachalot::ops::cuda {
namespace {

struct Table {
  std::vector<ExpertPointers> host;
  ExpertPointers* device = nullptr;
};

struct Tables {
  std::mutex mutex;
  std::map<std::pair<const void*, size_t>, Table> by_span;
};

Tables& tables() {
  static Tables* const kTables =
      new Tables;  // outlives every user; device memory dies with the process
  return *kTables;
}

const uint8_t* bytes(const TensorView& view) {
  return static_cast<const uint8_t*>(view.data);
}

bool same(const Table& table, std::span<const ExpertView> experts) {
  for (size_t i = 0; i < experts.size(); ++i) {
    if (table.host[i] != expert_pointers(experts[i])) {
      return false;
    }
  }
  return table.device != nullptr;
}

}  // namespace

ExpertPointers expert_pointers(const ExpertView& expert) {
  return {bytes(expert.w1.values),
          bytes(expert.w1.scales),
          bytes(expert.w3.values),
          bytes(expert.w3.scales),
          bytes(expert.w2.values),
          bytes(expert.w2.scales)};
}

Result<const ExpertPointers*> expert_table(void* stream, std::span<const ExpertView> experts) {
  Tables& all = tables();
  const std::lock_guard<std::mutex> lock(all.mutex);
  Table& table = all.by_span[{experts.data(), experts.size()}];
  if (table.host.size() == experts.size() && same(table, experts)) {
    return static_cast<const ExpertPointers*>(table.device);
  }
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  CACHALOT_RETURN_IF_ERROR(cuda_status(
      cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &capture), "expert table"));
  if (capture != cudaStreamCaptureStatusNone) {
    return Status(Code::kFailedPrecondition,
                  "op experts: the expert table of these weights must exist before the stream is "
                  "captured; call prepare_experts() first");
  }
  std::vector<ExpertPointers> host;
  host.reserve(experts.size());
  for (const ExpertView& expert : experts) {
    host.push_back(expert_pointers(expert));
  }
  const size_t size = host.size() * sizeof(ExpertPointers);
  // A table that a queued kernel may still read is replaced, not overwritten.
  ExpertPointers* device = nullptr;
  CACHALOT_RETURN_IF_ERROR(cuda_status(cudaMalloc(&device, size), "expert table"));
  CACHALOT_RETURN_IF_ERROR(
      cuda_status(cudaMemcpy(device, host.data(), size, cudaMemcpyHostToDevice), "expert table"));
  table.host = std::move(host);
  table.device = device;
  return static_cast<const ExpertPointers*>(table.device);
}

Status prepare_experts(std::span<const ExpertView> experts) {
  return expert_table(nullptr, experts).status();
}

}  // namespace cachalot::ops::cuda
