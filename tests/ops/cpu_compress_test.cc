// The compressor of the CPU backend against the reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/support/compare.h"
#include "tests/support/compressor.h"
#include "tests/support/context.h"
#include "tests/support/step.h"

namespace cachalot::ops {
namespace {

using test::Buffer;
using test::close;
using test::CompressorInput;
using test::Pages;
using test::Random;
using test::same_bits;
using test::SequenceSpec;

constexpr DType kActs[] = {DType::kF32, DType::kBF16};

TEST(CpuCompressor, MatchesRef) {
  for (int64_t ratio : {1, 2}) {
    for (DType act : kActs) {
      CompressorInput in({{.start = 0, .rows = 9},
                          {.start = 5, .rows = 1},
                          {.start = 6, .rows = 2},
                          {.start = 3, .rows = 30}});
      in.ratio = ratio;
      in.act = act;
      Random random(4);
      fill(in, random);
      const Buffer want = run_pool(test::ref(), in), got = run_pool(test::cpu(), in);
      EXPECT_TRUE(close(got, want, test::row_tolerance(act)));
      EXPECT_TRUE(same_bits(run_pool(test::cpu(3), in), got));

      std::vector<std::vector<uint8_t>> caches;
      for (OpContext* ctx : {&test::ref(), &test::cpu()}) {
        Random pages(5);
        Pages main(pages, 4, 40, 7, quant::main_row_bytes(in.c));
        Pages index(pages, 4, 40, 5, quant::index_row_bytes(in.di));
        run_store(*ctx, in, want, main.views(), index.views());
        caches.push_back(main.memory());
        caches.back().insert(caches.back().end(), index.memory().begin(), index.memory().end());
      }
      EXPECT_LE(test::differing_share(caches[0], caches[1]),
                act == DType::kF32 ? test::kCodesF32 : test::kCodesBf16);
    }
  }
}

// Groups that pad a step to a fixed shape touch no page.
TEST(CpuCompressor, PaddingGroupsAreNotStored) {
  for (OpContext* ctx : {&test::ref(), &test::cpu()}) {
    CompressorInput in({{.start = 0, .rows = 9}});
    Random random(8);
    fill(in, random);
    const Buffer latent = run_pool(*ctx, in);
    const int64_t groups = in.group_entry.shape.elements();
    ASSERT_GT(groups, 0);
    std::fill_n(ints(in.group_entry), groups, -1);
    Pages main(random, 1, 16, 3, quant::main_row_bytes(in.c));
    Pages index(random, 1, 16, 3, quant::index_row_bytes(in.di));
    const std::vector<uint8_t> main_before = main.memory(), index_before = index.memory();
    run_store(*ctx, in, latent, main.views(), index.views());
    EXPECT_EQ(main.memory(), main_before);
    EXPECT_EQ(index.memory(), index_before);
  }
}

// a request's entries do not depend on who shares its batch.
TEST(CpuCompressor, A12_EntriesDoNotDependOnTheBatch) {
  const auto entries = [&](std::vector<SequenceSpec> specs, int64_t which) {
    CompressorInput in(std::move(specs));
    Random random(6);
    fill(in, random);
    // The request of 12 tokens has the same inputs in every batch.
    Random own(7);
    in.norm = own.normals(DType::kBF16, {in.c}, 0.1, 0.6);
    in.k_norm = own.normals(DType::kBF16, {in.di}, 0.1, 0.5);
    int64_t first = 0;
    for (int64_t s = 0; s < which; ++s) {
      first += in.step.specs()[static_cast<size_t>(s)].rows;
    }
    for (int64_t i = 0; i < 12 * in.c; ++i) {
      in.kv.set(first * in.c + i, static_cast<float>(own.normal()));
      in.gate.set(first * in.c + i, static_cast<float>(own.normal()));
    }
    int64_t group = 0;
    while (ints(in.group_sequence)[group] != which) {
      ++group;
    }
    for (int64_t i = 0; i < 6 * in.di; ++i) {
      in.key.set(group * in.di + i, static_cast<float>(own.normal()));
    }
    const auto s = static_cast<int64_t>(in.step.specs().size());
    Pages main(random, s, 16, 3, quant::main_row_bytes(in.c));
    Pages index(random, s, 16, 3, quant::index_row_bytes(in.di));
    run_store(test::cpu(), in, run_pool(test::cpu(), in), main.views(), index.views());
    std::vector<uint8_t> bytes;
    for (int64_t e = 0; e < 6; ++e) {
      const PagedRows& m = main.views()[which];
      const PagedRows& x = index.views()[which];
      bytes.insert(bytes.end(), m.row(e), m.row(e) + m.row_bytes);
      bytes.insert(bytes.end(), x.row(e), x.row(e) + x.row_bytes);
    }
    return bytes;
  };
  const SequenceSpec short_one{.start = 0, .rows = 12}, long_one{.start = 0, .rows = 23};
  const std::vector<uint8_t> alone = entries({short_one}, 0);
  EXPECT_EQ(entries({short_one, long_one}, 0), alone);
  EXPECT_EQ(entries({long_one, short_one}, 1), alone);
}

}  // namespace
}  // namespace cachalot::ops
