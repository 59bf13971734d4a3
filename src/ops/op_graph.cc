#include "ops/op_graph.h"

#include "base/format.h"

namespace cachalot::ops {

Result<std::unique_ptr<OpGraph>> record_ops(OpContext& context,
                                            const std::function<Status()>& body) {
  if (context.backend == Backend::kCuda) {
    return cuda_record_ops(context, body);
  }
  return error(Code::kUnimplemented, "only the CUDA backend records ops");
}

}  // namespace cachalot::ops
