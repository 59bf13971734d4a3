// Window rows, compressor, index selection and attention of the CPU backend against the reference,
// and the known faults of such kernels.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>

#include "tests/support/compare.h"
#include "tests/support/context.h"
#include "tests/support/random.h"
#include "tests/support/step.h"

namespace cachalot::ops {
namespace {

using test::Buffer;
using test::close;
using test::Pages;
using test::Random;
using test::same_bits;
using test::SequenceSpec;
using test::TestStep;
using test::TestWindow;

constexpr DType kActs[] = {DType::kF32, DType::kBF16};

int32_t* ints(const Buffer& buffer) {
  return buffer.view().as<int32_t>();
}

// The bytes of some rows of a buffer.
Buffer part(const Buffer& all, int64_t begin, int64_t count) {
  Shape shape = all.shape;
  shape.extent[0] = count;
  Buffer result(all.dtype, shape);
  std::memcpy(result.bytes.data(), all.view().rows(begin, count).data, result.bytes.size());
  return result;
}

// RoPE table
// ---------------------------------------------------------------------------------------

TEST(CpuRopeTable, MatchesRef) {
  Buffer position(DType::kI32, {6}), frequency(DType::kF32, {32});
  const int32_t positions[] = {0, 1, 127, 4096, 65537, 1048575};
  std::copy_n(positions, 6, ints(position));
  for (int64_t i = 0; i < 32; ++i) {
    frequency.set(i, std::pow(160000.0f, -static_cast<float>(i) / 32.0f));
  }
  const auto run = [&](OpContext& ctx) {
    Buffer table(DType::kF32, {6, 32, 2});
    EXPECT_TRUE(
        rope_table(
            ctx,
            {.position = position.view(), .frequency = frequency.view(), .table = table.view()})
            .ok());
    return table;
  };
  EXPECT_TRUE(same_bits(run(test::cpu()), run(test::ref())));
}

// Window rows
// --------------------------------------------------------------------------------------

struct QkvOutput {
  Buffer r, fresh;
};

TEST(CpuQkvFinish, MatchesRef) {
  Random random(1);
  struct Case {
    int64_t t, q, k, half;
  };
  for (const Case& c :
       {Case{1, 64, 32, 4}, {5, 96, 64, 8}, {70, 128, 96, 16}, {3, 1280, 512, 32}}) {
    for (DType act : kActs) {
      const Buffer t = random.activations(act, {c.t, c.q}),
                   kv = random.activations(act, {c.t, c.k});
      const Buffer q_norm = random.normals(DType::kBF16, {c.q}, 0.1, 1.0);
      const Buffer kv_norm = random.normals(DType::kF32, {c.k}, 0.1, 0.4);
      const Buffer rope = test::rope_rows(TestStep({{.start = 1000, .rows = c.t}}), c.half);
      const auto run = [&](OpContext& ctx, int64_t begin, int64_t count) {
        QkvOutput out{Buffer(act, {count, c.q}),
                      Buffer(DType::kU8, {count, quant::window_row_bytes(c.k)})};
        QkvFinishArgs args;
        args.t = t.view().rows(begin, count);
        args.q_norm = q_norm.view();
        args.kv = kv.view().rows(begin, count);
        args.kv_norm = kv_norm.view();
        args.rope = rope.view().rows(begin, count);
        args.rms_eps = 1e-20f;
        args.r = out.r.view();
        args.fresh = out.fresh.view();
        EXPECT_TRUE(qkv_finish(ctx, args).ok());
        return out;
      };
      const QkvOutput got = run(test::cpu(), 0, c.t), want = run(test::ref(), 0, c.t);
      EXPECT_TRUE(close(got.r, want.r, test::row_tolerance(act)));
      EXPECT_LE(test::differing_share(got.fresh.bytes, want.fresh.bytes),
                act == DType::kF32 ? test::kCodesF32 : test::kCodesBf16);
      const QkvOutput last = run(test::cpu(3), c.t - 1, 1);
      EXPECT_TRUE(same_bits(last.r, part(got.r, c.t - 1, 1)));
      EXPECT_TRUE(same_bits(last.fresh, part(got.fresh, c.t - 1, 1)));
    }
  }
}

// Rows without a query, as the drafter's context has them, get the same window rows.
TEST(CpuQkvFinish, WindowRowsAlone) {
  Random random(4);
  for (DType act : kActs) {
    const Buffer t = random.activations(act, {5, 96}), kv = random.activations(act, {5, 64});
    const Buffer q_norm = random.normals(DType::kBF16, {96}, 0.1, 1.0);
    const Buffer kv_norm = random.normals(DType::kBF16, {64}, 0.1, 0.4);
    const Buffer rope = test::rope_rows(TestStep({{.start = 1000, .rows = 5}}), 8);
    for (OpContext* ctx : {&test::ref(), &test::cpu()}) {
      Buffer r(act, {5, 96}), with_query(DType::kU8, {5, quant::window_row_bytes(64)});
      Buffer alone = with_query;
      QkvFinishArgs args{.t = t.view(),
                         .q_norm = q_norm.view(),
                         .kv = kv.view(),
                         .kv_norm = kv_norm.view(),
                         .rope = rope.view(),
                         .rms_eps = 1e-20f,
                         .r = r.view(),
                         .fresh = with_query.view()};
      EXPECT_TRUE(qkv_finish(*ctx, args).ok());
      args.t = args.q_norm = args.r = {};
      args.fresh = alone.view();
      EXPECT_TRUE(qkv_finish(*ctx, args).ok());
      EXPECT_TRUE(same_bits(alone, with_query));
    }
  }
}

TEST(CpuWindowCommit, MatchesRef) {
  Random random(2);
  for (int64_t window : {4, 8, 128}) {
    const TestStep step(
        {{.start = 0, .rows = 3}, {.start = 7, .rows = 20}, {.start = 130, .rows = 1}});
    Buffer accepted(DType::kI32, {3});
    const int32_t counts[] = {2, 19, 0};
    std::copy_n(counts, 3, ints(accepted));
    std::vector<std::vector<uint8_t>> results;
    for (OpContext* ctx : {&test::ref(), &test::cpu()}) {
      Random same(3);
      TestWindow rings(same, step, window, 64);
      EXPECT_TRUE(
          window_commit(*ctx,
                        {.rows = step.rows(), .window = rings.view(), .accepted = accepted.view()})
              .ok());
      std::vector<uint8_t> all;
      for (const std::vector<uint8_t>& ring : rings.rings()) {
        all.insert(all.end(), ring.begin(), ring.end());
      }
      results.push_back(all);
    }
    EXPECT_EQ(results[0], results[1]);
  }
}

// Compressor
// ---------------------------------------------------------------------------------------

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
  GroupRows group_rows() const {
    return {ratio, groups(), group_row.view(), group_sequence.view(), group_entry.view()};
  }
};

void fill(CompressorInput& in, Random& random) {
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
  in.rope = test::rope_rows(positions, in.half);
}

Buffer run_pool(OpContext& ctx, const CompressorInput& in) {
  Buffer latent(in.act, {in.groups(), in.c});
  CompressPoolArgs args;
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
  const Status status = compress_pool(ctx, args);
  EXPECT_TRUE(status.ok()) << status.message();
  return latent;
}

void run_store(OpContext& ctx,
               const CompressorInput& in,
               const Buffer& latent,
               const PagedRows* main,
               const PagedRows* index) {
  CompressStoreArgs args;
  args.groups = in.group_rows();
  args.latent = latent.view();
  args.key = in.key.view();
  args.k_norm = in.k_norm.view();
  args.rope = in.rope.view();
  args.rms_eps = 1e-20f;
  args.main = main;
  args.index = index;
  const Status status = compress_store(ctx, args);
  EXPECT_TRUE(status.ok()) << status.message();
}

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

// Index selection
// ----------------------------------------------------------------------------------

struct IndexInput {
  IndexInput(Random& random,
             std::vector<SequenceSpec> specs,
             DType act,
             int64_t hi,
             int64_t di,
             int64_t entries,
             int64_t entry_ratio)
      : step(std::move(specs)),
        ratio(entry_ratio),
        heads(hi),
        dim(di),
        q(random.activations(act, {step.count(), hi * di})),
        w(random.normals(act, {step.count(), hi})),
        rope(test::rope_rows(step, di / 4)),
        pages(random,
              static_cast<int64_t>(step.specs().size()),
              entries,
              5,
              quant::index_row_bytes(di)) {
    // Only the entries that the last row of a sequence sees exist.
    for (size_t s = 0; s < step.specs().size(); ++s) {
      const int64_t end = step.specs()[s].start + step.specs()[s].rows;
      for (int64_t e = 0; e < end / ratio; ++e) {
        write_key(random, s, e);
      }
    }
  }

