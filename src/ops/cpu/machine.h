// What this machine is and what it can reach: the denominators of every speed figure.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/thread_pool.h"

namespace cachalot::ops::cpu {

// The instruction sets that the SIMD kernels were compiled for and that this processor has, best
// first; the first is used.
std::vector<std::string> instruction_sets();

// Makes the kernels use one of instruction_sets() from now on, or the best again if `name` is
// empty; false if there is no such set. For tests: not while a kernel runs.
bool use_instruction_set(std::string_view name);

// Streaming reads of memory far larger than the caches, on all threads of the pool.
class ReadMeter {
 public:
  explicit ReadMeter(ThreadPool& pool);
  // Bytes per second of one pass.
  double pass();
  double best_of(int passes);

 private:
  ThreadPool& pool_;
  std::unique_ptr<uint32_t[]> memory_;
  uint32_t* data_ = nullptr;  // at a cache line
  int64_t share_ = 0;         // words of a thread
};

// FP32 multiply-adds per second of register-resident vectors, on all threads, in one short pass.
double multiply_add_pass(ThreadPool& pool);
double best_multiply_add_rate(ThreadPool& pool, int passes);

}  // namespace cachalot::ops::cpu
