#include "ops/memory.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "base/format.h"

namespace cachalot::ops {
namespace {

// Copies happen at once, so one piece is enough.
class HostStaging : public Staging {
 public:
  explicit HostStaging(int64_t bytes) : piece_(static_cast<size_t>(bytes)) {}
  Result<uint8_t*> next() override { return piece_.data(); }
  Status send(void* target, const void* piece, int64_t bytes, void*) override {
    if (bytes > 0) {
      std::memcpy(target, piece, static_cast<size_t>(bytes));
    }
    return {};
  }

 private:
  std::vector<uint8_t> piece_;
};

class NoStream : public BackgroundStream {
 public:
  void* handle() const override { return nullptr; }
};

class HostMemory : public Memory {
 public:
  Device device() const override { return Device::kCpu; }
  Result<void*> allocate(int64_t bytes) override {
    const auto size = static_cast<size_t>(std::max<int64_t>(bytes, 1) + 63) / 64 * 64;
    void* memory = std::aligned_alloc(64, size);
    if (memory == nullptr) {
      return error(Code::kResourceExhausted, "out of memory: {} bytes", bytes);
    }
    return memory;
  }
  void free(void* memory) override { std::free(memory); }
  Status write(void* target, const void* host, int64_t bytes, void* stream) override {
    return copy(target, host, bytes, stream);
  }
  Status read(void* host, const void* source, int64_t bytes, void* stream) override {
    return copy(host, source, bytes, stream);
  }
  Status copy(void* target, const void* source, int64_t bytes, void*) override {
    if (bytes > 0) {
      std::memcpy(target, source, static_cast<size_t>(bytes));
    }
    return {};
  }
  Result<std::unique_ptr<Staging>> staging(int64_t piece_bytes, int) override {
    return std::unique_ptr<Staging>(std::make_unique<HostStaging>(piece_bytes));
  }
  Result<std::unique_ptr<BackgroundStream>> background_stream() override {
    return std::unique_ptr<BackgroundStream>(std::make_unique<NoStream>());
  }
  Result<int64_t> available() override {
    return static_cast<int64_t>(sysconf(_SC_AVPHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  }
};

}  // namespace

Memory& host_memory() {
  static HostMemory memory;
  return memory;
}

Result<Memory*> backend_memory(Backend backend) {
  if (backend == Backend::kCuda) {
    return cuda_memory();
  }
  return &host_memory();
}

Result<Buffer> Buffer::allocate(Memory& memory, int64_t bytes) {
  Buffer buffer;
  CACHALOT_TRY(buffer.data_, memory.allocate(bytes));
  buffer.memory_ = &memory;
  buffer.bytes_ = bytes;
  return buffer;
}

Buffer::Buffer(Buffer&& other) noexcept
    : memory_(other.memory_),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Buffer::~Buffer() {
  if (data_ != nullptr) {
    memory_->free(data_);
  }
}

}  // namespace cachalot::ops
