// What ops::HostRows must do with the memory of any backend.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "ops/host_rows.h"
#include "tests/support/random.h"

namespace cachalot::test {

// Rows of both formats arrive in the order of their ids: none, a few, and more than all pieces
// hold; call after call, without waiting for the copies before.
inline void check_host_rows(ops::Memory& memory, ThreadPool* pool) {
  Random random(12);
  ops::HostRows sender(memory, pool);
  for (ops::WeightFormat format : {ops::WeightFormat::kFp8Row, ops::WeightFormat::kF32}) {
    const WeightBuffer table = random_weight(random, format, 900, 256, 0.1);
    struct Call {
      std::vector<int32_t> ids;
      ops::Buffer values, scales;
    };
    std::vector<Call> calls;
    const ops::Weight source = table.view();
    const int64_t value_bytes = source.values.bytes() / source.out;
    const int64_t scale_bytes = source.scales.empty() ? 0 : source.scales.bytes() / source.out;
    for (int64_t n : {1, 0, 24, 70'001, 129, 20'000}) {
      Call call;
      for (int64_t i = 0; i < n; ++i) {
        // Some lie outside of the table.
        call.ids.push_back(static_cast<int32_t>(random.integer(-2, 903)));
      }
      call.values = std::move(*ops::Buffer::allocate(memory, n * value_bytes));
      call.scales = std::move(*ops::Buffer::allocate(memory, n * scale_bytes));
      ops::Weight rows = source;
      rows.out = n;
      rows.values = TensorView(call.values.data(), source.values.dtype, {n, 256}, memory.device());
      if (scale_bytes > 0) {
        rows.scales = TensorView(
            call.scales.data(), source.scales.dtype, {n, source.scales.dim(1)}, memory.device());
      }
      ASSERT_TRUE(sender.send(source, call.ids, rows, nullptr).ok());
      calls.push_back(std::move(call));
    }
    for (const Call& call : calls) {
      const auto same = [&](const ops::Buffer& got, const TensorView& want, int64_t bytes) {
        std::vector<uint8_t> copy(call.ids.size() * static_cast<size_t>(bytes));
        const auto size = static_cast<int64_t>(copy.size());
        ASSERT_TRUE(memory.read(copy.data(), got.data(), size, nullptr).ok());
        for (size_t i = 0; i < copy.size(); ++i) {
          const auto row = static_cast<int64_t>(i) / bytes;
          const int64_t id = call.ids[static_cast<size_t>(row)];
          const bool known = id >= 0 && id < source.out;
          const auto* data = static_cast<const uint8_t*>(want.data);
          ASSERT_EQ(copy[i], known ? data[id * bytes + static_cast<int64_t>(i) % bytes] : 0)
              << "row " << row << " of " << call.ids.size() << ", id " << id;
        }
      };
      same(call.values, source.values, value_bytes);
      same(call.scales, source.scales, scale_bytes);
    }
  }
}

}  // namespace cachalot::test
