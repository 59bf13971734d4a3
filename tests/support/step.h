// A step of several sequences with its caches, for tests: everything that an op must not read is
// 0xFF.
#pragma once

#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

#include "ops/kv.h"
#include "quant/block.h"
#include "tests/support/random.h"

namespace cachalot::test {

struct SequenceSpec {
  int64_t start = 0;  // position of the first row
  int64_t rows = 1;
  int64_t floor = 0;
};

// Pages of rows for S sequences, handed out in random order.
class Pages {
 public:
  Pages(Random& random, int64_t sequences, int64_t rows, int64_t page_rows, int64_t row_bytes) {
    const int64_t per_sequence = (rows + page_rows - 1) / page_rows;
    const int64_t count = sequences * per_sequence;
    memory_.assign(static_cast<size_t>(count * page_rows * row_bytes), 0xFF);
    std::vector<int64_t> order(static_cast<size_t>(count));
    std::iota(order.begin(), order.end(), int64_t{0});
    for (int64_t i = count - 1; i > 0; --i) {
      std::swap(order[static_cast<size_t>(i)],
                order[static_cast<size_t>(random.integer(0, i + 1))]);
    }
    for (int64_t page : order) {
      pointers_.push_back(memory_.data() + page * page_rows * row_bytes);
    }
    for (int64_t s = 0; s < sequences; ++s) {
      views_.push_back({pointers_.data() + s * per_sequence, page_rows, row_bytes});
    }
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  const ops::PagedRows* views() const { return views_.data(); }
  std::vector<uint8_t>& memory() { return memory_; }

 private:
  std::vector<uint8_t> memory_;
  std::vector<uint8_t*> pointers_;
  std::vector<ops::PagedRows> views_;
};

class TestStep {
 public:
  explicit TestStep(std::vector<SequenceSpec> specs) : specs_(std::move(specs)) {
    const auto s = static_cast<int64_t>(specs_.size());
    int64_t t = 0;
    for (const SequenceSpec& spec : specs_) {
      t += spec.rows;
    }
    position_ = Buffer(DType::kI32, {t});
    sequence_ = Buffer(DType::kI32, {t});
    row_begin_ = Buffer(DType::kI32, {s + 1});
    start_ = Buffer(DType::kI32, {s});
    floor_ = Buffer(DType::kI32, {s});
    is_image_ = Buffer(DType::kU8, {t});
    std::fill(is_image_.bytes.begin(), is_image_.bytes.end(), uint8_t{0});
    int32_t row = 0;
    for (size_t i = 0; i < specs_.size(); ++i) {
      ints(row_begin_)[i] = row;
      ints(start_)[i] = static_cast<int32_t>(specs_[i].start);
      ints(floor_)[i] = static_cast<int32_t>(specs_[i].floor);
      for (int64_t r = 0; r < specs_[i].rows; ++r, ++row) {
        ints(position_)[row] = static_cast<int32_t>(specs_[i].start + r);
        ints(sequence_)[row] = static_cast<int32_t>(i);
      }
    }
    ints(row_begin_)[s] = row;
  }

  ops::StepRows rows() const {
    ops::StepRows rows;
    rows.rows = position_.shape[0];
    rows.sequences = start_.shape[0];
    rows.position = position_.view();
    rows.sequence = sequence_.view();
    rows.row_begin = row_begin_.view();
    rows.start = start_.view();
    rows.is_image = is_image_.view();
    return rows;
  }
  int64_t count() const { return position_.shape[0]; }
  int64_t position(int64_t row) const { return ints(position_)[row]; }
  int64_t sequence(int64_t row) const { return ints(sequence_)[row]; }
  const std::vector<SequenceSpec>& specs() const { return specs_; }
  const Buffer& floor() const { return floor_; }
  Buffer& is_image() { return is_image_; }

 private:
  std::vector<SequenceSpec> specs_;
  Buffer position_, sequence_, row_begin_, start_, floor_, is_image_;
};

// Rings and fresh rows of a step; with `block` every sequence is a draft block of so many rows.
// Ring slots of positions that no query sees stay 0xFF, which decodes to NaN.
class TestWindow {
 public:
  TestWindow(Random& random, const TestStep& step, int64_t window, int64_t k, int64_t block = 0)
      : window_(window),
        block_(block),
        fresh_(DType::kU8, {step.count(), quant::window_row_bytes(k)}) {
    const int64_t bytes = quant::window_row_bytes(k);
    const auto fill = [&](uint8_t* row) {
      const Buffer x = random.normals(DType::kBF16, {k}, 0.7);
      quant::window_row_encode(x.floats().data(), k, row);
    };
    for (const SequenceSpec& spec : step.specs()) {
      memory_.emplace_back(static_cast<size_t>(window * bytes), uint8_t{0xFF});
      const int64_t reach = block > 0 ? spec.start - window : spec.start - window + 1;
      const int64_t low = std::max({int64_t{0}, spec.floor, reach});
      for (int64_t p = low; p < spec.start; ++p) {
        fill(memory_.back().data() + p % window * bytes);
      }
    }
    for (std::vector<uint8_t>& ring : memory_) {
      rings_.push_back(ring.data());
    }
    for (int64_t row = 0; row < step.count(); ++row) {
      fill(fresh_.bytes.data() + row * bytes);
    }
    floor_ = step.floor();
  }
  TestWindow(const TestWindow&) = delete;
  TestWindow& operator=(const TestWindow&) = delete;

  ops::WindowView view() const {
    ops::WindowView view;
    view.window = window_;
    view.block = block_;
    view.rings = rings_.data();
    view.fresh = fresh_.view();
    view.floor = floor_.view();
    return view;
  }
  Buffer& fresh() { return fresh_; }
  std::vector<std::vector<uint8_t>>& rings() { return memory_; }

 private:
  int64_t window_;
  int64_t block_;
  Buffer fresh_, floor_;
  std::vector<std::vector<uint8_t>> memory_;
  std::vector<uint8_t*> rings_;
};

// cos and sin for the rows' positions, base 10000.
inline Buffer rope_rows(const std::vector<int64_t>& positions, int64_t half) {
  const auto n = static_cast<int64_t>(positions.size());
  Buffer table(DType::kF32, {n, half, 2});
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(positions[static_cast<size_t>(row)]) *
                           std::pow(10000.0, -static_cast<double>(i) / static_cast<double>(half));
      table.set((row * half + i) * 2, static_cast<float>(std::cos(angle)));
      table.set((row * half + i) * 2 + 1, static_cast<float>(std::sin(angle)));
    }
  }
  return table;
}
inline Buffer rope_rows(const TestStep& step, int64_t half) {
  std::vector<int64_t> positions;
  for (int64_t row = 0; row < step.count(); ++row) {
    positions.push_back(step.position(row));
  }
  return rope_rows(positions, half);
}

}  // namespace cachalot::test
