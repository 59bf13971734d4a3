// Rows of tables that are too large for a device's memory.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "ops/memory.h"
#include "ops/weight.h"

namespace cachalot::ops {

// Gathers rows in host memory and copies them to where the ops work, while the device is at other
// work. Not thread-safe.
class HostRows {
 public:
  // `pool` gathers; null: the calling thread does.
  HostRows(Memory& device, ThreadPool* pool) : device_(device), pool_(pool) {}

  // rows = rows ids[0], ids[1], .. of `table`, as stored (kFp8Row or kF32). `table` lies in host
  // memory, `rows` has values and scales of [ids, width] in the backend's memory; the copies are
  // ordered with the ops of `stream`. `ids` may be reused when the call returns. An id outside the
  // table gives a row of zeros. Errors: no pinned memory for the pieces, a failed copy.
  Status send(const Weight& table, std::span<const int32_t> ids, const Weight& rows, void* stream);

 private:
  Memory& device_;
  ThreadPool* pool_;
  std::unique_ptr<Staging> staging_;
};

}  // namespace cachalot::ops