  void write_key(Random& random, size_t s, int64_t e) {
    const Buffer key = random.normals(DType::kF32, {dim}, 0.5);
    quant::index_row_encode(key.floats().data(), dim, pages.views()[s].row(e));
  }

  TestStep step;
  int64_t ratio, heads, dim;
  Buffer q, w, rope;
  Pages pages;
};

struct IndexOutput {
  Buffer selected, candidates;
};

IndexOutput run_index(OpContext& ctx,
                      const IndexInput& in,
                      int64_t k,
                      int64_t blocks = 0,
                      int64_t block = 0,
                      const Buffer* candidates = nullptr) {
  const int64_t t = in.step.count();
  IndexOutput out{Buffer(DType::kI32, {t, k}), {}};
  std::fill_n(ints(out.selected), t * k, 12345);
  IndexSelectArgs args;
  args.rows = in.step.rows();
  args.ratio = in.ratio;
  args.q = in.q.view();
  args.w = in.w.view();
  args.rope = in.rope.view();
  args.index = in.pages.views();
  args.candidate_block = block;
  if (candidates != nullptr) {
    args.candidates = candidates->view();
  } else if (blocks > 0) {
    out.candidates = Buffer(DType::kI32, {t, blocks});
    std::fill_n(ints(out.candidates), t * blocks, 12345);
    args.candidates_out = out.candidates.view();
  }
  args.selected = out.selected.view();
  const Status status = index_select(ctx, args);
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}

// Selections as sets: rows may differ in picks whose scores tie within FP32 error. Returns how many
// picks differ.
int64_t differing_picks(const Buffer& a, const Buffer& b) {
  const int64_t t = a.shape[0], k = a.shape[1];
  int64_t count = 0;
  for (int64_t row = 0; row < t; ++row) {
    const int32_t* x = ints(a) + row * k;
    const int32_t* y = ints(b) + row * k;
    std::vector<int32_t> difference;
    std::set_symmetric_difference(
        x, std::find(x, x + k, -1), y, std::find(y, y + k, -1), std::back_inserter(difference));
    count += static_cast<int64_t>(difference.size());
    EXPECT_TRUE(std::is_sorted(x, std::find(x, x + k, -1)));
    EXPECT_EQ(std::count(std::find(x, x + k, -1), x + k, -1), x + k - std::find(x, x + k, -1));
  }
  return count;
}

struct IndexCase {
  std::vector<SequenceSpec> specs;
  int64_t hi, di, ratio, k;
};

std::vector<IndexCase> index_cases() {
  return {
      {{{.start = 0, .rows = 1}}, 2, 32, 2, 4},
      {{{.start = 0, .rows = 40}}, 2, 32, 1, 4},
      {{{.start = 90, .rows = 9}, {.start = 0, .rows = 3}, {.start = 200, .rows = 1}}, 4, 64, 2, 8},
      {{{.start = 300, .rows = 20}}, 32, 128, 1, 16},
      {{{.start = 500, .rows = 1}, {.start = 77, .rows = 1}}, 9, 32, 1, 5},
  };
}

TEST(CpuIndexSelect, MatchesRef) {
  Random random(10);
  for (const IndexCase& c : index_cases()) {
    for (DType act : kActs) {
      const IndexInput in(random, c.specs, act, c.hi, c.di, 600, c.ratio);
      const IndexOutput got = run_index(test::cpu(), in, c.k),
                        want = run_index(test::ref(), in, c.k);
      // In BF16 a rotated value on the other side of a rounding boundary can move an FP4 code.
      const int64_t allowed = act == DType::kF32 ? 0 : in.step.count() * c.k / 20;
      EXPECT_LE(differing_picks(got.selected, want.selected), allowed);
      EXPECT_TRUE(same_bits(run_index(test::cpu(3), in, c.k).selected, got.selected));
      EXPECT_TRUE(same_bits(run_index(test::cpu(0), in, c.k).selected, got.selected));
    }
  }
}

TEST(CpuIndexSelect, CandidatesMatchRef) {
  Random random(11);
  for (int64_t blocks : {3, 5, 100}) {
    for (int64_t block : {4, 8}) {
      const IndexInput in(random,
                          {{.start = 150, .rows = 12}, {.start = 0, .rows = 30}},
                          DType::kF32,
                          4,
                          32,
                          200,
                          1);
      const IndexOutput want = run_index(test::ref(), in, 6, blocks, block);
      const IndexOutput got = run_index(test::cpu(), in, 6, blocks, block);
      EXPECT_TRUE(same_bits(got.selected, want.selected));
      EXPECT_TRUE(same_bits(got.candidates, want.candidates));
      // The source itself is not restricted.
      EXPECT_TRUE(same_bits(got.selected, run_index(test::cpu(), in, 6).selected));
      for (int64_t row = 0; row < in.step.count(); ++row) {
        const int32_t newest = static_cast<int32_t>(in.step.position(row) / block);
        const int32_t* ids = ints(got.candidates) + row * blocks;
        EXPECT_NE(std::find(ids, ids + blocks, newest), ids + blocks);
      }
      // A consumer, whose own queries differ.
      IndexInput consumer(random,
                          {{.start = 150, .rows = 12}, {.start = 0, .rows = 30}},
                          DType::kF32,
                          4,
                          32,
                          200,
                          1);
      const Buffer want_picks =
          run_index(test::ref(), consumer, 6, 0, block, &want.candidates).selected;
      for (int threads : {0, 2, 3}) {
        EXPECT_TRUE(same_bits(
            run_index(test::cpu(threads), consumer, 6, 0, block, &want.candidates).selected,
            want_picks));
      }
    }
  }
}

// One call for all rows and one call per row select the same.
TEST(CpuIndexSelect, A19_RowsDoNotDependOnTheirBatch) {
  Random random(12);
  const IndexInput in(random, {{.start = 400, .rows = 37}}, DType::kBF16, 32, 128, 500, 1);
  const Buffer all = run_index(test::cpu(), in, 16).selected;
  for (int64_t row : {0, 1, 20, 36}) {
    Random again(12);
    IndexInput one(again, {{.start = 400, .rows = 37}}, DType::kBF16, 32, 128, 500, 1);
    one.step = TestStep({{.start = 400 + row, .rows = 1}});
    one.q = part(in.q, row, 1);
    one.w = part(in.w, row, 1);
    one.rope = part(in.rope, row, 1);
    EXPECT_TRUE(same_bits(run_index(test::cpu(), one, 16).selected, part(all, row, 1)));
  }
}

// 3k entries with equal keys around the k-th place, in sequences with and without a non-zero start.
TEST(CpuIndexSelect, A08_TiesTakeTheLowestEntries) {
  constexpr int64_t kPicks = 8;
  Random random(13);
  IndexInput in(
      random, {{.start = 63, .rows = 1}, {.start = 0, .rows = 60}}, DType::kBF16, 2, 32, 64, 1);
  for (size_t s = 0; s < 2; ++s) {
    const std::vector<float> key(32, 0.25f);
    for (int64_t e = 10; e < 10 + 3 * kPicks; ++e) {
      quant::index_row_encode(key.data(), 32, in.pages.views()[s].row(e));
    }
  }
  const Buffer want = run_index(test::ref(), in, kPicks).selected;
  for (int repeat = 0; repeat < 50; ++repeat) {
    ASSERT_TRUE(same_bits(run_index(test::cpu(repeat % 4), in, kPicks).selected, want));
  }
  // All entries tie at zero when no head scores: the first k.
  std::fill(in.w.bytes.begin(), in.w.bytes.end(), uint8_t{0});
  const Buffer zeros = run_index(test::cpu(), in, kPicks).selected;
  for (int32_t i = 0; i < kPicks; ++i) {
    EXPECT_EQ(ints(zeros)[i], i);
  }
}

// Every slot of a page is read as it was written, and scores pass the ReLU.
TEST(CpuIndexSelect, A16_ReadersSeeWhatTheWriterStored) {
  CompressorInput in({{.start = 0, .rows = 48}});
  in.ratio = 1;
  in.act = DType::kF32;
  Random random(14);
  fill(in, random);
  for (int64_t page_rows : {1, 4, 16}) {
    Pages main(random, 1, 48, page_rows, quant::main_row_bytes(in.c));
    Pages index(random, 1, 48, page_rows, quant::index_row_bytes(in.di));
    run_store(test::cpu(), in, run_pool(test::cpu(), in), main.views(), index.views());
    // A query that points along the key of one entry, with a positive and a negative head weight:
    // without the ReLU the second head would favour the opposite keys.
    for (int64_t target = 0; target < 48; ++target) {
      const TestStep step({{.start = 47, .rows = 1}});
      Buffer q(DType::kF32, {1, 2 * in.di}), w(DType::kF32, {1, 2});
      std::vector<float> key(static_cast<size_t>(in.di));
      quant::index_row_decode(index.views()[0].row(target), in.di, key.data());
      for (int64_t i = 0; i < in.di; ++i) {
        q.set(i, key[static_cast<size_t>(i)]);
        q.set(in.di + i, -key[static_cast<size_t>(i)]);
      }
      w.set(0, 1.0f);
      w.set(1, -1.0f);
      const Buffer rope = test::rope_rows({0}, in.half);
      std::vector<Buffer> picks;
      for (OpContext* ctx : {&test::ref(), &test::cpu()}) {
        picks.emplace_back(DType::kI32, Shape{1, 5});
        IndexSelectArgs args;
        args.rows = step.rows();
        args.q = q.view();
        args.w = w.view();
        args.rope = rope.view();
        args.index = index.views();
        args.selected = picks.back().view();
        EXPECT_TRUE(index_select(*ctx, args).ok());
      }
      EXPECT_TRUE(same_bits(picks[1], picks[0]));
      const int32_t* ids = ints(picks[1]);
      EXPECT_NE(std::find(ids, ids + 5, static_cast<int32_t>(target)), ids + 5);
    }
  }
}

// Attention
// ----------------------------------------------------------------------------------------

struct AttendInput {
  AttendInput(Random& random,
              std::vector<SequenceSpec> specs,
              DType act,
              int64_t h,
              int64_t head_dim,
              int64_t window_rows,
              int64_t picks,
              int64_t block = 0)
      : step(std::move(specs)),
        heads(h),
        k(head_dim),
        q(random.normals(act, {step.count(), h * head_dim}, 3.0)),
        rope(test::rope_rows(step, head_dim / 4)),
        sink(random.normals(DType::kF32, {h})),
        window(random, step, window_rows, head_dim, block),
        main(random,
             static_cast<int64_t>(step.specs().size()),
             kEntries,
             5,
             quant::main_row_bytes(head_dim)),
        selected(DType::kI32, {step.count(), picks}) {
    std::vector<std::vector<bool>> written(step.specs().size(), std::vector<bool>(kEntries));
    for (int64_t row = 0; row < step.count(); ++row) {
      // Ascending ids of entries that then exist, -1 behind.
      int64_t id = random.integer(0, 4), i = 0;
      for (; i < picks - row % 3 && id < kEntries; ++i, id += random.integer(1, 4)) {
        ints(selected)[row * picks + i] = static_cast<int32_t>(id);
        const auto s = static_cast<size_t>(step.sequence(row));
        if (!written[s][static_cast<size_t>(id)]) {
          written[s][static_cast<size_t>(id)] = true;
          const Buffer x = random.normals(DType::kF32, {k}, 0.7);
          quant::main_row_encode(x.floats().data(), k, main.views()[s].row(id));
        }
      }
    }
  }

