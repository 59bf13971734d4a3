#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>

#include "kvcache/page_pool.h"
#include "kvcache/sequence_cache.h"
#include "tests/support/cache_layout.h"

namespace cachalot::kvcache {
namespace {

ops::Memory& host_memory() {
  return **ops::backend_memory(ops::Backend::kRef);
}

CacheLayout small_layout() {
  return test::small_layout(3, 16);
}

// Pools of one layout and caches over them.
struct Pools {
  explicit Pools(const CacheLayout& l, int64_t max_pages = 10)
      : layout(l),
        pages(host_memory(), layout.page_bytes(), max_pages),
        states(host_memory(), layout.state_bytes(), 10) {}

  std::unique_ptr<SequenceCache> make() {
    return std::move(SequenceCache::create(layout, pages, states).value());
  }

  CacheLayout layout;
  PagePool pages, states;
};

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
  std::vector<PageRef> pages;
  for (int i = 0; i < 3; ++i) {
    pages.push_back(*pool.take());
  }
  EXPECT_EQ(pool.take().error().code(), Code::kResourceExhausted);
  const uint8_t* freed = pages[1].data();
  pages.erase(pages.begin() + 1);
  EXPECT_EQ(pool.pages_in_use(), 2);
  EXPECT_EQ(pool.pages_free(), 1);
  EXPECT_EQ(pool.take()->data(), freed);
}

// A page is free once nobody refers to it, and cached while no user does.
TEST(PagePool, CountsUsersAndCachesApart) {
  PagePool pool(host_memory(), 100, 3);
  PageRef user = *pool.take();
  EXPECT_EQ(pool.pages_in_use(), 1);
  PageRef cached = user.for_cache();
  PageRef second = cached;
  EXPECT_EQ(pool.pages_in_use(), 1);
  EXPECT_FALSE(user.only_cached());
  user = {};
  EXPECT_EQ(pool.pages_in_use(), 0);
  EXPECT_EQ(pool.pages_cached(), 1);
  EXPECT_TRUE(cached.only_cached());
  PageRef other = cached.for_use();
  EXPECT_EQ(pool.pages_in_use(), 1);
  EXPECT_EQ(pool.pages_cached(), 0);
  second = {};
  cached = {};
  EXPECT_EQ(pool.pages_in_use(), 1);
  const PageRef moved = std::move(other);
  EXPECT_EQ(pool.pages_free(), 2);
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
  Pools pools(layout);
  const auto owner = pools.make();
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

// The drafter's rings lie behind those of the layers, and a record carries them.
TEST(SequenceCache, DraftRingsArePartOfTheState) {
  CacheLayout layout = small_layout();
  const int64_t without = layout.window_bytes();
  layout.draft_stages = 2;
  EXPECT_EQ(layout.window_bytes(), without / 3 * 5);
  Pools pools(layout), plain(small_layout());
  const auto cache = pools.make(), other = pools.make();
  ASSERT_EQ(cache->view().rings.size(), 5u);
  ASSERT_TRUE(cache->reserve(9).ok());
  cache->view().length = 9;
  const int64_t ring_bytes = layout.window * layout.window_row_bytes;
  for (size_t ring = 0; ring < 5; ++ring) {
    std::memset(
        cache->view().rings[ring], static_cast<int>(ring + 1), static_cast<size_t>(ring_bytes));
  }
  for (size_t source = 0; source < 2; ++source) {
    for (int64_t i = 0; i < 9 / layout.ratios[source]; ++i) {
      std::memset(cache->view().sources[source].main.row(i), 7, 36);
      std::memset(cache->view().sources[source].index.row(i), 8, 17);
    }
  }
  std::memset(cache->view().sources[0].open_group, 0, 2 * 8 * 4);
  const std::string record = *cache->save();
  ASSERT_TRUE(other->restore(record).ok());
  for (size_t ring = 0; ring < 5; ++ring) {
    EXPECT_EQ(other->view().rings[ring][0], ring + 1);
    EXPECT_EQ(other->view().rings[ring][ring_bytes - 1], ring + 1);
  }
  const auto undrafted = plain.make();
  EXPECT_EQ(undrafted->restore(record).code(), Code::kDataLoss);
}

TEST(SequenceCache, ReserveFailsWithoutSideEffects) {
  const CacheLayout layout = small_layout();
  Pools pools(layout, 2);
  const PagePool& pool = pools.pages;
  const auto first = pools.make(), second = pools.make();
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
  Pools pools(layout);
  const auto owner = pools.make();
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
  const auto other_owner = pools.make();
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
  Pools wider_pools(wider);
  const auto foreign_owner = wider_pools.make();
  SequenceCache& foreign = *foreign_owner;
  EXPECT_EQ(foreign.restore(record).code(), Code::kDataLoss);
}

// Shared pages are the same memory; a partly filled last one is a copy, and writing it leaves the
// owner's rows alone.
TEST(SequenceCache, AdoptedPagesAreSharedAndThePartialOneCopied) {
  Pools pools(small_layout());
  const auto owner = pools.make(), guest = pools.make();
  ASSERT_TRUE(owner->reserve(24).ok());
  std::memset(owner->view().rings[0], 3, 66);
  for (int64_t i = 0; i < 24; ++i) {
    std::memset(owner->view().sources[1].main.row(i), static_cast<int>(i + 1), 36);
  }
  const std::vector<PageRef> pages = {owner->page(0), owner->page(1)};
  ASSERT_TRUE(guest->adopt(pages, 20).ok());
  ASSERT_TRUE(guest->load_state(*owner->copy_state()).ok());
  EXPECT_EQ(guest->page_count(), 2);
  EXPECT_EQ(guest->page(0).data(), owner->page(0).data());
  EXPECT_NE(guest->page(1).data(), owner->page(1).data());
  EXPECT_EQ(pools.pages.pages_in_use(), 3);
  for (int64_t i = 0; i < 20; ++i) {
    EXPECT_EQ(guest->view().sources[1].main.row(i)[35], i + 1);
  }
  EXPECT_EQ(guest->view().rings[0][65], 3);
  std::memset(guest->view().sources[1].main.row(20), 99, 36);
  EXPECT_EQ(owner->view().sources[1].main.row(20)[0], 21);
}

}  // namespace
}  // namespace cachalot::kvcache
