#include "ops/cpu/machine.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "base/clock.h"

#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/machine.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace cachalot::ops::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Eight accumulators cover the load latency.
uint32_t read_all(const uint32_t* data, int64_t count) {
  const hn::ScalableTag<uint32_t> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto a0 = hn::Zero(d), a1 = a0, a2 = a0, a3 = a0, a4 = a0, a5 = a0, a6 = a0, a7 = a0;
  for (int64_t i = 0; i + 8 * lanes <= count; i += 8 * lanes) {
    const uint32_t* p = data + i;
    a0 = hn::Xor(a0, hn::Load(d, p));
    a1 = hn::Xor(a1, hn::Load(d, p + lanes));
    a2 = hn::Xor(a2, hn::Load(d, p + 2 * lanes));
    a3 = hn::Xor(a3, hn::Load(d, p + 3 * lanes));
    a4 = hn::Xor(a4, hn::Load(d, p + 4 * lanes));
    a5 = hn::Xor(a5, hn::Load(d, p + 5 * lanes));
    a6 = hn::Xor(a6, hn::Load(d, p + 6 * lanes));
    a7 = hn::Xor(a7, hn::Load(d, p + 7 * lanes));
  }
  a0 =
      hn::Xor(hn::Xor(hn::Xor(a0, a1), hn::Xor(a2, a3)), hn::Xor(hn::Xor(a4, a5), hn::Xor(a6, a7)));
  return hn::GetLane(hn::SumOfLanes(d, a0));
}

// `rounds` rounds of twelve independent chains; returns the multiply-adds done.
int64_t multiply_add(int64_t rounds, float* sink) {
  const hn::ScalableTag<float> d;
  const auto x = hn::Set(d, 0.999f), y = hn::Set(d, 1e-3f);
  auto a0 = hn::Iota(d, 0.0f), a1 = hn::Iota(d, 1.0f), a2 = hn::Iota(d, 2.0f);
  auto a3 = hn::Iota(d, 3.0f), a4 = hn::Iota(d, 4.0f), a5 = hn::Iota(d, 5.0f);
  auto a6 = hn::Iota(d, 6.0f), a7 = hn::Iota(d, 7.0f), a8 = hn::Iota(d, 8.0f);
  auto a9 = hn::Iota(d, 9.0f), a10 = hn::Iota(d, 10.0f), a11 = hn::Iota(d, 11.0f);
  for (int64_t i = 0; i < rounds; ++i) {
    a0 = hn::MulAdd(a0, x, y);
    a1 = hn::MulAdd(a1, x, y);
    a2 = hn::MulAdd(a2, x, y);
    a3 = hn::MulAdd(a3, x, y);
    a4 = hn::MulAdd(a4, x, y);
    a5 = hn::MulAdd(a5, x, y);
    a6 = hn::MulAdd(a6, x, y);
    a7 = hn::MulAdd(a7, x, y);
    a8 = hn::MulAdd(a8, x, y);
    a9 = hn::MulAdd(a9, x, y);
    a10 = hn::MulAdd(a10, x, y);
    a11 = hn::MulAdd(a11, x, y);
  }
  const auto sum = hn::Add(hn::Add(hn::Add(a0, a1), hn::Add(a2, a3)),
                           hn::Add(hn::Add(hn::Add(a4, a5), hn::Add(a6, a7)),
                                   hn::Add(hn::Add(a8, a9), hn::Add(a10, a11))));
  *sink = hn::GetLane(hn::SumOfLanes(d, sum));
  return rounds * 12 * static_cast<int64_t>(hn::Lanes(d));
}

}  // namespace HWY_NAMESPACE
}  // namespace cachalot::ops::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cachalot::ops::cpu {
HWY_EXPORT(read_all);
HWY_EXPORT(multiply_add);

namespace {
constexpr int64_t kReadBytes = int64_t{512} << 20;
}  // namespace

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  // A lower bit is a better target.
  for (int64_t rest = hwy::SupportedTargets() & HWY_TARGETS; rest != 0; rest &= rest - 1) {
    names.emplace_back(hwy::TargetName(rest & -rest));
  }
  return names;
}

bool use_instruction_set(std::string_view name) {
  hwy::SetSupportedTargetsForTest(0);
  int64_t chosen = name.empty() ? hwy::SupportedTargets() : 0;
  for (int64_t rest = hwy::SupportedTargets() & HWY_TARGETS; rest != 0; rest &= rest - 1) {
    if (name == hwy::TargetName(rest & -rest)) {
      chosen = rest & -rest;
    }
  }
  if (chosen == 0) {
    return false;
  }
  hwy::GetChosenTarget().Update(chosen);
  return true;
}

ReadMeter::ReadMeter(ThreadPool& pool)
    : pool_(pool),
      memory_(new uint32_t[kReadBytes / 4 + 64]),
      data_(memory_.get()),
      share_(kReadBytes / 4 / pool.threads() / 1024 * 1024) {
  data_ += (64 - reinterpret_cast<uintptr_t>(data_) % 64) % 64 / 4;
  // Touched by the threads that read it.
  pool_.parallel_for(pool_.threads(), 1, [&](int64_t first, int64_t last) {
    std::memset(data_ + first * share_, 1, static_cast<size_t>((last - first) * share_) * 4);
  });
}

double ReadMeter::pass() {
  std::atomic<uint32_t> sink{0};
  const double begin = now_seconds();
  pool_.parallel_for(pool_.threads(), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      sink += HWY_DYNAMIC_DISPATCH(read_all)(data_ + i * share_, share_);
    }
  });
  return static_cast<double>(share_ * pool_.threads() * 4) / (now_seconds() - begin);
}

double ReadMeter::best_of(int passes) {
  double best = 0;
  for (int i = 0; i < passes; ++i) {
    best = std::max(best, pass());
  }
  return best;
}

double multiply_add_pass(ThreadPool& pool) {
  constexpr int64_t kRounds = int64_t{1} << 22;
  std::vector<float> sink(static_cast<size_t>(pool.threads()) * 16);
  std::atomic<int64_t> done{0};
  const double begin = now_seconds();
  pool.parallel_for(pool.threads(), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      done += HWY_DYNAMIC_DISPATCH(multiply_add)(kRounds, &sink[static_cast<size_t>(i) * 16]);
    }
  });
  return static_cast<double>(done.load()) / (now_seconds() - begin);
}

double best_multiply_add_rate(ThreadPool& pool, int passes) {
  double best = 0;
  for (int i = 0; i < passes; ++i) {
    best = std::max(best, multiply_add_pass(pool));
  }
  return best;
}

}  // namespace cachalot::ops::cpu
#endif  // HWY_ONCE
