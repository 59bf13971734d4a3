// Inputs of the two compressor ops, and the ops on them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "ops/ops.h"
#include "tests/support/step.h"

namespace cachalot::test {

// A step with everything that the two compressor ops read. The caches start as 0xFF.
struct CompressorInput {
  explicit CompressorInput(std::vector<SequenceSpec> specs) : step(std::move(specs)) {}

  TestStep step;
  int64_t ratio = 2, c = 64, di = 32, half = 8;
  DType act = DType::kBF16;
  Buffer group_row, group_sequence, group_entry;
  Buffer kv, gate, open, norm, key, k_norm, rope;
  std::vector<const float*> open_pointers;

  int64_t groups() const { return group_row.shape[0]; }
  ops::GroupRows group_rows() const {
    return {ratio, groups(), group_row.view(), group_sequence.view(), group_entry.view()};
  }
};

inline void fill(CompressorInput& in, Random& random) {
  std::vector<int32_t> row, sequence, entry;
  std::vector<int64_t> positions;
  for (int64_t t = 0; t < in.step.count(); ++t) {
    const int64_t p = in.step.position(t);
    if ((p + 1) % in.ratio == 0) {
      row.push_back(static_cast<int32_t>(t));
      sequence.push_back(static_cast<int32_t>(in.step.sequence(t)));
      entry.push_back(static_cast<int32_t>(p / in.ratio));
      positions.push_back(p / in.ratio * in.ratio);
    }
  }
  const auto g = static_cast<int64_t>(row.size()), t = in.step.count();
  const auto list = [&](const std::vector<int32_t>& values) {
    Buffer buffer(DType::kI32, {g});
    std::copy(values.begin(), values.end(), ints(buffer));
    return buffer;
  };
  in.group_row = list(row);
  in.group_sequence = list(sequence);
  in.group_entry = list(entry);
  in.kv = random.activations(in.ratio == 2 ? DType::kF32 : in.act, {t, in.c});
  in.gate = random.normals(DType::kF32, {t, in.c}, 2.0);
  const auto s = static_cast<int64_t>(in.step.specs().size());
  in.open = random.normals(DType::kF32, {s, 2, in.c});
  for (int64_t i = 0; i < s; ++i) {
    in.open_pointers.push_back(in.open.view().as<float>() + i * 2 * in.c);
  }
  in.norm = random.normals(DType::kBF16, {in.c}, 0.1, 0.6);
  in.key = random.activations(in.act, {g, in.di});
  in.k_norm = random.normals(DType::kBF16, {in.di}, 0.1, 0.5);
  in.rope = rope_rows(positions, in.half);
}

inline Buffer run_pool(ops::OpContext& ctx, const CompressorInput& in) {
  Buffer latent(in.act, {in.groups(), in.c});
  ops::CompressPoolArgs args;
  args.groups = in.group_rows();
  args.rows = in.step.rows();
  args.kv = in.kv.view();
  if (in.ratio == 2) {
    args.gate = in.gate.view();
    args.open = in.open_pointers.data();
  }
  args.norm = in.norm.view();
  args.rms_eps = 1e-20f;
  args.latent = latent.view();
  const Status status = ops::compress_pool(ctx, args);
  EXPECT_TRUE(status.ok()) << status.message();
  return latent;
}

inline void run_store(ops::OpContext& ctx,
                      const CompressorInput& in,
                      const Buffer& latent,
                      const ops::PagedRows* main,
                      const ops::PagedRows* index) {
  ops::CompressStoreArgs args;
  args.groups = in.group_rows();
  args.latent = latent.view();
  args.key = in.key.view();
  args.k_norm = in.k_norm.view();
  args.rope = in.rope.view();
  args.rms_eps = 1e-20f;
  args.main = main;
  args.index = index;
  const Status status = ops::compress_store(ctx, args);
  EXPECT_TRUE(status.ok()) << status.message();
}

}  // namespace cachalot::test
