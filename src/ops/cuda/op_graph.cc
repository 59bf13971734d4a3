// Graphs of recorded ops.
#include "ops/op_graph.h"

#include <cuda_runtime.h>

#include <string>
#include <utility>
#include <vector>

namespace cachalot::ops {
namespace {

Status graph_status(cudaError_t code, const char* what) {
  if (code == cudaSuccess) {
    return {};
  }
  return {code == cudaErrorMemoryAllocation ? Code::kResourceExhausted : Code::kInternal,
          std::string("CUDA graph: ") + what + ": " + cudaGetErrorString(code)};
}

class CudaGraph : public OpGraph {
 public:
  CudaGraph(cudaGraphExec_t graph, int64_t kernels) : graph_(graph), kernels_(kernels) {}
  ~CudaGraph() override { static_cast<void>(cudaGraphExecDestroy(graph_)); }
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;

  Status launch(void* stream) override {
    return graph_status(cudaGraphLaunch(graph_, static_cast<cudaStream_t>(stream)), "launch");
  }
  int64_t kernels() const override { return kernels_; }

 private:
  cudaGraphExec_t graph_;
  int64_t kernels_;
};

Result<int64_t> count_kernels(cudaGraph_t graph) {
  size_t count = 0;
  CACHALOT_RETURN_IF_ERROR(graph_status(cudaGraphGetNodes(graph, nullptr, &count), "nodes"));
  std::vector<cudaGraphNode_t> nodes(count);
  CACHALOT_RETURN_IF_ERROR(graph_status(cudaGraphGetNodes(graph, nodes.data(), &count), "nodes"));
  int64_t kernels = 0;
  for (cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type{};
    CACHALOT_RETURN_IF_ERROR(graph_status(cudaGraphNodeGetType(node, &type), "nodes"));
    kernels += type == cudaGraphNodeTypeKernel ? 1 : 0;
  }
  return kernels;
}

// The default stream cannot be captured, so ops are recorded on one of their own.
struct RecordingStream {
  RecordingStream() : error(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)) {}
  ~RecordingStream() {
    if (error == cudaSuccess) {
      static_cast<void>(cudaStreamDestroy(stream));
    }
  }
  cudaStream_t stream = nullptr;
  cudaError_t error;
};

}  // namespace

Result<std::unique_ptr<OpGraph>> cuda_record_ops(OpContext& context,
                                                 const std::function<Status()>& body) {
  const RecordingStream recording;
  CACHALOT_RETURN_IF_ERROR(graph_status(recording.error, "stream"));
  CACHALOT_RETURN_IF_ERROR(graph_status(
      cudaStreamBeginCapture(recording.stream, cudaStreamCaptureModeThreadLocal), "begin"));
  void* const stream = std::exchange(context.stream, recording.stream);
  const Status status = body();
  context.stream = stream;
  cudaGraph_t graph = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(recording.stream, &graph);
  cudaGraphExec_t executable = nullptr;
  Status made = graph_status(ended, "end");
  int64_t kernels = 0;
  if (status.ok() && made.ok()) {
    Result<int64_t> counted = count_kernels(graph);
    made = counted.status();
    kernels = made.ok() ? *counted : 0;
  }
  if (status.ok() && made.ok()) {
    made = graph_status(cudaGraphInstantiate(&executable, graph, 0), "instantiation");
  }
  if (graph != nullptr) {
    static_cast<void>(cudaGraphDestroy(graph));
  }
  CACHALOT_RETURN_IF_ERROR(status);
  CACHALOT_RETURN_IF_ERROR(made);
  return std::unique_ptr<OpGraph>(new CudaGraph(executable, kernels));
}

}  // namespace cachalot::ops
