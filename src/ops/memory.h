// How the host reaches the memory of a backend.
#pragma once

#include <cstdint>
#include <memory>

#include "base/status.h"
#include "ops/context.h"
#include "tensor/tensor.h"

namespace cachalot::ops {

// Host memory in pieces, from which a device copies while the host fills the next one. Not
// thread-safe.
class Staging {
 public:
  virtual ~Staging() = default;

  // The next piece in turn, once the copies from it have ended.
  virtual Result<uint8_t*> next() = 0;
  // Copies from the piece that next() gave last, ordered with the ops of `stream`.
  virtual Status send(void* target, const void* piece, int64_t bytes, void* stream) = 0;
};

// A queue of ops and copies beside the default one, for work that nobody waits for at once: where
// both have something to do, the default one goes first.
class BackgroundStream {
 public:
  virtual ~BackgroundStream() = default;

  virtual void* handle() const = 0;  // for OpContext::stream
};

// Of the host or of one device. Copies are ordered with the ops of their stream (null: the default
// stream); on the host they happen at once. Thread-safe.
class Memory {
 public:
  virtual ~Memory() = default;

  virtual Device device() const = 0;
  // At least 64-byte aligned, uninitialized. kResourceExhausted if there is none.
  virtual Result<void*> allocate(int64_t bytes) = 0;
  virtual void free(void* memory) = 0;
  // `host` may be reused when the call returns.
  virtual Status write(void* target, const void* host, int64_t bytes, void* stream) = 0;
  // Returns when the bytes have arrived.
  virtual Status read(void* host, const void* source, int64_t bytes, void* stream) = 0;
  virtual Status copy(void* target, const void* source, int64_t bytes, void* stream) = 0;
  // kResourceExhausted if there is no memory for the pieces.
  virtual Result<std::unique_ptr<Staging>> staging(int64_t piece_bytes, int pieces) = 0;
  // On the host its handle is null.
  virtual Result<std::unique_ptr<BackgroundStream>> background_stream() = 0;
  // Bytes that allocate() could still give, now.
  virtual Result<int64_t> available() = 0;
};

Memory& host_memory();

// The memory that a backend's ops work on. kUnavailable if its device is not there, kUnimplemented
// if the build lacks it.
Result<Memory*> backend_memory(Backend backend);

// Of the CUDA device 0; defined with the CUDA backend, or by its absence.
Result<Memory*> cuda_memory();

// An allocation that frees itself.
class Buffer {
 public:
  static Result<Buffer> allocate(Memory& memory, int64_t bytes);
  Buffer() = default;
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer();

  uint8_t* data() const { return static_cast<uint8_t*>(data_); }
  int64_t bytes() const { return bytes_; }

 private:
  Memory* memory_ = nullptr;
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace cachalot::ops
