// Index scores and the selection of entries and candidate blocks.
//
// Rows are handled in blocks. Scoring splits into tasks of (run of rows, tile of entries): a run is
// a stretch of rows of one sequence, which share the decoded keys of the tile; a consumer's row is
// a run of its own, because its entries are its own candidates. Rows whose competing entries all
// fit into the selection are not scored.
#include <cmath>
#include <vector>

#include "ops/cpu/kernels.h"
#include "ops/cpu/parallel.h"
#include "ops/cpu/select.h"
#include "ops/cpu/simd.h"

namespace cachalot::ops::cpu {
namespace {

constexpr int64_t kBlockRows = 16;
constexpr int64_t kBlockScores = 4 << 20;

// One row of a block.
struct QueryRow {
  int64_t row = 0;
  int64_t sequence = 0;
  int64_t visible = 0;
  int64_t count = 0;           // entries that compete
  int32_t* entries = nullptr;  // consumer: their ids; else null: 0, 1, ... count - 1
  bool scored = false;
  float* q = nullptr;        // [padded(DI), padded_heads(HI)], if scored
  float* weights = nullptr;  // [padded_heads(HI)]
  float* scores = nullptr;   // [count]
};

struct Run {
  size_t begin = 0;
  size_t end = 0;
  int64_t count = 0;  // entries of the longest row
  int64_t first_task = 0;
};

class Selector {
 public:
  Selector(OpContext& ctx, const IndexSelectArgs& args)
      : ctx_(ctx),
        args_(args),
        heads_(args.w.dim(1)),
        dim_(args.q.dim(1) / heads_),
        tile_(index_tile(dim_)) {}

  // Handles rows from `first`; returns the first row behind the block.
  int64_t run_block(int64_t first) {
    Scratch scratch(ctx_);
    rows_.clear();
    runs_.clear();
    int64_t total = 0, next = first;
    for (; next < args_.rows.rows && next < first + kBlockRows; ++next) {
      const int64_t visible = visible_entries(next);
      if (next > first && total + visible > kBlockScores) {
        break;
      }
      total += visible;
      add_row(scratch, next, visible);
    }
    build_runs(scratch);
    prepare_queries(scratch);
    score();
    select(scratch);
    return next;
  }

 private:
  bool consumer() const { return !args_.candidates.empty(); }
  bool source() const { return !args_.candidates_out.empty(); }

  int64_t visible_entries(int64_t row) const {
    return (args_.rows.position.as<int32_t>()[row] + int64_t{1}) / args_.ratio;
  }

  void add_row(Scratch& scratch, int64_t row, int64_t visible) {
    QueryRow q;
    q.row = row;
    q.sequence = args_.rows.sequence.as<int32_t>()[row];
    q.visible = visible;
    q.count = visible;
    if (consumer()) {
      const int64_t width = args_.candidates.dim(1), block = args_.candidate_block;
      const int32_t* ids = args_.candidates.as<int32_t>() + row * width;
      q.entries = scratch.array<int32_t>(std::min(width * block, visible));
      q.count = 0;
      for (int64_t i = 0; i < width; ++i) {
        if (ids[i] < 0) {
          continue;
        }
        const int64_t end = std::min((ids[i] + int64_t{1}) * block, visible);
        for (int64_t entry = ids[i] * block; entry < end; ++entry) {
          q.entries[q.count++] = static_cast<int32_t>(entry);
        }
      }
    }
    q.scored = q.count > args_.selected.dim(1);
    if (source()) {
      const int64_t blocks = ceil_div(visible, args_.candidate_block);
      q.scored = q.scored || blocks > args_.candidates_out.dim(1);
    }
    rows_.push_back(q);
  }

  void build_runs(Scratch& scratch) {
    tasks_ = 0;
    for (size_t i = 0; i < rows_.size();) {
      if (!rows_[i].scored) {
        ++i;
        continue;
      }
      Run run{i, i + 1, rows_[i].count, tasks_};
      while (!consumer() && run.end < rows_.size() && rows_[run.end].scored &&
             rows_[run.end].sequence == rows_[i].sequence) {
        run.count = std::max(run.count, rows_[run.end++].count);
      }
      for (size_t r = run.begin; r < run.end; ++r) {
        // A tile is scored for all rows of the run, also where an earlier row sees less.
        rows_[r].scores = scratch.array<float>(run.count);
        rows_[r].q = scratch.array<float>(padded(dim_) * padded_heads(heads_));
        rows_[r].weights = scratch.array<float>(padded_heads(heads_));
      }
      tasks_ += ceil_div(run.count, tile_);
      i = run.end;
      runs_.push_back(run);
    }
  }

