// Op contexts for tests.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "ops/cpu/machine.h"
#include "ops/ops.h"

namespace cachalot::test {

class Context {
 public:
  explicit Context(ops::Backend backend, int threads = 2) {
    ctx_.backend = backend;
    ctx_.scratch = &arena_;
    if (threads > 0) {
      pool_ = std::make_unique<ThreadPool>(threads);
      ctx_.pool = pool_.get();
    }
  }
  ops::OpContext& operator*() { return ctx_; }

 private:
  Arena arena_;
  std::unique_ptr<ThreadPool> pool_;
  ops::OpContext ctx_;
};

// The contexts of whole test binaries: pools are started once.
inline ops::OpContext& ref() {
  static Context context(ops::Backend::kRef, 0);
  return *context;
}
// threads 0: no pool.
inline ops::OpContext& cpu(int threads = 2) {
  static Context contexts[4] = {Context(ops::Backend::kCpu, 0),
                                Context(ops::Backend::kCpu, 1),
                                Context(ops::Backend::kCpu, 2),
                                Context(ops::Backend::kCpu, 3)};
  return *contexts[threads];
}

// body() with every instruction set of the CPU kernels that this machine has, the best one last.
template <class Body>
void on_every_instruction_set(const Body& body) {
  const std::vector<std::string> sets = ops::cpu::instruction_sets();
  for (auto set = sets.rbegin(); set != sets.rend(); ++set) {
    SCOPED_TRACE(*set);
    ASSERT_TRUE(ops::cpu::use_instruction_set(*set));
    body();
  }
  ops::cpu::use_instruction_set("");
}

}  // namespace cachalot::test
