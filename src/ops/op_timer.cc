#include "ops/op_timer.h"

#include <utility>

#include "base/clock.h"

namespace cachalot::ops {
namespace {

class HostTimer : public OpTimer {
 public:
  void begin(std::string name, const OpCost& cost) override {
    records_.push_back({std::move(name), cost, 0});
    begin_ = now_seconds();
  }
  void end() override { records_.back().seconds = now_seconds() - begin_; }
  Result<std::vector<OpRecord>> take() override { return std::exchange(records_, {}); }

 private:
  std::vector<OpRecord> records_;
  double begin_ = 0;
};

}  // namespace

Result<std::unique_ptr<OpTimer>> make_op_timer(const OpContext& context) {
  if (context.backend == Backend::kCuda) {
    return cuda_op_timer(context.stream);
  }
  return std::unique_ptr<OpTimer>(new HostTimer);
}

}  // namespace cachalot::ops