  // Rotates and quantizes the queries of the rows that are scored, heads side by side.
  void prepare_queries(Scratch& scratch) {
    if (runs_.empty()) {
      return;
    }
    const int64_t half = args_.rope.dim(1), columns = padded_heads(heads_);
    const DType act = args_.q.dtype;
    const int64_t bytes = dtype_bytes(act);
    const float scale =
        1.0f / std::sqrt(static_cast<float>(dim_)) / std::sqrt(static_cast<float>(heads_));
    const auto n = static_cast<int64_t>(rows_.size()) * columns;
    parallel_rows(ctx_, scratch, n, padded(dim_), [&](int64_t begin, int64_t end, float* head) {
      for (int64_t i = begin; i < end; ++i) {
        const QueryRow& row = rows_[static_cast<size_t>(i / columns)];
        const int64_t h = i % columns;
        if (!row.scored) {
          continue;
        }
        row.weights[h] = 0;
        std::fill(head, head + padded(dim_), 0.0f);
        if (h < heads_) {
          const int64_t at = row.row * heads_ + h;
          load_row(static_cast<const uint8_t*>(args_.q.data) + at * dim_ * bytes, act, dim_, head);
          rotate_row(head, dim_, args_.rope.as<float>() + row.row * half * 2, half, 1.0f);
          round_row(head, dim_, act);
          fp4_index_round_row(head, dim_);
          arrange_row(head, dim_, RowOrder::kNibbles);
          float weight[kPad];
          load_row(static_cast<const uint8_t*>(args_.w.data) + at * bytes, act, 1, weight);
          row.weights[h] = weight[0] * scale;
        }
        for (int64_t k = 0; k < padded(dim_); ++k) {
          row.q[k * columns + h] = head[k];
        }
      }
    });
  }

  void score() {
    parallel_tasks(ctx_, tasks_, [&](int64_t task) {
      size_t at = runs_.size() - 1;
      while (task < runs_[at].first_task) {
        --at;
      }
      const Run& run = runs_[at];
      const int64_t begin = (task - run.first_task) * tile_;
      const int64_t count = std::min(tile_, run.count - begin);
      const QueryRow& lead = rows_[run.begin];
      const PagedRows& pages = args_.index[lead.sequence];
      const uint8_t* entries[kIndexTileFloats / kPad];
      for (int64_t e = 0; e < count; ++e) {
        entries[e] = pages.row(lead.entries == nullptr ? begin + e : lead.entries[begin + e]);
      }
      const float* q[kBlockRows];
      const float* weights[kBlockRows];
      float* scores[kBlockRows];
      int64_t n = 0;
      for (size_t r = run.begin; r < run.end; ++r, ++n) {
        q[n] = rows_[r].q;
        weights[n] = rows_[r].weights;
        scores[n] = rows_[r].scores + begin;
      }
      score_entries({q, weights, n, heads_, dim_}, entries, count, scores);
    });
  }

  void select(Scratch& scratch) {
    int64_t most = 0;
    for (const QueryRow& row : rows_) {
      most = std::max(most, row.count);
    }
    // Work words of the selection and block scores.
    const auto n = static_cast<int64_t>(rows_.size());
    parallel_rows(ctx_, scratch, n, 2 * most, [&](int64_t begin, int64_t end, float* memory) {
      for (int64_t i = begin; i < end; ++i) {
        const QueryRow& row = rows_[static_cast<size_t>(i)];
        auto* work = reinterpret_cast<uint32_t*>(memory);
        if (source()) {
          publish_candidates(row, memory + most, work);
        }
        const int64_t k = args_.selected.dim(1);
        int32_t* out = args_.selected.as<int32_t>() + row.row * k;
        int64_t count = row.count;
        if (row.scored) {
          count = select_best(row.scores, row.count, k, out, work);
        } else {
          for (int64_t e = 0; e < count; ++e) {
            out[e] = static_cast<int32_t>(e);
          }
        }
        for (int64_t e = 0; row.entries != nullptr && e < count; ++e) {
          out[e] = row.entries[out[e]];
        }
        std::fill(out + count, out + k, -1);
      }
    });
  }

  void publish_candidates(const QueryRow& row, float* best, uint32_t* work) {
    const int64_t width = args_.candidates_out.dim(1), block = args_.candidate_block;
    const int64_t blocks = ceil_div(row.visible, block);
    int32_t* out = args_.candidates_out.as<int32_t>() + row.row * width;
    int64_t count = std::min(blocks, width);
    if (blocks > width) {
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t end = std::min((b + 1) * block, row.visible);
        best[b] = *std::max_element(row.scores + b * block, row.scores + end);
      }
      best[blocks - 1] = INFINITY;
      count = select_best(best, blocks, width, out, work);
    } else {
      for (int64_t b = 0; b < count; ++b) {
        out[b] = static_cast<int32_t>(b);
      }
    }
    std::fill(out + count, out + width, -1);
  }

  OpContext& ctx_;
  const IndexSelectArgs& args_;
  int64_t heads_;
  int64_t dim_;
  int64_t tile_;
  std::vector<QueryRow> rows_;
  std::vector<Run> runs_;
  int64_t tasks_ = 0;
};

}  // namespace

Status index_select(OpContext& ctx, const IndexSelectArgs& args) {
  Selector selector(ctx, args);
  for (int64_t row = 0; row < args.rows.rows;) {
    row = selector.run_block(row);
  }
  return {};
}

}  // namespace cachalot::ops::cpu
