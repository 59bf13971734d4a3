// How the CUDA ops are timed: random data on the device, ceilings, graph replays, JSON lines.
#pragma once

#include <cublas_v2.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/rng.h"
#include "ops/ops.h"
#include "quant/block.h"

namespace cachalot {

constexpr int64_t kRotateBytes = 256 << 20;
constexpr int kReplays = 9;

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    std::exit(1);
  }
}
inline void check(const Status& status) {
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    std::exit(1);
  }
}

// What a byte of device memory stands for.
enum class Fill : uint8_t { kBf16, kF32, kE4m3, kE8m0, kBytes, kWindowRow, kMainRow, kIndexRow };

__device__ inline uint32_t hash(uint64_t x) {
  x ^= x >> 33, x *= 0xff51afd7ed558ccdull, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ull, x ^= x >> 33;
  return static_cast<uint32_t>(x);
}
__device__ inline uint8_t fill_code(uint32_t r) {
  return static_cast<uint8_t>((r & 0x80) | (0x28 + r % 40));
}

// Values are a few binades wide, scales vary from block to block.
static __global__ void fill_kernel(uint8_t* memory, int64_t bytes, Fill fill, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < bytes;
       i += int64_t{gridDim.x} * blockDim.x) {
    const uint32_t r = hash(seed * 0x9E3779B97F4A7C15ull + static_cast<uint64_t>(i));
    uint8_t v = static_cast<uint8_t>(r);
    if (fill == Fill::kBf16) {
      v = i % 2 == 0 ? v : static_cast<uint8_t>((r & 0x80) | (0x3D + (r >> 8) % 3));
    } else if (fill == Fill::kF32) {
      v = i % 4 < 3 ? v : static_cast<uint8_t>((r & 0x80) | (0x3C + (r >> 8) % 3));
    } else if (fill == Fill::kE4m3) {
      v = fill_code(r);
    } else if (fill == Fill::kE8m0) {
      v = static_cast<uint8_t>(116 + r % 4);
    } else if (fill == Fill::kWindowRow) {
      v = i % 528 < 512 ? fill_code(r) : static_cast<uint8_t>(118 + r % 3);
    } else if (fill == Fill::kMainRow) {
      v = i % 288 < 256 ? v : static_cast<uint8_t>(0x20 + r % 24);
    } else if (fill == Fill::kIndexRow) {
      v = i % 68 < 64 ? v : static_cast<uint8_t>(122 + r % 4);
    }
    memory[i] = v;
  }
}

static __global__ void copy_kernel(const uint4* from, uint4* to, int64_t count) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    to[i] = from[i];
  }
}

class Bench {
 public:
  Bench(int argc, char** argv) : filters_(argv + 1, argv + argc) {
    check(cudaStreamCreate(&stream_), "stream");
    constexpr int64_t kScratch = int64_t{3} << 30;
    scratch_memory_ = allocate(kScratch);
    scratch_ = std::make_unique<Arena>(scratch_memory_, kScratch, Device::kCuda);
    ctx_.backend = ops::Backend::kCuda;
    ctx_.stream = stream_;
    ctx_.scratch = scratch_.get();
    measure_ceilings();
  }

  ops::OpContext& ctx() { return ctx_; }

  bool wanted(const std::string& name) const {
    return filters_.empty() || std::any_of(filters_.begin(), filters_.end(), [&](const auto& f) {
             return name.find(f) != std::string::npos;
           });
  }

