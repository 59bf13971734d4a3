// Attention over the window and the selected entries.
//
// Window rows are decoded once per call: per sequence, the visible part of the ring and the fresh
// rows lie in one buffer by position, so a query's window is a contiguous range of it. Then, if
// there are rows enough for all threads, a row is a task: it rotates its queries, decodes its
// selected entries and attends to them, all in memory of its thread. Few rows share the threads:
// phase 1 rotates and decodes, phase 2 runs tasks of (row, group of heads).
#include "ops/cpu/kernels.h"
#include "ops/cpu/parallel.h"
#include "ops/cpu/simd.h"
#include "quant/block.h"

namespace cachalot::ops::cpu {
namespace {

// Decoded window rows per pass over the sequences, unless one sequence needs more.
constexpr int64_t kWindowRows = 4096;
constexpr int64_t kLeastHeads = 8;
// Rows per thread from which on a row is one task; below, rows whose selected entries are decoded
// at a time.
constexpr int64_t kRowsPerThread = 4;
constexpr int64_t kSharedRows = 32;

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
    const int64_t begin = row_begin(first), rows = row_begin(last) - begin;
    if (rows >= kRowsPerThread * thread_count(ctx_)) {
      run_whole_rows(begin, rows);
    } else {
      for (int64_t row = 0; row < rows; row += kSharedRows) {
        run_shared_rows(begin + row, std::min(kSharedRows, rows - row));
      }
    }
    return last;
  }

 private:
  // Where a head of a row lies in q or o [T, heads * k].
  uint8_t* head_bytes(const TensorView& view, int64_t row, int64_t head) const {
    return static_cast<uint8_t*>(view.data) + (row * heads_ + head) * k_ * dtype_bytes(view.dtype);
  }

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

  // One head of a row's queries, rotated.
  void load_query(int64_t row, int64_t head, float* q) const {
    const int64_t half = args_.rope.dim(1);
    load_row(head_bytes(args_.q, row, head), args_.q.dtype, k_, q);
    rotate_row(q, k_, args_.rope.as<float>() + row * half * 2, half, 1.0f);
    round_row(q, k_, args_.q.dtype);
  }

  // The i-th selected entry of a row, if there is one.
  void load_entry(int64_t row, int64_t i, float* entry) const {
    const int32_t id = args_.selected.as<int32_t>()[row * selected_ + i];
    if (id >= 0) {
      decode_main_row(args_.main[args_.rows.sequence.as<int32_t>()[row]].row(id), k_, entry);
    }
  }

  // What attend_group needs for `heads` heads, in floats.
  int64_t group_floats(int64_t heads) const {
    return key_floats() + heads * padded(k_) + attend_work_floats(heads);
  }
  // Room for pointers to all keys of a row.
  int64_t key_floats() const {
    const int64_t keys = args_.window.window + args_.window.block + selected_;
    return (2 * keys + 3) / 4 * 4;
  }

  // Heads [head, head + count) of a row, whose queries and selected entries are loaded.
  void attend_group(int64_t row,
                    int64_t head,
                    int64_t count,
                    const float* q,
                    const float* entries,
                    float* memory) const {
    const int64_t depth = padded(k_), half = args_.rope.dim(1);
    const DType act = args_.q.dtype;
    auto** keys = reinterpret_cast<const float**>(memory);
    float* o = memory + key_floats();
    const int64_t n = list_keys(row, entries, keys);
    const HeadGroup heads = {q, args_.sink.as<float>() + head, count, k_, act};
    attend_heads(heads, keys, keys, n, o, o + count * depth);
    for (int64_t h = 0; h < count; ++h) {
      float* out = o + h * depth;
      round_row(out, k_, act);
      rotate_row(out, k_, args_.rope.as<float>() + row * half * 2, half, -1.0f);
      store_row(out, k_, head_bytes(args_.o, row, head + h), act);
    }
  }

  void run_whole_rows(int64_t first, int64_t rows) {
    Scratch scratch(ctx_);
    const int64_t depth = padded(k_);
    const int64_t floats = (heads_ + selected_) * depth + group_floats(heads_);
    parallel_rows(ctx_, scratch, rows, floats, [&](int64_t begin, int64_t end, float* memory) {
      float* q = memory;
      float* entries = q + heads_ * depth;
      for (int64_t row = first + begin; row < first + end; ++row) {
        for (int64_t head = 0; head < heads_; ++head) {
          load_query(row, head, q + head * depth);
        }
        for (int64_t i = 0; i < selected_; ++i) {
          load_entry(row, i, entries + i * depth);
        }
        attend_group(row, 0, heads_, q, entries, entries + selected_ * depth);
      }
    });
  }

  void run_shared_rows(int64_t first, int64_t rows) {
    Scratch scratch(ctx_);
    const int64_t depth = padded(k_);
    float* q = scratch.array<float>(rows * heads_ * depth);
    float* entries = scratch.array<float>(rows * selected_ * depth);
    parallel_for(ctx_, rows * (heads_ + selected_), 8, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t slot = i - rows * heads_;
        if (slot < 0) {
          load_query(first + i / heads_, i % heads_, q + i * depth);
        } else {
          load_entry(first + slot / selected_, slot % selected_, entries + slot * depth);
        }
      }
    });

    // Enough tasks for all threads, but no smaller groups than needed: a group reads every key.
    const int64_t wanted = ceil_div(4 * thread_count(ctx_), rows);
    const int64_t share = ceil_div(heads_, wanted);
    const int64_t group = std::min(heads_, std::max(kLeastHeads, (share + 3) / 4 * 4));
    const int64_t groups = ceil_div(heads_, group);
    parallel_rows(ctx_,
                  scratch,
                  rows * groups,
                  group_floats(group),
                  [&](int64_t begin, int64_t end, float* memory) {
                    for (int64_t i = begin; i < end; ++i) {
                      const int64_t row = i / groups, head = i % groups * group;
                      attend_group(first + row,
                                   head,
                                   std::min(group, heads_ - head),
                                   q + (row * heads_ + head) * depth,
                                   entries + row * selected_ * depth,
                                   memory);
                    }
                  });
  }

  // The decoded keys of a row: window positions ascending, then selected entries.
  int64_t list_keys(int64_t row, const float* entries, const float** keys) const {
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
    const int32_t* ids = selected_ == 0 ? nullptr : args_.selected.as<int32_t>() + row * selected_;
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
