#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>

#include "kvcache/page_pool.h"
#include "kvcache/sequence_cache.h"

namespace cachalot::kvcache {
namespace {

ops::Memory& host_memory() {
  return **ops::backend_memory(ops::Backend::kRef);
}

std::unique_ptr<SequenceCache> make(const CacheLayout& layout, PagePool& pool) {
  return std::move(SequenceCache::create(layout, pool).value());
}

CacheLayout small_layout() {
  CacheLayout layout;
  layout.layers = 3;
  layout.window = 4;
  layout.window_row_bytes = 66;
  layout.main_row_bytes = 36;
  layout.index_row_bytes = 17;
  layout.ratios = {2, 1};
  layout.compressed_dim = 8;
  layout.lookback = 3;
  layout.page_tokens = 16;
  return layout;
}

TEST(CacheLayout, ReleasedModelTakes890BytesPerToken) {
  CacheLayout layout;
  layout.layers = 40;
  layout.window = 128;
  layout.window_row_bytes = 528;
  layout.main_row_bytes = 288;
  layout.index_row_bytes = 68;
  layout.ratios = {2, 2, 2, 1};
  EXPECT_EQ(layout.bytes_per_token(), 890.0);
  EXPECT_EQ(layout.page_bytes(), 113920);
  EXPECT_EQ(layout.window_bytes(), 2703360);
}

TEST(PagePool, BoundsAndReusesPages) {
  PagePool pool(host_memory(), 100, 3);
  uint8_t* a = *pool.take();
  EXPECT_TRUE(pool.take().ok());
  EXPECT_TRUE(pool.take().ok());
  EXPECT_EQ(pool.take().error().code(), Code::kResourceExhausted);
  pool.give_back(a);
  EXPECT_EQ(pool.pages_in_use(), 2);
  EXPECT_EQ(*pool.take(), a);
}

// offsets beyond 2^31 and 2^32.
TEST(PagedRows, A17_OffsetsAre64Bit) {
  // Address space without memory: only addresses are computed.
  constexpr size_t kBytes = size_t{1} << 33;
  void* reserved =
      ::mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(reserved, MAP_FAILED);
  auto* base = static_cast<uint8_t*>(reserved);
  std::vector<uint8_t*> pages = {base, base};
  const int64_t rows = static_cast<int64_t>(kBytes) / 528;
  const ops::PagedRows view{pages.data(), rows, 528};
  for (int64_t offset : {(int64_t{1} << 31) - 1, int64_t{1} << 31, (int64_t{1} << 32) + 1}) {
    const int64_t row = offset / 528;
    EXPECT_EQ(view.row(row) - base, row * 528);
    EXPECT_EQ(view.row(rows + row), view.row(row));
  }
  ::munmap(reserved, kBytes);
}

TEST(SequenceCache, RowsDoNotOverlap) {
  const CacheLayout layout = small_layout();
  PagePool pool(host_memory(), layout.page_bytes(), 10);
  const auto owner = make(layout, pool);
  SequenceCache& cache = *owner;
  ASSERT_TRUE(cache.reserve(40).ok());
  const ops::SequenceView& view = cache.view();
  uint8_t mark = 1;
  const auto fill = [&](bool check) {
    mark = 1;
    for (size_t source = 0; source < 2; ++source) {
      for (int64_t i = 0; i < 40 / layout.ratios[source]; ++i) {
        for (const ops::PagedRows* rows :
             {&view.sources[source].main, &view.sources[source].index}) {
          if (check) {
            EXPECT_EQ(rows->row(i)[0], mark);
            EXPECT_EQ(rows->row(i)[rows->row_bytes - 1], mark);
          } else {
            std::memset(rows->row(i), mark, static_cast<size_t>(rows->row_bytes));
          }
          ++mark;
        }
      }
    }
  };
  fill(false);
  fill(true);
}

TEST(SequenceCache, ReserveFailsWithoutSideEffects) {
  const CacheLayout layout = small_layout();
  PagePool pool(host_memory(), layout.page_bytes(), 2);
  const auto first = make(layout, pool), second = make(layout, pool);
  SequenceCache &a = *first, &b = *second;
  ASSERT_TRUE(a.reserve(16).ok());
  EXPECT_EQ(b.reserve(17).code(), Code::kResourceExhausted);
  EXPECT_EQ(pool.pages_in_use(), 1);
  EXPECT_TRUE(b.reserve(16).ok());
  a.clear();
  EXPECT_EQ(pool.pages_in_use(), 1);
}

TEST(SequenceCache, DamagedRecordsAreRefused) {
  const CacheLayout layout = small_layout();
  PagePool pool(host_memory(), layout.page_bytes(), 10);
  const auto owner = make(layout, pool);
  SequenceCache& cache = *owner;
  ASSERT_TRUE(cache.reserve(20).ok());
  cache.view().length = 20;
  for (size_t source = 0; source < 2; ++source) {
    for (int64_t i = 0; i < 20 / layout.ratios[source]; ++i) {
      std::memset(cache.view().sources[source].main.row(i), 7, 36);
      std::memset(cache.view().sources[source].index.row(i), 8, 17);
    }
  }
  std::memset(cache.view().rings[0], 9, static_cast<size_t>(layout.window_bytes()));
  const std::string record = *cache.save();
  const auto other_owner = make(layout, pool);
  SequenceCache& other = *other_owner;
  ASSERT_TRUE(other.restore(record).ok());
  EXPECT_EQ(*other.save(), record);
  for (size_t i = 0; i < record.size(); i += 13) {
    std::string bad = record;
    bad[i] = static_cast<char>(bad[i] ^ 0x10);
    EXPECT_EQ(other.restore(bad).code(), Code::kDataLoss) << i;
    EXPECT_EQ(other.view().length, 0);
  }
  for (size_t size : {size_t{0}, size_t{7}, size_t{39}, record.size() - 1}) {
    EXPECT_EQ(other.restore(record.substr(0, size)).code(), Code::kDataLoss);
  }
  CacheLayout wider = layout;
  wider.window = 5;
  PagePool wider_pool(host_memory(), wider.page_bytes(), 10);
  const auto foreign_owner = make(wider, wider_pool);
  SequenceCache& foreign = *foreign_owner;
  EXPECT_EQ(foreign.restore(record).code(), Code::kDataLoss);
}

}  // namespace
}  // namespace cachalot::kvcache
