#include "ops/host_rows.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "base/check.h"

namespace cachalot::ops {
namespace {

// A piece is gathered in less time than one launch of a large step takes, and copied while the next
// one is gathered.
constexpr int64_t kPieceBytes = int64_t{4} << 20;
constexpr int kPieces = 4;
// Rows of a thread: below, waking a second one costs more than the rows.
constexpr int64_t kGrain = 128;
// Rows are read from random places: so many are asked for before they are needed.
constexpr int64_t kAhead = 16;
constexpr int64_t kCacheLine = 64;

// One of the two arrays of a table.
struct Column {
  const uint8_t* from;
  uint8_t* to;  // of the device
  int64_t bytes;
};

Column column(const TensorView& table, const TensorView& rows, int64_t count) {
  return {static_cast<const uint8_t*>(table.data),
          static_cast<uint8_t*>(rows.data),
          count > 0 ? table.bytes() / count : 0};
}

void prefetch(const Column& column, int64_t row) {
  const uint8_t* at = column.from + row * column.bytes;
  for (int64_t i = 0; i < column.bytes; i += kCacheLine) {
    __builtin_prefetch(at + i);
  }
}

}  // namespace

Status HostRows::send(const Weight& table,
                      std::span<const int32_t> ids,
                      const Weight& rows,
                      void* stream) {
  CACHALOT_CHECK(rows.format == table.format && rows.in == table.in &&
                     rows.out == static_cast<int64_t>(ids.size()),
                 rows.out,
                 ids.size());
  const Column columns[] = {column(table.values, rows.values, table.out),
                            column(table.scales, rows.scales, table.out)};
  const auto count = static_cast<int64_t>(ids.size());
  const int64_t row_bytes = columns[0].bytes + columns[1].bytes;
  const int64_t piece_rows = std::max<int64_t>(1, kPieceBytes / std::max<int64_t>(row_bytes, 1));
  if (staging_ == nullptr) {
    CACHALOT_TRY(staging_, device_.staging(std::max(kPieceBytes, row_bytes), kPieces));
  }
  const auto known = [&](int64_t i) {
    const int32_t id = ids[static_cast<size_t>(i)];
    return id >= 0 && id < table.out;
  };
  for (int64_t begin = 0; begin < count; begin += piece_rows) {
    const int64_t n = std::min(piece_rows, count - begin);
    CACHALOT_TRY(uint8_t* const piece, staging_->next());
    uint8_t* const places[] = {piece, piece + n * columns[0].bytes};
    const auto gather = [&](int64_t from, int64_t end) {
      for (int64_t i = from; i < end; ++i) {
        if (const int64_t next = begin + i + kAhead; i + kAhead < end && known(next)) {
          prefetch(columns[0], ids[static_cast<size_t>(next)]);
          prefetch(columns[1], ids[static_cast<size_t>(next)]);
        }
        for (int c = 0; c < 2; ++c) {
          const auto bytes = static_cast<size_t>(columns[c].bytes);
          uint8_t* const to = places[c] + i * columns[c].bytes;
          if (bytes == 0) {
            continue;
          }
          if (known(begin + i)) {
            const int64_t id = ids[static_cast<size_t>(begin + i)];
            std::memcpy(to, columns[c].from + id * columns[c].bytes, bytes);
          } else {
            std::memset(to, 0, bytes);
          }
        }
      }
    };
    if (pool_ == nullptr) {
      gather(0, n);
    } else {
      pool_->parallel_for(n, kGrain, gather);
    }
    for (int c = 0; c < 2; ++c) {
      if (columns[c].bytes > 0) {
        CACHALOT_RETURN_IF_ERROR(staging_->send(
            columns[c].to + begin * columns[c].bytes, places[c], n * columns[c].bytes, stream));
      }
    }
  }
  return {};
}

}  // namespace cachalot::ops