  void* allocate(int64_t bytes) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, static_cast<size_t>(std::max<int64_t>(bytes, 16))), "allocate");
    allocations_.push_back(memory);
    return memory;
  }
  // Frees everything that was allocated since `mark`.
  size_t mark() const { return allocations_.size(); }
  void release(size_t mark) {
    check(cudaDeviceSynchronize(), "synchronize");
    for (; allocations_.size() > mark; allocations_.pop_back()) {
      cudaFree(allocations_.back());
    }
  }
  uint8_t* filled(int64_t bytes, Fill fill) {
    auto* memory = static_cast<uint8_t*>(allocate(bytes));
    fill_kernel<<<1024, 256, 0, stream_>>>(memory, bytes, fill, ++seed_);
    check(cudaGetLastError(), "fill");
    return memory;
  }
  TensorView tensor(DType dtype, const Shape& shape) {
    const Fill fill = dtype == DType::kBF16 ? Fill::kBf16 : Fill::kF32;
    return {filled(shape.elements() * dtype_bytes(dtype), fill), dtype, shape, Device::kCuda};
  }
  template <class T>
  T* uploaded(const std::vector<T>& values) {
    auto* memory = static_cast<T*>(allocate(static_cast<int64_t>(values.size() * sizeof(T))));
    check(cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
          "upload");
    return memory;
  }
  TensorView ints(const std::vector<int32_t>& values, const Shape& shape) {
    return {uploaded(values), DType::kI32, shape, Device::kCuda};
  }
  ops::Weight weight(ops::WeightFormat format, int64_t out, int64_t in) {
    ops::Weight w;
    w.format = format;
    w.out = out;
    w.in = in;
    switch (format) {
      case ops::WeightFormat::kFp8Block:
        w.values = {filled(out * in, Fill::kE4m3), DType::kF8E4M3, {out, in}, Device::kCuda};
        w.scales = {filled(out / 32 * (in / 32), Fill::kE8m0),
                    DType::kF8E8M0,
                    {out / 32, in / 32},
                    Device::kCuda};
        break;
      case ops::WeightFormat::kFp4Row:
        w.values = {filled(out * in / 2, Fill::kBytes), DType::kI8, {out, in / 2}, Device::kCuda};
        w.scales = {
            filled(out * (in / 32), Fill::kE8m0), DType::kF8E8M0, {out, in / 32}, Device::kCuda};
        break;
      default:
        w.values = tensor(DType::kBF16, {out, in});
    }
    return w;
  }

  // Median seconds of one call of run(i); i counts the calls.
  double time(int calls, const std::function<Status(int)>& run) {
    check(run(0));
    check(cudaStreamSynchronize(stream_), "first call");
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < calls; ++i) {
      check(run(i));
    }
    check(cudaStreamEndCapture(stream_, &graph), "capture");
    check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin), "event");
    check(cudaEventCreate(&end), "event");
    std::vector<float> times;
    for (int i = 0; i < kReplays + 2; ++i) {
      check(cudaEventRecord(begin, stream_), "event");
      check(cudaGraphLaunch(exec, stream_), "replay");
      check(cudaEventRecord(end, stream_), "event");
      check(cudaEventSynchronize(end), "replay");
      float ms = 0;
      check(cudaEventElapsedTime(&ms, begin, end), "event");
      if (i >= 2) {
        times.push_back(ms);
      }
    }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    std::sort(times.begin(), times.end());
    return times[times.size() / 2] * 1e-3 / calls;
  }

  // Median seconds from the call of run(i) until the stream has ended what it queued.
  double wall_time(const std::function<Status(int)>& run) {
    std::vector<double> times;
    for (int i = 0; i < kReplays + 2; ++i) {
      const double begin = now_seconds();
      check(run(i));
      check(cudaStreamSynchronize(stream_), "call");
      if (i >= 2) {
        times.push_back(now_seconds() - begin);
      }
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

  void report(const std::string& name,
              const std::string& shape,
              double seconds,
              double bytes,
              double flops) {
    report(name, shape, seconds, bytes, flops, std::max(bytes / copy_rate_, flops / mma_rate_));
  }
  void report(const std::string& name,
              const std::string& shape,
              double seconds,
              double bytes,
              double flops,
              double ceiling) {
    std::printf(
        "{\"name\": \"%s\", \"shape\": \"%s\", \"median_s\": %.4g, \"bytes\": %.6g, \"flops\": "
        "%.6g, "
        "\"gbps\": %.1f, \"tflops\": %.2f, \"ceiling_s\": %.4g, \"fraction\": %.3f}\n",
        name.c_str(),
        shape.c_str(),
        seconds,
        bytes,
        flops,
        bytes / seconds * 1e-9,
        flops / seconds * 1e-12,
        ceiling,
        ceiling / seconds);
    std::fflush(stdout);
  }

 private:
  void measure_ceilings() {
    const size_t start = mark();
    constexpr int64_t kBytes = int64_t{2} << 30;
    auto* from = filled(kBytes, Fill::kBytes);
    auto* to = static_cast<uint8_t*>(allocate(kBytes));
    const double copy = time(4, [&](int) -> Status {
      copy_kernel<<<132 * 8, 512, 0, stream_>>>(
          reinterpret_cast<uint4*>(from), reinterpret_cast<uint4*>(to), kBytes / 16);
      return {};
    });
    copy_rate_ = 2.0 * kBytes / copy;
    release(start);
    mma_rate_ = measure_matrix_rate();
    std::printf("{\"name\": \"ceiling\", \"copy_gbps\": %.1f, \"bf16_tflops\": %.1f}\n",
                copy_rate_ * 1e-9,
                mma_rate_ * 1e-12);
    std::fflush(stdout);
    release(start);
  }
  // cuBLAS is loaded, not linked: without it the matrix ceiling is the H200's published
  // measurement.
  double measure_matrix_rate() {
    void* library = dlopen("libcublas.so.13", RTLD_NOW);
    if (library == nullptr) {
      return 790e12;
    }
    const auto create =
        reinterpret_cast<decltype(&cublasCreate_v2)>(dlsym(library, "cublasCreate_v2"));
    const auto set_stream =
        reinterpret_cast<decltype(&cublasSetStream_v2)>(dlsym(library, "cublasSetStream_v2"));
    using Gemm = cublasStatus_t (*)(cublasHandle_t,
                                    cublasOperation_t,
                                    cublasOperation_t,
                                    int,
                                    int,
                                    int,
                                    const void*,
                                    const void*,
                                    cudaDataType,
                                    int,
                                    const void*,
                                    cudaDataType,
                                    int,
                                    const void*,
                                    void*,
                                    cudaDataType,
                                    int,
                                    cublasComputeType_t,
                                    cublasGemmAlgo_t);
    const auto gemm = reinterpret_cast<Gemm>(dlsym(library, "cublasGemmEx"));
    cublasHandle_t handle = nullptr;
    if (create == nullptr || set_stream == nullptr || gemm == nullptr ||
        create(&handle) != CUBLAS_STATUS_SUCCESS) {
      return 790e12;
    }
    set_stream(handle, stream_);
    constexpr int kN = 8192;
    const TensorView a = tensor(DType::kBF16, {kN, kN}), b = tensor(DType::kBF16, {kN, kN});
    const TensorView c = tensor(DType::kBF16, {kN, kN});
    const float one = 1, zero = 0;
    const double seconds = time(4, [&](int) -> Status {
      const auto code = gemm(handle,
                             CUBLAS_OP_T,
                             CUBLAS_OP_N,
                             kN,
                             kN,
                             kN,
                             &one,
                             a.data,
                             CUDA_R_16BF,
                             kN,
                             b.data,
                             CUDA_R_16BF,
                             kN,
                             &zero,
                             c.data,
                             CUDA_R_16BF,
                             kN,
                             CUBLAS_COMPUTE_32F,
                             CUBLAS_GEMM_DEFAULT);
      return code == CUBLAS_STATUS_SUCCESS ? Status() : Status(Code::kInternal, "cublasGemmEx");
    });
    return 2.0 * kN * kN * kN / seconds;
  }

  std::vector<std::string> filters_;
  cudaStream_t stream_ = nullptr;
  void* scratch_memory_ = nullptr;
  std::unique_ptr<Arena> scratch_;
  ops::OpContext ctx_;
  std::vector<void*> allocations_;
  uint64_t seed_ = 0;
  double copy_rate_ = 4.3e12;
  double mma_rate_ = 790e12;
};

}  // namespace cachalot
