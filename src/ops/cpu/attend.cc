// Attention over the window and the selected entries.
//
// Window rows are decoded once per call: per sequence, the visible part of the ring and the fresh
// rows lie in one buffer by position, so a query's window is a contiguous range of it. Then, for
// chunks of queries: phase 1 rotates the queries and decodes their selected entries; phase 2 runs
// tasks of (query, group of heads). Prefill and decode differ only in how many heads form a group.
#include "ops/cpu/kernels.h"
#include "ops/cpu/parallel.h"
#include "ops/cpu/simd.h"
#include "quant/block.h"

namespace cachalot::ops::cpu {
namespace {

// Decoded window rows per pass over the sequences, unless one sequence needs more.
constexpr int64_t kWindowRows = 4096;
constexpr int64_t kLeastHeads = 8;

class Attention {
 public:
  Attention(OpContext& ctx, const AttendArgs& args)
      : ctx_(ctx),
        args_(args),
        heads_(args.sink.dim(0)),
        k_(args.q.dim(1) / heads_),
        selected_(args.main == nullptr ? 0 : args.selected.dim(1)) {}

  // Handles sequences from `first` on; returns the first that it left out.
  int64_t run(int64_t first) {
    Scratch scratch(ctx_);
    int64_t last = first, total = 0;
    offsets_ = scratch.array<int64_t>(args_.rows.sequences);
    lows_ = scratch.array<int64_t>(args_.rows.sequences);
    for (; last < args_.rows.sequences; ++last) {
      const int64_t start = args_.rows.start.as<int32_t>()[last];
      const int64_t floor = args_.window.floor.as<int32_t>()[last];
      // Positions below the window of the first row are seen by no row.
      const int64_t low = std::min(
          start, window_range(args_.window.window, args_.window.block, floor, start, start).first);
      const int64_t rows = start - low + row_begin(last + 1) - row_begin(last);
      if (last > first && total + rows > kWindowRows) {
        break;
      }
      offsets_[last] = total;
      lows_[last] = low;
      total += rows;
    }
    window_ = scratch.array<float>(total * padded(k_));
    for (int64_t s = first; s < last; ++s) {
      decode_window(s);
    }
    const int64_t end = row_begin(last);
    const int64_t chunk = std::clamp<int64_t>(2 * thread_count(ctx_), 8, 32);
    for (int64_t row = row_begin(first); row < end; row += chunk) {
      run_rows(row, std::min(chunk, end - row));
    }
    return last;
  }

 private:
  int64_t row_begin(int64_t s) const { return args_.rows.row_begin.as<int32_t>()[s]; }

  void decode_window(int64_t s) {
    const int64_t start = args_.rows.start.as<int32_t>()[s], low = lows_[s];
    const int64_t bytes = quant::window_row_bytes(k_);
    const int64_t old = start - low, rows = old + row_begin(s + 1) - row_begin(s);
    float* out = window_ + offsets_[s] * padded(k_);
    parallel_for(ctx_, rows, 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const uint8_t* row =
            i < old ? args_.window.rings[s] + (low + i) % args_.window.window * bytes
                    : args_.window.fresh.as<uint8_t>() + (row_begin(s) + i - old) * bytes;
        decode_window_row(row, k_, out + i * padded(k_));
      }
    });
  }