  static constexpr int64_t kEntries = 200;
  TestStep step;
  int64_t heads, k;
  Buffer q, rope, sink;
  TestWindow window;
  Pages main;
  Buffer selected;
};

Buffer run_attend(OpContext& ctx, const AttendInput& in, bool use_main = true) {
  Buffer o(in.q.dtype, in.q.shape);
  AttendArgs args;
  args.rows = in.step.rows();
  args.q = in.q.view();
  args.rope = in.rope.view();
  args.window = in.window.view();
  if (use_main) {
    args.main = in.main.views();
    args.selected = in.selected.view();
  }
  args.sink = in.sink.view();
  args.o = o.view();
  const Status status = attend(ctx, args);
  EXPECT_TRUE(status.ok()) << status.message();
  return o;
}

const test::Tolerance& attend_tolerance(DType act) {
  return act == DType::kF32 ? test::kAttendF32 : test::kAttendBf16;
}

struct AttendCase {
  std::vector<SequenceSpec> specs;
  int64_t h, k, window, picks;
};

std::vector<AttendCase> attend_cases() {
  return {
      {{{.start = 0, .rows = 1}}, 1, 32, 4, 1},
      {{{.start = 0, .rows = 20}}, 4, 32, 8, 4},
      {{{.start = 5, .rows = 3}, {.start = 30, .rows = 1}, {.start = 0, .rows = 9}}, 6, 64, 8, 70},
      {{{.start = 100, .rows = 6, .floor = 97}}, 5, 96, 16, 9},
      {{{.start = 300, .rows = 2}}, 33, 64, 128, 60},
      {{{.start = 126, .rows = 70}}, 8, 32, 128, 16},
      {{{.start = 200, .rows = 1}}, 64, 512, 128, 40},
  };
}

TEST(CpuAttend, MatchesRef) {
  Random random(20);
  for (const AttendCase& c : attend_cases()) {
    for (DType act : kActs) {
      SCOPED_TRACE(testing::Message() << "heads " << c.h << " dim " << c.k << " picks " << c.picks
                                      << " " << dtype_name(act));
      const AttendInput in(random, c.specs, act, c.h, c.k, c.window, c.picks);
      for (bool use_main : {true, false}) {
        const Buffer want = run_attend(test::ref(), in, use_main);
        test::on_every_instruction_set([&] {
          EXPECT_TRUE(close(run_attend(test::cpu(), in, use_main), want, attend_tolerance(act)));
        });
        const Buffer got = run_attend(test::cpu(), in, use_main);
        EXPECT_TRUE(same_bits(run_attend(test::cpu(0), in, use_main), got));
        EXPECT_TRUE(same_bits(run_attend(test::cpu(3), in, use_main), got));
      }
    }
  }
}

struct BlockCase {
  std::vector<SequenceSpec> specs;
  int64_t h, k, window;
};

std::vector<BlockCase> block_cases() {
  return {
      {{{.start = 1, .rows = 3}}, 1, 32, 8},
      {{{.start = 7, .rows = 5}, {.start = 8, .rows = 5}, {.start = 40, .rows = 5}}, 6, 64, 8},
      {{{.start = 300, .rows = 5}}, 33, 64, 128},
      {{{.start = 90, .rows = 2, .floor = 85}}, 64, 512, 128},
  };
}

TEST(CpuAttend, DraftBlocksMatchRef) {
  Random random(26);
  for (const BlockCase& c : block_cases()) {
    for (DType act : kActs) {
      SCOPED_TRACE(testing::Message() << "heads " << c.h << " dim " << c.k << dtype_name(act));
      const AttendInput in(random, c.specs, act, c.h, c.k, c.window, 1, c.specs[0].rows);
      const Buffer want = run_attend(test::ref(), in, false);
      test::on_every_instruction_set([&] {
        EXPECT_TRUE(close(run_attend(test::cpu(), in, false), want, attend_tolerance(act)));
      });
      EXPECT_TRUE(
          same_bits(run_attend(test::cpu(0), in, false), run_attend(test::cpu(3), in, false)));
    }
  }
}

// Every row of a block sees the W positions before it and the whole block, no more and no less.
TEST(CpuAttend, ADraftBlockSeesItsWindowAndItself) {
  constexpr int64_t kWindow = 8, kBlock = 3, kDim = 32, kStart = 20;
  Random random(27);
  AttendInput in(
      random, {{.start = kStart, .rows = kBlock}}, DType::kF32, 2, kDim, kWindow, 1, kBlock);
  const int64_t bytes = quant::window_row_bytes(kDim);
  for (OpContext* ctx : {&test::ref(), &test::cpu()}) {
    const Buffer before = run_attend(*ctx, in, false);
    const auto changes = [&](uint8_t* row) {
      std::vector<uint8_t> kept(row, row + bytes);
      for (int64_t i = 0; i < kDim; ++i) {
        row[i] ^= 0x80;  // the other sign
      }
      const Buffer after = run_attend(*ctx, in, false);
      std::copy(kept.begin(), kept.end(), row);
      int64_t rows = 0;
      for (int64_t r = 0; r < kBlock; ++r) {
        rows += same_bits(part(after, r, 1), part(before, r, 1)) ? 0 : 1;
      }
      return rows;
    };
    for (int64_t slot = 0; slot < kWindow; ++slot) {
      EXPECT_EQ(changes(in.window.rings()[0].data() + slot * bytes), kBlock) << slot;
    }
    for (int64_t row = 0; row < kBlock; ++row) {
      EXPECT_EQ(changes(in.window.fresh().bytes.data() + row * bytes), kBlock) << row;
    }
  }
  AttendInput uneven(
      random, {{.start = 5, .rows = 3}, {.start = 5, .rows = 2}}, DType::kF32, 2, kDim, 8, 1, 3);
  Buffer o(DType::kF32, uneven.q.shape);
  AttendArgs args{.rows = uneven.step.rows(),
                  .q = uneven.q.view(),
                  .rope = uneven.rope.view(),
                  .window = uneven.window.view(),
                  .sink = uneven.sink.view(),
                  .o = o.view()};
  EXPECT_EQ(attend(test::cpu(), args).code(), Code::kInvalidArgument);
}

// The same query alone, with the keys in its ring, and among its neighbours, with the keys fresh.
TEST(CpuAttend, A19_PrefillAndDecodeAgree) {
  for (DType act : kActs) {
    Random random(21);
    const AttendInput all(random, {{.start = 0, .rows = 40}}, act, 20, 64, 16, 12);
    const Buffer want = run_attend(test::cpu(), all);
    for (int64_t row : {0, 1, 15, 16, 39}) {
      Random again(21);
      AttendInput one(again, {{.start = 0, .rows = 40}}, act, 20, 64, 16, 12);
      const int64_t bytes = quant::window_row_bytes(64);
      for (int64_t p = std::max<int64_t>(0, row - 15); p < row; ++p) {
        std::memcpy(one.window.rings()[0].data() + p % 16 * bytes,
                    all.window.view().fresh.as<uint8_t>() + p * bytes,
                    static_cast<size_t>(bytes));
      }
      one.window.fresh() = Buffer(DType::kU8, {1, bytes});
      std::memcpy(one.window.fresh().bytes.data(),
                  all.window.view().fresh.as<uint8_t>() + row * bytes,
                  static_cast<size_t>(bytes));
      one.step = TestStep({{.start = row, .rows = 1}});
      one.q = part(all.q, row, 1);
      one.rope = part(all.rope, row, 1);
      one.selected = part(all.selected, row, 1);
      for (int threads : {0, 2, 3}) {
        EXPECT_TRUE(same_bits(run_attend(test::cpu(threads), one), part(want, row, 1)));
      }
    }
  }
}

// Three queries with disjoint picks, in one call and in three.
TEST(CpuAttend, A02_QueriesSeeOnlyTheirOwnPicks) {
  for (DType act : kActs) {
    Random random(22);
    AttendInput in(random,
                   {{.start = 50, .rows = 1}, {.start = 50, .rows = 1}, {.start = 50, .rows = 1}},
                   act,
                   4,
                   64,
                   1,
                   6);
    // One cache for all three, so that only the lists separate them.
    std::vector<PagedRows> shared(3, in.main.views()[0]);
    for (int64_t e = 0; e < 18; ++e) {
      const Buffer x = random.normals(DType::kF32, {64}, 0.7);
      quant::main_row_encode(x.floats().data(), 64, shared[0].row(e));
    }
    for (int32_t i = 0; i < 18; ++i) {
      ints(in.selected)[i] = i / 6 + i % 6 * 3;
    }
    const auto run = [&](OpContext& ctx, const AttendInput& input) {
      Buffer o(act, input.q.shape);
      AttendArgs args;
      args.rows = input.step.rows();
      args.q = input.q.view();
      args.rope = input.rope.view();
      args.window = input.window.view();
      args.main = shared.data();
      args.selected = input.selected.view();
      args.sink = input.sink.view();
      args.o = o.view();
      EXPECT_TRUE(attend(ctx, args).ok());
      return o;
    };
    const Buffer together = run(test::cpu(), in);
    EXPECT_TRUE(close(together, run(test::ref(), in), attend_tolerance(act)));
    for (int64_t row = 0; row < 3; ++row) {
      Random again(22);
      AttendInput one(again, {{.start = 50, .rows = 1}}, act, 4, 64, 1, 6);
      one.q = part(in.q, row, 1);
      one.rope = part(in.rope, row, 1);
      one.selected = part(in.selected, row, 1);
      one.sink = in.sink;
      one.window.fresh() = part(in.window.fresh(), row, 1);
      EXPECT_TRUE(same_bits(run(test::cpu(), one), part(together, row, 1)));
    }
  }
}

// No window key at all (the floor lies behind the query); 16 leading -1, then one entry.
TEST(CpuAttend, A07_FullyMaskedFirstTile) {
  for (DType act : kActs) {
    Random random(23);
    AttendInput in(random, {{.start = 40, .rows = 2, .floor = 45}}, act, 3, 64, 8, 24);
    std::fill_n(ints(in.selected), 48, -1);
    ints(in.selected)[16] = 7;
    ints(in.selected)[24 + 23] = 9;
    for (int64_t e : {7, 9}) {
      const Buffer x = random.normals(DType::kF32, {64}, 0.7);
      quant::main_row_encode(x.floats().data(), 64, in.main.views()[0].row(e));
    }
    const Buffer got = run_attend(test::cpu(), in);
    EXPECT_TRUE(close(got, run_attend(test::ref(), in), attend_tolerance(act)));
    for (float value : got.floats()) {
      EXPECT_TRUE(std::isfinite(value));
    }
  }
}

TEST(CpuAttend, A07_FullyMaskedRowGivesZeros) {
  for (DType act : kActs) {
    for (float sink : {0.5f, -INFINITY}) {
      Random random(24);
      AttendInput in(random, {{.start = 40, .rows = 2, .floor = 45}}, act, 3, 64, 8, 24);
      std::fill_n(ints(in.selected), 48, -1);
      for (int64_t h = 0; h < 3; ++h) {
        in.sink.set(h, sink);
      }
      for (float value : run_attend(test::cpu(), in).floats()) {
        EXPECT_EQ(value, 0.0f);
      }
    }
  }
}

// A NaN among the visible keys must show.
TEST(CpuAttend, NanStaysVisible) {
  Random random(25);
  AttendInput in(random, {{.start = 0, .rows = 4}}, DType::kF32, 2, 32, 8, 2);
  std::fill_n(in.window.fresh().bytes.begin() + 2 * quant::window_row_bytes(32),
              static_cast<size_t>(quant::window_row_bytes(32)),
              uint8_t{0xFF});
  const Buffer o = run_attend(test::cpu(), in);
  for (int64_t i = 0; i < 4 * 64; ++i) {
    EXPECT_EQ(std::isnan(o.at(i)), i >= 2 * 64);
  }
}

// Rows at offsets around 2^31 and 2^32 of one huge page read and write as rows of a small one.
TEST(CpuAttend, A17_OffsetsAre64Bit) {
  constexpr int64_t kK = 64, kBytes = 36;
  static_assert(kBytes == kK / 2 + kK / 16);
  ASSERT_EQ(quant::main_row_bytes(kK), kBytes);
  constexpr int64_t kSpace = int64_t{8} << 30;
  void* memory = mmap(
      nullptr, kSpace, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    GTEST_SKIP() << "no address space";
  }
  uint8_t* page = static_cast<uint8_t*>(memory);
  const PagedRows high{&page, kSpace / kBytes, kBytes};
  const int32_t ids[] = {static_cast<int32_t>(((int64_t{1} << 31) - 1) / kBytes),
                         static_cast<int32_t>((int64_t{1} << 31) / kBytes + 1),
                         static_cast<int32_t>(((int64_t{1} << 32) + 1) / kBytes + 1)};

  Random random(26);
  AttendInput in(random, {{.start = 10, .rows = 1}}, DType::kBF16, 4, kK, 8, 3);
  for (int32_t i = 0; i < 3; ++i) {
    ints(in.selected)[i] = i;
    const Buffer x = random.normals(DType::kF32, {kK}, 0.7);
    quant::main_row_encode(x.floats().data(), kK, in.main.views()[0].row(i));
    std::memcpy(high.row(ids[i]), in.main.views()[0].row(i), kBytes);
  }
  const Buffer want = run_attend(test::cpu(), in);
  Buffer got(DType::kBF16, in.q.shape);
  std::copy_n(ids, 3, ints(in.selected));
  AttendArgs args;
  args.rows = in.step.rows();
  args.q = in.q.view();
  args.rope = in.rope.view();
  args.window = in.window.view();
  args.main = &high;
  args.selected = in.selected.view();
  args.sink = in.sink.view();
  args.o = got.view();
  EXPECT_TRUE(attend(test::cpu(), args).ok());
  EXPECT_TRUE(same_bits(got, want));

  // The compressor writes there, too; the index rows are smaller, so their page is cut differently.
  CompressorInput store({{.start = 0, .rows = 3}});
  store.ratio = 1;
  fill(store, random);
  const Buffer latent = run_pool(test::cpu(), store);
  Pages main(random, 1, 4, 2, quant::main_row_bytes(store.c));
  Pages index(random, 1, 4, 2, quant::index_row_bytes(store.di));
  run_store(test::cpu(), store, latent, main.views(), index.views());
  const int64_t index_bytes = quant::index_row_bytes(store.di);
  const PagedRows high_index{&page, kSpace / index_bytes, index_bytes};
  for (int32_t i = 0; i < 3; ++i) {
    ints(store.group_entry)[i] = static_cast<int32_t>((int64_t{3} << 30) / index_bytes + i);
  }
  const PagedRows high_main{&page, kSpace / kBytes, kBytes};
  run_store(test::cpu(), store, latent, &high_main, &high_index);
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(
        std::memcmp(high_main.row(ints(store.group_entry)[i]), main.views()[0].row(i), kBytes), 0);
    EXPECT_EQ(std::memcmp(high_index.row(ints(store.group_entry)[i]),
                          index.views()[0].row(i),
                          static_cast<size_t>(index_bytes)),
              0);
  }
  munmap(memory, kSpace);
}

}  // namespace
}  // namespace cachalot::ops
