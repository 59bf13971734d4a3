// What this machine is and what it can reach: the denominators of every speed figure.
#pragma once

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

// Bytes per second of a streaming read of memory far larger than the caches, on all threads of the
// pool; best of several passes.
double measure_read_bandwidth(ThreadPool& pool);

// FP32 multiply-adds per second of register-resident vectors, on all threads; best of several
// passes.
double measure_multiply_add_rate(ThreadPool& pool);

}  // namespace cachalot::ops::cpu