  void run_rows(int64_t first, int64_t rows) {
    Scratch scratch(ctx_);
    const int64_t depth = padded(k_), half = args_.rope.dim(1);
    const DType act = args_.q.dtype;
    const int64_t bytes = k_ * dtype_bytes(act);
    float* q = scratch.array<float>(rows * heads_ * depth);
    float* entries = scratch.array<float>(rows * selected_ * depth);
    const int32_t* ids =
        selected_ == 0 ? nullptr : args_.selected.as<int32_t>() + first * selected_;

    parallel_for(ctx_, rows * (heads_ + selected_), 8, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (i < rows * heads_) {
          const int64_t row = first + i / heads_;
          float* head = q + i * depth;
          const auto* source = static_cast<const uint8_t*>(args_.q.data);
          load_row(source + (first * heads_ + i) * bytes, act, k_, head);
          rotate_row(head, k_, args_.rope.as<float>() + row * half * 2, half, 1.0f);
          round_row(head, k_, act);
          continue;
        }
        const int64_t slot = i - rows * heads_;
        if (ids[slot] >= 0) {
          const int64_t s = args_.rows.sequence.as<int32_t>()[first + slot / selected_];
          decode_main_row(args_.main[s].row(ids[slot]), k_, entries + slot * depth);
        }
      }
    });

    // Enough tasks for all threads, but no smaller groups than needed: a group reads every key.
    const int64_t wanted = (4 * thread_count(ctx_) + rows - 1) / rows;
    const int64_t share = (heads_ + wanted - 1) / wanted;
    const int64_t group = std::min(heads_, std::max(kLeastHeads, (share + 3) / 4 * 4));
    const int64_t groups = (heads_ + group - 1) / group;
    const int64_t most_keys = args_.window.window + args_.window.block + selected_;
    const int64_t floats = group * depth + attend_work_floats(group) + 2 * most_keys + 2;
    parallel_rows(
        ctx_, scratch, rows * groups, floats, [&](int64_t begin, int64_t end, float* memory) {
          auto** keys = reinterpret_cast<const float**>(memory);
          float* o = memory + (2 * most_keys + 3) / 4 * 4;
          float* work = o + group * depth;
          for (int64_t i = begin; i < end; ++i) {
            const int64_t row = i / groups, head = i % groups * group;
            const int64_t count = std::min(group, heads_ - head);
            const int64_t n = list_keys(
                first + row, ids + row * selected_, entries + row * selected_ * depth, keys);
            const HeadGroup heads = {
                q + (row * heads_ + head) * depth, args_.sink.as<float>() + head, count, k_, act};
            attend_heads(heads, keys, n, o, work);
            for (int64_t h = 0; h < count; ++h) {
              float* out = o + h * depth;
              round_row(out, k_, act);
              rotate_row(out, k_, args_.rope.as<float>() + (first + row) * half * 2, half, -1.0f);
              auto* target =
                  static_cast<uint8_t*>(args_.o.data) + ((first + row) * heads_ + head + h) * bytes;
              store_row(out, k_, target, act);
            }
          }
        });
  }

  // The decoded keys of a row: window positions ascending, then selected entries.
  int64_t list_keys(int64_t row,
                    const int32_t* ids,
                    const float* entries,
                    const float** keys) const {
    const int64_t s = args_.rows.sequence.as<int32_t>()[row];
    const int64_t p = args_.rows.position.as<int32_t>()[row];
    const WindowRange seen = window_range(args_.window.window,
                                          args_.window.block,
                                          args_.window.floor.as<int32_t>()[s],
                                          args_.rows.start.as<int32_t>()[s],
                                          p);
    int64_t n = 0;
    for (int64_t position = seen.first; position <= seen.last; ++position) {
      keys[n++] = window_ + (offsets_[s] + position - lows_[s]) * padded(k_);
    }
    for (int64_t i = 0; i < selected_; ++i) {
      if (ids[i] >= 0) {
        keys[n++] = entries + i * padded(k_);
      }
    }
    return n;
  }

  OpContext& ctx_;
  const AttendArgs& args_;
  int64_t heads_;
  int64_t k_;
  int64_t selected_;
  int64_t* offsets_ = nullptr;  // [S] first decoded row of a sequence
  int64_t* lows_ = nullptr;     // [S] its position
  float* window_ = nullptr;     // decoded window rows
};

}  // namespace

Status attend(OpContext& ctx, const AttendArgs& args) {
  Attention attention(ctx, args);
  for (int64_t s = 0; s < args.rows.sequences;) {
    s = attention.run(s);
  }
  return {};
}

}  // namespace cachalot::ops::cpu
