// Panels of B (kDepth x 2 vectors) are packed into L1 and met by all rows of A, six at a time: 12
// accumulators, two loads and six broadcasts per 12 fused multiply-adds.
#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "train/gemm.cc"
#include "hwy/foreach_target.h"
// Behind foreach_target.h, which sets the target that these are compiled for.
#include "hwy/highway.h"

#include <algorithm>

#include "base/math.h"
#include "train/gemm.h"

HWY_BEFORE_NAMESPACE();
namespace cachalot::train {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

constexpr int64_t kDepth = 256;
constexpr int64_t kTileRows = 6;

// Wide sets run at full width: results differ between instruction sets, not between runs.
template <class Real>
using Tag = hn::CappedTag<Real, 64 / sizeof(Real)>;

template <class Real>
constexpr int64_t lanes() {
  return static_cast<int64_t>(hn::MaxLanes(Tag<Real>()));
}
template <class Real>
constexpr int64_t panel_width() {
  return 2 * lanes<Real>();
}

template <class Real, int kRows>
HWY_NOINLINE void tile(int64_t depth,
                       const Real* a,
                       int64_t a_row,
                       int64_t a_column,
                       const Real* panel,
                       Real* c,
                       int64_t c_row,
                       int64_t columns,
                       bool accumulate) {
  const Tag<Real> d;
  constexpr int64_t kLanes = lanes<Real>(), kWidth = panel_width<Real>();
  hn::Vec<Tag<Real>> acc[kRows][2];
  for (int r = 0; r < kRows; ++r) {
    acc[r][0] = hn::Zero(d);
    acc[r][1] = hn::Zero(d);
  }
  for (int64_t k = 0; k < depth; ++k) {
    const auto b0 = hn::Load(d, panel + k * kWidth);
    const auto b1 = hn::Load(d, panel + k * kWidth + kLanes);
    const Real* column = a + k * a_column;
    for (int r = 0; r < kRows; ++r) {
      const auto v = hn::Set(d, column[r * a_row]);
      acc[r][0] = hn::MulAdd(v, b0, acc[r][0]);
      acc[r][1] = hn::MulAdd(v, b1, acc[r][1]);
    }
  }
  if (columns == kWidth) {
    for (int r = 0; r < kRows; ++r) {
      Real* row = c + r * c_row;
      if (accumulate) {
        acc[r][0] = hn::Add(acc[r][0], hn::LoadU(d, row));
        acc[r][1] = hn::Add(acc[r][1], hn::LoadU(d, row + kLanes));
      }
      hn::StoreU(acc[r][0], d, row);
      hn::StoreU(acc[r][1], d, row + kLanes);
    }
    return;
  }
  for (int r = 0; r < kRows; ++r) {
    alignas(64) Real row[kWidth];
    hn::Store(acc[r][0], d, row);
    hn::Store(acc[r][1], d, row + kLanes);
    for (int64_t j = 0; j < columns; ++j) {
      c[r * c_row + j] = accumulate ? c[r * c_row + j] + row[j] : row[j];
    }
  }
}

template <class Real>
using TileFunction =
    void (*)(int64_t, const Real*, int64_t, int64_t, const Real*, Real*, int64_t, int64_t, bool);

template <class Real>
constexpr TileFunction<Real> kTiles[kTileRows] = {
    tile<Real, 1>, tile<Real, 2>, tile<Real, 3>, tile<Real, 4>, tile<Real, 5>, tile<Real, 6>};

// B[k0 .. k0 + depth, j0 .. j0 + columns) as [depth, width], zeros behind `columns`.
template <class Real>
void pack(
    const Gemm<Real>& g, int64_t k0, int64_t depth, int64_t j0, int64_t columns, Real* panel) {
  constexpr int64_t kWidth = panel_width<Real>();
  const Real* b = g.b + k0 * g.b_row + j0 * g.b_column;
  if (columns < kWidth) {
    std::fill_n(panel, depth * kWidth, Real{0});
  }
  if (g.b_column == 1) {
    for (int64_t k = 0; k < depth; ++k) {
      std::copy_n(b + k * g.b_row, columns, panel + k * kWidth);
    }
    return;
  }
  for (int64_t j = 0; j < columns; ++j) {
    const Real* column = b + j * g.b_column;
    for (int64_t k = 0; k < depth; ++k) {
      panel[k * kWidth + j] = column[k * g.b_row];
    }
  }
}

// Rows [row, row_end) of panel `index`.
template <class Real>
void run_panel(const Gemm<Real>& g, int64_t index, int64_t row, int64_t row_end) {
  constexpr int64_t kWidth = panel_width<Real>();
  alignas(64) Real panel[kDepth * kWidth];
  const int64_t j0 = index * kWidth, columns = std::min(kWidth, g.n - j0);
  for (int64_t k0 = 0; k0 < g.k; k0 += kDepth) {
    const int64_t depth = std::min(kDepth, g.k - k0);
    pack(g, k0, depth, j0, columns, panel);
    for (int64_t i = row; i < row_end; i += kTileRows) {
      const int64_t rows = std::min(kTileRows, row_end - i);
      kTiles<Real>[rows - 1](depth,
                             g.a + i * g.a_row + k0 * g.a_column,
                             g.a_row,
                             g.a_column,
                             panel,
                             g.c + i * g.c_row + j0,
                             g.c_row,
                             columns,
                             g.accumulate || k0 > 0);
    }
  }
}

void panel_f32(const Gemm<float>& g, int64_t index, int64_t row, int64_t row_end) {
  run_panel(g, index, row, row_end);
}
void panel_f64(const Gemm<double>& g, int64_t index, int64_t row, int64_t row_end) {
  run_panel(g, index, row, row_end);
}
int64_t panel_width_f32() {
  return panel_width<float>();
}
int64_t panel_width_f64() {
  return panel_width<double>();
}

}  // namespace HWY_NAMESPACE
}  // namespace cachalot::train
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cachalot::train {

HWY_EXPORT(panel_f32);
HWY_EXPORT(panel_f64);
HWY_EXPORT(panel_width_f32);
HWY_EXPORT(panel_width_f64);

namespace {

constexpr int64_t kTasksPerThread = 4;
constexpr int64_t kLeastRows = 48;  // below this, packing a panel costs more than it saves

// body(panel, row, row_end) over all of C.
template <class Real, class Body>
void run(ThreadPool* pool, const Gemm<Real>& g, int64_t width, const Body& body) {
  if (g.m == 0 || g.n == 0) {
    return;
  }
  if (g.k == 0) {
    for (int64_t i = 0; !g.accumulate && i < g.m; ++i) {
      std::fill_n(g.c + i * g.c_row, g.n, Real{0});
    }
    return;
  }
  const int64_t panels = ceil_div(g.n, width);
  if (pool == nullptr || pool->threads() == 1) {
    for (int64_t panel = 0; panel < panels; ++panel) {
      body(panel, int64_t{0}, g.m);
    }
    return;
  }
  const int64_t chunks_wanted = ceil_div(kTasksPerThread * pool->threads(), panels);
  const int64_t rows = std::max(kLeastRows, ceil_div(g.m, chunks_wanted));
  const int64_t chunks = ceil_div(g.m, rows);
  pool->parallel_for_dynamic(panels * chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task % chunks * rows;
      body(task / chunks, row, std::min(g.m, row + rows));
    }
  });
}

}  // namespace

void gemm(ThreadPool* pool, const Gemm<float>& args) {
  run(pool,
      args,
      HWY_DYNAMIC_DISPATCH(panel_width_f32)(),
      [&](int64_t panel, int64_t row, int64_t end) {
        HWY_DYNAMIC_DISPATCH(panel_f32)(args, panel, row, end);
      });
}
void gemm(ThreadPool* pool, const Gemm<double>& args) {
  run(pool,
      args,
      HWY_DYNAMIC_DISPATCH(panel_width_f64)(),
      [&](int64_t panel, int64_t row, int64_t end) {
        HWY_DYNAMIC_DISPATCH(panel_f64)(args, panel, row, end);
      });
}

}  // namespace cachalot::train
#endif  // HWY_ONCE
