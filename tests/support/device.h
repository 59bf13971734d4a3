// Runs the same op call on the reference and on a CUDA device: a Side turns host buffers into the
// views of its memory.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/ops.h"
#include "tests/support/random.h"
#include "tests/support/step.h"

namespace cachalot::test {

inline bool has_device() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

// Fails the test on a CUDA error.
inline void cuda_ok(cudaError_t error, const char* what) {
  ASSERT_EQ(error, cudaSuccess) << what << ": " << cudaGetErrorString(error);
}

// The device's stream and scratch memory, for the whole binary. Scratch starts as 0xFF.
class DeviceContext {
 public:
  static constexpr int64_t kScratchBytes = int64_t{256} << 20;

  static DeviceContext& get() {
    static DeviceContext context;
    return context;
  }
  ops::OpContext& operator*() { return ctx_; }
  cudaStream_t stream() const { return static_cast<cudaStream_t>(ctx_.stream); }
  void poison_scratch() { cuda_ok(cudaMemset(memory_, 0xFF, kScratchBytes), "memset"); }

 private:
  DeviceContext() {
    cuda_ok(cudaMalloc(&memory_, kScratchBytes), "scratch");
    poison_scratch();
    cudaStream_t stream = nullptr;
    cuda_ok(cudaStreamCreate(&stream), "stream");
    arena_ = std::make_unique<Arena>(memory_, kScratchBytes, Device::kCuda);
    ctx_.backend = ops::Backend::kCuda;
    ctx_.scratch = arena_.get();
    ctx_.stream = stream;
  }
  void* memory_ = nullptr;
  std::unique_ptr<Arena> arena_;
  ops::OpContext ctx_;
};

class Side {
 public:
  // Memory of the host (reference) or of the device.
  enum class Kind { kRef, kCuda };

  explicit Side(Kind kind) : cuda_(kind == Kind::kCuda) {
    ctx_.backend = ops::Backend::kRef;
    ctx_.scratch = &host_scratch_;
    if (cuda_) {
      ctx_ = *DeviceContext::get();
    }
  }
  ~Side() {
    for (void* memory : allocations_) {
      cudaFree(memory);
    }
  }
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;

  ops::OpContext& ctx() { return ctx_; }
  bool cuda() const { return cuda_; }

  // An input: `bytes` at `host`, on this side.
  template <class T>
  T* in(const T* host, size_t count) {
    if (!cuda_ || host == nullptr) {
      return const_cast<T*>(host);
    }
    auto* device = static_cast<T*>(allocate(count * sizeof(T)));
    cuda_ok(cudaMemcpy(const_cast<void*>(static_cast<const void*>(device)),
                       host,
                       count * sizeof(T),
                       cudaMemcpyHostToDevice),
            "upload");
    return device;
  }
  TensorView in(const TensorView& host) {
    TensorView view = host;
    view.data = in(static_cast<const uint8_t*>(host.data), static_cast<size_t>(host.bytes()));
    view.device = cuda_ ? Device::kCuda : Device::kCpu;
    return view;
  }
  TensorView in(const Buffer& host) { return in(host.view()); }

  // An output, or memory that the op changes: `host` holds its new contents after finish().
  TensorView out(const TensorView& host) {
    const TensorView view = in(host);
    if (cuda_) {
      downloads_.push_back({host.data, view.data, static_cast<size_t>(host.bytes())});
    }
    return view;
  }
  TensorView out(Buffer& host) { return out(host.view()); }

  ops::Weight weight(const WeightBuffer& host) {
    ops::Weight weight = host.view();
    weight.values = in(weight.values);
    if (!weight.scales.empty()) {
      weight.scales = in(weight.scales);
    }
    return weight;
  }

  ops::StepRows rows(const TestStep& step) {
    ops::StepRows rows = step.rows();
    for (TensorView* view :
         {&rows.position, &rows.sequence, &rows.row_begin, &rows.start, &rows.is_image}) {
      *view = in(*view);
    }
    return rows;
  }

  // Rings may change.
  ops::WindowView window(TestWindow& host) {
    ops::WindowView view = host.view();
    view.fresh = in(view.fresh);
    view.floor = in(view.floor);
    if (cuda_) {
      std::vector<uint8_t*> rings;
      for (std::vector<uint8_t>& ring : host.rings()) {
        const auto bytes = static_cast<int64_t>(ring.size());
        rings.push_back(
            static_cast<uint8_t*>(out(TensorView(ring.data(), DType::kU8, {bytes})).data));
      }
      view.rings = in(rings.data(), rings.size());
    }
    return view;
  }

  // Pages of `sequences` sequences; they may change.
  const ops::PagedRows* pages(Pages& host, size_t sequences) {
    if (!cuda_) {
      return host.views();
    }
    std::vector<uint8_t>& memory = host.memory();
    auto* base = static_cast<uint8_t*>(
        out(TensorView(memory.data(), DType::kU8, {static_cast<int64_t>(memory.size())})).data);
    std::vector<ops::PagedRows> views;
    for (size_t s = 0; s < sequences; ++s) {
      ops::PagedRows view = host.views()[s];
      const size_t count =
          memory.size() / static_cast<size_t>(view.page_rows * view.row_bytes) / sequences;
      std::vector<uint8_t*> pointers;
      for (size_t i = 0; i < count; ++i) {
        pointers.push_back(base + (view.pages[i] - memory.data()));
      }
      view.pages = in(pointers.data(), pointers.size());
      views.push_back(view);
    }
    return in(views.data(), views.size());
  }

  // Waits for the op and fetches its outputs.
  void finish(const Status& status) {
    EXPECT_TRUE(status.ok()) << status.message();
    if (!cuda_) {
      return;
    }
    cuda_ok(cudaStreamSynchronize(static_cast<cudaStream_t>(ctx_.stream)), "kernel");
    for (const Download& d : downloads_) {
      cuda_ok(cudaMemcpy(d.host, d.device, d.bytes, cudaMemcpyDeviceToHost), "download");
    }
  }

 private:
  struct Download {
    void* host;
    const void* device;
    size_t bytes;
  };

  void* allocate(size_t bytes) {
    void* memory = nullptr;
    cuda_ok(cudaMalloc(&memory, bytes == 0 ? 1 : bytes), "allocate");
    allocations_.push_back(memory);
    return memory;
  }

  bool cuda_;
  Arena host_scratch_;
  ops::OpContext ctx_;
  std::vector<void*> allocations_;
  std::vector<Download> downloads_;
};

// A suite that is skipped on machines without a device.
class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_device()) {
      GTEST_SKIP() << "no CUDA device";
    }
    DeviceContext::get().poison_scratch();
  }
};

// Results of one call on the device and on the reference.
template <class Output>
struct Both {
  Output got;
  Output want;
};
// run(side) builds its output for one side.
template <class Run>
auto on_both(const Run& run) {
  Side device(Side::Kind::kCuda), host(Side::Kind::kRef);
  using Output = decltype(run(device));
  return Both<Output>{run(device), run(host)};
}

}  // namespace cachalot::test
