#include "tensor/arena.h"

#include <algorithm>
#include <cstdlib>

namespace cachalot {

namespace {
constexpr int64_t kAlign = 64;

int64_t aligned(int64_t bytes) {
  return (std::max<int64_t>(bytes, 1) + kAlign - 1) / kAlign * kAlign;
}
}  // namespace

void Arena::Free::operator()(uint8_t* memory) const {
  if (owned) {
    std::free(memory);
  }
}

Arena::Arena(void* memory, int64_t bytes, Device device) : block_bytes_(0), device_(device) {
  CACHALOT_CHECK(reinterpret_cast<uintptr_t>(memory) % kAlign == 0, bytes);
  blocks_.push_back(
      {std::unique_ptr<uint8_t[], Free>(static_cast<uint8_t*>(memory), Free{false}), bytes});
}

bool Arena::fits(int64_t bytes) const {
  return block_bytes_ > 0 || used_ + aligned(bytes) <= blocks_[0].bytes;
}

void* Arena::allocate_bytes(int64_t bytes) {
  CACHALOT_CHECK(fits(bytes), bytes, used_);
  bytes = aligned(bytes);
  while (current_ < blocks_.size() && used_ + bytes > blocks_[current_].bytes) {
    ++current_;
    used_ = 0;
  }
  if (current_ == blocks_.size()) {
    const int64_t size = std::max(bytes, block_bytes_);
    auto* memory = static_cast<uint8_t*>(std::aligned_alloc(kAlign, static_cast<size_t>(size)));
    CACHALOT_CHECK(memory != nullptr, size);
    blocks_.push_back({std::unique_ptr<uint8_t[], Free>(memory, Free{true}), size});
    used_ = 0;
  }
  void* result = blocks_[current_].memory.get() + used_;
  used_ += bytes;
  return result;
}

}  // namespace cachalot
