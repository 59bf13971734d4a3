// Stores behind the page pools: what they may lose, and that what they return is right.
#include "kvcache/tiers.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <numeric>

#include "base/clock.h"
#include "base/file.h"
#include "base/format.h"
#include "kvcache/prefix_content.h"
#include "tests/support/cache_layout.h"
#include "tests/support/redis_server.h"
#include "tests/support/temp_directory.h"

namespace {
std::atomic<int> unlink_milliseconds = 0;
std::atomic<int> unlink_count = 0;
}  // namespace

// Takes the place of the C library's for this process, the database's calls included.
extern "C" int unlink(const char* path) noexcept {
  ++unlink_count;
  ::usleep(static_cast<useconds_t>(1000 * unlink_milliseconds));
  return static_cast<int>(::syscall(SYS_unlink, path));
}

namespace cachalot::kvcache {
namespace {

CacheLayout layout() {
  return test::small_layout(2, 4);
}

std::vector<int32_t> tokens(int64_t count, int32_t first = 1) {
  std::vector<int32_t> ids(static_cast<size_t>(count));
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

PrefixKey key(int i) {
  return PrefixKey().then(tokens(1, i));
}

// The whole pages of `ids`.
std::vector<std::vector<int32_t>> pages(const std::vector<int32_t>& ids) {
  std::vector<std::vector<int32_t>> out;
  for (auto at = ids.begin(); ids.end() - at >= 4; at += 4) {
    out.emplace_back(at, at + 4);
  }
  return out;
}

// What a load finds.
Tiers::Loaded all_of(Tiers::Load& load) {
  while (!load.ready()) {
    std::this_thread::yield();
  }
  return load.take();
}

// A page object of the given words behind `parent`, filled with `mark`.
struct PageObject {
  PageObject(const PrefixKey& parent, std::vector<int32_t> ids, uint8_t mark)
      : words(std::move(ids)),
        rows(static_cast<size_t>(layout().page_bytes()), mark),
        object{.parent = parent, .words = words, .first = rows, .second = {}} {}
  std::vector<int32_t> words;
  std::vector<uint8_t> rows;
  Object object;
};

TEST(Object, RoundTripAndEveryDamage) {
  const PageObject page(key(1), tokens(4), 7);
  std::vector<uint8_t> state(static_cast<size_t>(layout().state_bytes()), 9);
  const std::vector<int32_t> two = {5, 6};
  const Object partial{.kind = ObjectKind::kState,
                       .parent = key(2),
                       .words = two,
                       .decoder_from = 3,
                       .draft_from = 5,
                       .first = state,
                       .second = page.rows};
  // A page with an image.
  const PageObject shown(key(1), tokens(4 + kImageWords), 7);
  for (const Object& object : {page.object, partial, shown.object}) {
    const std::string bytes = encode_object(layout(), object);
    std::vector<int32_t> ids;
    const Result<Object> parsed = parse_object(layout(), object.key(), bytes, ids);
    ASSERT_TRUE(parsed.ok()) << parsed.error().message();
    EXPECT_EQ(parsed->kind, object.kind);
    EXPECT_EQ(parsed->parent, object.parent);
    EXPECT_EQ(parsed->decoder_from, object.decoder_from);
    EXPECT_EQ(parsed->draft_from, object.draft_from);
    EXPECT_TRUE(std::ranges::equal(parsed->words, object.words));
    EXPECT_TRUE(std::ranges::equal(parsed->first, object.first));
    EXPECT_TRUE(std::ranges::equal(parsed->second, object.second));
    for (size_t i = 0; i < bytes.size(); ++i) {
      std::string bad = bytes;
      bad[i] = static_cast<char>(bad[i] ^ 0x20);
      EXPECT_EQ(parse_object(layout(), object.key(), bad, ids).error().code(), Code::kDataLoss);
    }
    for (size_t size = 0; size < bytes.size(); size += 9) {
      EXPECT_FALSE(parse_object(layout(), object.key(), bytes.substr(0, size), ids).ok());
    }
    EXPECT_FALSE(parse_object(layout(), key(99), bytes, ids).ok());
    CacheLayout other = layout();
    other.window = 5;
    EXPECT_FALSE(parse_object(other, object.key(), bytes, ids).ok());
  }
  EXPECT_NE(page.object.key(),
            (Object{.kind = ObjectKind::kState,
                    .parent = page.object.parent,
                    .words = page.words,
                    .first = {},
                    .second = {}}
                 .key()));
}

// the entry just written is protected, and one larger than the budget is not stored.
void check_budget(ObjectStore& store) {
  const std::string object(60, 'x');
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(store.put(key(i), object).ok());
    EXPECT_EQ(store.get(key(i))->value(), object);
    EXPECT_EQ(store.bytes(), 60);
  }
  EXPECT_FALSE(store.get(key(0))->has_value());
  ASSERT_TRUE(store.put(key(9), std::string(101, 'y')).ok());
  EXPECT_FALSE(store.get(key(9))->has_value());
  EXPECT_EQ(store.get(key(2))->value(), object);
  ASSERT_TRUE(store.put(key(3), std::string(30, 'z')).ok());
  EXPECT_TRUE(store.get(key(2))->has_value());
  EXPECT_EQ(store.bytes(), 90);
  ASSERT_TRUE(store.remove(key(2)).ok());
  EXPECT_EQ(store.bytes(), 30);
}

TEST(MemoryStore, A29_TheBudgetHolds) {
  const auto store = make_memory_store(100);
  check_budget(*store);
}

TEST(DiskStore, A29_TheBudgetHolds) {
  const test::TempDirectory directory;
  const auto store = open_disk_store(directory.path(), 100, 1000);
  ASSERT_TRUE(store.ok()) << store.error().message();
  check_budget(**store);
}

std::string content(int i) {
  return std::string(static_cast<size_t>(3000 + i), static_cast<char>('a' + i % 26));
}

TEST(DiskStore, SurvivesRestartsWithinItsBounds) {
  const test::TempDirectory directory;
  for (int run = 0; run < 3; ++run) {
    auto store = std::move(open_disk_store(directory.path(), 1 << 20, 1000).value());
    for (int i = 0; i < 10 * run; ++i) {
      EXPECT_EQ(store->get(key(i))->value(), content(i));
    }
    for (int i = 0; i < 10 * (run + 1); ++i) {
      ASSERT_TRUE(store->put(key(i), content(i)).ok());
    }
  }
  {
    // A smaller budget keeps the newest.
    auto store = std::move(open_disk_store(directory.path(), 10000, 1000).value());
    EXPECT_LE(store->bytes(), 10000);
    EXPECT_TRUE(store->get(key(29))->has_value());
    EXPECT_FALSE(store->get(key(0))->has_value());
  }
  // One process at a time.
  const auto first = open_disk_store(directory.path(), 10000, 1000);
  EXPECT_EQ(open_disk_store(directory.path(), 10000, 1000).error().code(), Code::kUnavailable);
  EXPECT_TRUE((*first)->get(key(29))->has_value());
}

TEST(DiskStore, ForgetsWhatWasNotUsedForTheRetention) {
  const test::TempDirectory directory;
  auto store = std::move(open_disk_store(directory.path(), 1 << 20, 0).value());
  ASSERT_TRUE(store->put(key(1), "x").ok());
  EXPECT_FALSE(store->get(key(1))->has_value());
  EXPECT_EQ(store->bytes(), 0);
  // A use counts, however short the retention is.
  constexpr double kRetention = 3;
  store = nullptr;
  store = std::move(open_disk_store(directory.path(), 1 << 20, kRetention).value());
  ASSERT_TRUE(store->put(key(1), "x").ok());
  for (const double end = now_seconds() + kRetention + 1; now_seconds() < end; ::usleep(100'000)) {
    ASSERT_TRUE(store->get(key(1))->has_value());
  }
  EXPECT_EQ(open_disk_store("/proc/nowhere", 100, 100).error().code(), Code::kUnavailable);
}

int64_t bytes_below(const std::string& directory) {
  int64_t bytes = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
    std::error_code gone;  // files come and go
    const uintmax_t size = entry.file_size(gone);
    bytes += gone ? 0 : static_cast<int64_t>(size);
  }
  return bytes;
}

// The most that the directory of a store with this bound takes while many times as much goes
// through it, where some objects are used again and again among others that are evicted.
int64_t most_bytes_of_a_store(int64_t bound) {
  const test::TempDirectory directory;
  auto store = std::move(open_disk_store(directory.path(), bound, 1000).value());
  const std::string object(100'000, 'x');
  int64_t most = 0;
  for (int i = 0; i < 1000; ++i) {
    for (const int put : {i, i / 100 * 100}) {  // the latter is a use
      const Status status = store->put(key(put), object);
      EXPECT_TRUE(status.ok()) << status.message();
    }
    if (i % 20 == 0) {
      most = std::max(most, bytes_below(directory.path()));
    }
  }
  EXPECT_GT(store->bytes(), bound - 100'000);
  return most;
}

// About a third of the directory is garbage in the mean, half where objects come faster than it is
// collected; beside it there are the files of one compaction and the log.
TEST(DiskStore, TheDirectoryStaysNearItsBound) {
  constexpr int64_t kBound = int64_t{16} << 20;
  EXPECT_LE(most_bytes_of_a_store(kBound), 3 * kBound);
}

// Some file systems take milliseconds to remove a file, and compactions lag. The log of the
// database then stayed whole, up to 13 times the bound.
TEST(DiskStore, TheDirectoryStaysNearItsBoundWhereFilesGoSlowly) {
  constexpr int64_t kBound = int64_t{16} << 20;
  for (const int milliseconds : {3, 10}) {
    unlink_milliseconds = milliseconds;
    const int unlinked = unlink_count;
    EXPECT_LE(most_bytes_of_a_store(kBound), 3 * kBound) << milliseconds;
    EXPECT_GT(unlink_count, unlinked + 100);
    unlink_milliseconds = 0;
  }
}

// What bounds the descriptors of the database, which are for connections, and its garbage where the
// compactions lag reaches it.
TEST(DiskStore, BoundsReachTheDatabase) {
  const test::TempDirectory directory;
  const auto store = std::move(open_disk_store(directory.path(), int64_t{1} << 30, 1000).value());
  int files = 0, bounded = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory.path())) {
    if (entry.path().filename().string().starts_with("OPTIONS-")) {
      const std::string options = read_file(entry.path().string()).value();
      ++files;
      bounded += options.find("max_open_files=64\n") != std::string::npos &&
                         options.find("level0_stop_writes_trigger=8\n") != std::string::npos
                     ? 1
                     : 0;
    }
  }
  EXPECT_GT(files, 0);
  EXPECT_EQ(bounded, files);
}

// Puts a file system of so many bytes, which this process alone sees, at `directory`. False: the
// machine gives us none.
bool enter_small_disk(const std::string& directory, int64_t bytes) {
  const uid_t user = ::getuid();
  const gid_t group = ::getgid();
  const auto tell = [](const char* file, const std::string& text) {
    return static_cast<bool>(std::ofstream(file) << text << std::flush);
  };
  const std::string size = fmt::format("size={}", bytes);
  return ::unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0 && tell("/proc/self/setgroups", "deny") &&
         tell("/proc/self/uid_map", fmt::format("0 {} 1", user)) &&
         tell("/proc/self/gid_map", fmt::format("0 {} 1", group)) &&
         ::mount("tmpfs", directory.c_str(), "tmpfs", 0, size.c_str()) == 0;
}

bool has_small_disks(const std::string& directory) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::_exit(enter_small_disk(directory, 1 << 20) ? 0 : 1);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// What went wrong, 0: nothing.
int fill_small_disk(const std::string& directory) {
  if (!enter_small_disk(directory, int64_t{80} << 20)) {
    return 6;
  }
  const std::string filler = directory + "/filler", folder = directory + "/cache";
  if (!write_file(filler, std::string(int64_t{20} << 20, 'f')).ok()) {
    return 1;
  }
  auto store = std::move(open_disk_store(folder, int64_t{64} << 20, 1000).value());
  const auto object = [](int i) { return std::string(200'000, static_cast<char>('a' + i % 26)); };
  std::vector<int> stored;
  Status full;
  for (int i = 0, more = 20; i < 1000 && more > 0; ++i) {
    const Status status = store->put(key(i), object(i));
    if (status.ok()) {
      stored.push_back(i);
    } else if (status.message().find("the disk is full") != std::string::npos) {
      full = status;
    }
    more -= full.ok() ? 0 : 1;
  }
  if (stored.size() < 50 || full.code() != Code::kUnavailable) {
    return 2;
  }
  const auto all_there = [&] {
    return std::ranges::all_of(stored, [&](int i) {
      const auto got = store->get(key(i));
      return got.ok() && got->has_value() && **got == object(i);
    });
  };
  if (!all_there() || store->bytes() != static_cast<int64_t>(stored.size()) * 200'000) {
    return 3;
  }
  std::filesystem::remove(filler);
  Status later = full;
  for (int i = 0; i < 600 && !later.ok(); ++i) {
    ::usleep(100'000);
    later = store->put(key(2000), object(2000));
  }
  stored.push_back(2000);
  if (!later.ok() || !all_there()) {
    return 4;
  }
  store = nullptr;
  store = std::move(open_disk_store(folder, int64_t{64} << 20, 1000).value());
  return all_there() ? 0 : 5;
}

// On a full disk writing fails, reading goes on, and there is no other harm; when there is room
// again it is used. In a process of its own: a fork of this one would lack RocksDB's threads.
TEST(DiskStore, AFullDiskIsAFaultAndNoMore) {
  const test::TempDirectory directory;
  if (!has_small_disks(directory.path())) {
    GTEST_SKIP() << "no file system of a size of its own";
  }
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(::_exit(fill_small_disk(directory.path())), testing::ExitedWithCode(0), "");
}

// A process that is killed in the middle of writing loses at most what it was writing.
TEST(DiskStore, AKilledWriterLosesNothingThatWasThere) {
  const test::TempDirectory directory;
  const pid_t child = ::fork();
  if (child == 0) {
    auto store = std::move(open_disk_store(directory.path(), 1 << 30, 1000).value());
    for (int i = 0; i < 40; ++i) {
      if (!store->put(key(i), content(i)).ok()) {
        ::_exit(1);
      }
    }
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  auto store = std::move(open_disk_store(directory.path(), 1 << 30, 1000).value());
  for (int i = 0; i < 40; ++i) {
    EXPECT_EQ(store->get(key(i))->value(), content(i)) << i;
  }
}

// Whatever happens to a file, the store opens, and what the tiers return is right or absent.
TEST(Tiers, DamagedFilesAreMisses) {
  const test::TempDirectory directory;
  constexpr int kPages = 8;
  const std::vector<int32_t> ids = tokens(4 * kPages);
  const auto fill = [&] {
    const auto tiers =
        std::move(Tiers::open(layout(), {.disk = directory.path(), .disk_bytes = 1 << 20}).value());
    PrefixKey at;
    for (int i = 0; i < kPages; ++i) {
      const PageObject page(at, tokens(4, 1 + 4 * i), static_cast<uint8_t>(i));
      tiers->put(page.object);
      at = page.object.key();
    }
  };
  const auto count_right = [&] {
    const auto tiers =
        std::move(Tiers::open(layout(), {.disk = directory.path(), .disk_bytes = 1 << 20}).value());
    const auto load = tiers->load(PrefixKey(), pages(ids));
    uint8_t i = 0;
    const Tiers::Loaded loaded = all_of(*load);
    for (const Tiers::Loaded::Item& item : loaded.items) {
      EXPECT_TRUE(std::ranges::all_of(item.object.first, [&](uint8_t b) { return b == i; }));
      ++i;
    }
    return static_cast<int>(i);
  };
  fill();
  EXPECT_EQ(count_right(), kPages);
  const auto files = [&] {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(directory.path())) {
      names.push_back(entry.path().filename().string());
    }
    return names;
  };
  enum Damage { kCut, kRemoved, kBehind, kWhole };
  int losses = 0, tables = 0;
  for (const Damage damage : {kCut, kRemoved, kBehind, kWhole}) {
    for (const std::string& name : files()) {
      const std::string path = directory.file(name);
      if (!std::filesystem::exists(path)) {
        continue;
      }
      const auto size = std::filesystem::file_size(path);
      if (damage == kCut) {
        std::filesystem::resize_file(path, size / 2);
      } else if (damage == kRemoved) {
        std::filesystem::remove(path);
      } else if (size > 0) {
        // From its first block on, or behind it: what the database then says differs.
        std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
        for (uintmax_t at = damage == kWhole ? 8 : size / 3; at < size; at += 97) {
          file.seekp(static_cast<std::streamoff>(at));
          file.put('\x5A');
        }
      }
      tables += name.ends_with(".sst") ? 1 : 0;
      losses += count_right() < kPages ? 1 : 0;
      fill();
      EXPECT_EQ(count_right(), kPages) << name << " " << damage;
    }
  }
  EXPECT_GT(tables, 4);
  EXPECT_GT(losses, 0);
}

// The near stores answer first, a state comes with the pages, and a foreign object is a fault.
TEST(Tiers, LoadsAPrefixAndItsState) {
  auto tiers = std::move(Tiers::open(layout(), {.host_bytes = 1 << 20}).value());
  const PageObject first(PrefixKey(), tokens(4), 1), second(first.object.key(), tokens(4, 5), 2);
  std::vector<uint8_t> state(static_cast<size_t>(layout().state_bytes()), 9);
  tiers->put(first.object);
  tiers->put(second.object);
  tiers->put({.kind = ObjectKind::kState,
              .parent = second.object.key(),
              .decoder_from = 2,
              .first = state,
              .second = {}});
  EXPECT_TRUE(tiers->keeps_states());
  tiers->flush();
  const auto load = tiers->load(PrefixKey(), pages(tokens(15)));
  const Tiers::Loaded loaded = all_of(*load);
  EXPECT_TRUE(load->ready());
  ASSERT_EQ(loaded.items.size(), 3u);
  EXPECT_EQ(loaded.items[1].object.first[0], 2);
  EXPECT_EQ(loaded.items[2].object.kind, ObjectKind::kState);
  EXPECT_EQ(loaded.items[2].object.decoder_from, 2);
  EXPECT_TRUE(all_of(*tiers->load(first.object.key(), {tokens(4, 50)})).items.empty());
  EXPECT_EQ(all_of(*tiers->load(first.object.key(), {tokens(4, 5)})).items.size(), 2u);
  const std::vector<TierStats> stats = tiers->stats();
  EXPECT_EQ(stats[0].stored, 3u);
  EXPECT_EQ(stats[0].faults, 0u);
  EXPECT_GT(stats[0].hits, 4u);
  EXPECT_FALSE(Tiers::open(layout(), {.redis = "http://x"}).ok());
}

// What a request would have waited for is not read when it is gone.
TEST(Tiers, LoadsThatNobodyHoldsAreLeft) {
  test::RedisServer server;
  if (!server.running()) {
    GTEST_SKIP() << "redis-server is not installed";
  }
  auto tiers =
      std::move(Tiers::open(layout(), {.host_bytes = 1 << 20, .redis = server.url()}).value());
  const PageObject first(PrefixKey(), tokens(4), 1), second(first.object.key(), tokens(4, 5), 2);
  tiers->put(first.object);
  tiers->put(second.object);
  tiers->flush();
  server.freeze();
  const auto held = tiers->load(first.object.key(), {tokens(4, 50)});  // waits for the server
  tiers->load(PrefixKey(), pages(tokens(15)));
  const auto last = tiers->load(PrefixKey(), pages(tokens(5)));
  EXPECT_EQ(all_of(*last).items.size(), 1u);
  EXPECT_EQ(tiers->stats()[0].hits, 1u);
}

// What is taken early is a fault of the slow store, which is left alone then.
TEST(Tiers, LoadsAreTakenBeforeASlowStoreAnswers) {
  test::RedisServer server;
  if (!server.running()) {
    GTEST_SKIP() << "redis-server is not installed";
  }
  auto tiers =
      std::move(Tiers::open(layout(), {.host_bytes = 1 << 20, .redis = server.url()}).value());
  const PageObject first(PrefixKey(), tokens(4), 1);
  tiers->put(first.object);
  tiers->flush();
  server.freeze();
  const double begin = now_seconds();
  const auto load = tiers->load(PrefixKey(), pages(tokens(15)));
  while (tiers->stats()[0].hits == 0) {
    std::this_thread::yield();
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_FALSE(load->ready());
  EXPECT_EQ(load->take().items.size(), 1u);
  EXPECT_LT(now_seconds() - begin, 1);
  tiers->flush();
  EXPECT_TRUE(load->ready());
  EXPECT_EQ(tiers->stats()[0].faults, 0u);
  const uint64_t faults = tiers->stats()[1].faults;
  EXPECT_GE(faults, 2u);  // its own timeout, and that the load was late
  EXPECT_EQ(all_of(*tiers->load(PrefixKey(), pages(tokens(15)))).items.size(), 1u);
  EXPECT_EQ(tiers->stats()[1].faults, faults);
}

TEST(RedisStore, ALostServerIsAMiss) {
  EXPECT_FALSE(make_redis_store("redis://", 1).ok());
  EXPECT_FALSE(make_redis_store("redis://h:99999", 1).ok());
  test::RedisServer server;
  if (!server.running()) {
    GTEST_SKIP() << "redis-server is not installed";
  }
  auto store = std::move(make_redis_store(server.url(), 100).value());
  const std::string object("a\0b\r\nc", 6);
  ASSERT_TRUE(store->put(key(1), object).ok());
  EXPECT_EQ(store->get(key(1))->value(), object);
  EXPECT_FALSE(store->get(key(2))->has_value());
  ASSERT_TRUE(store->remove(key(1)).ok());
  EXPECT_FALSE(store->get(key(1))->has_value());
  // One timeout, and the next calls do not wait for another.
  server.freeze();
  EXPECT_EQ(store->put(key(1), object).code(), Code::kUnavailable);
  EXPECT_NE(store->get(key(1)).error().message().find("is not there"), std::string::npos);
  server.kill();
  EXPECT_EQ(store->get(key(1)).error().code(), Code::kUnavailable);
  EXPECT_EQ(store->put(key(1), object).code(), Code::kUnavailable);
  EXPECT_EQ(store->get(key(1)).error().code(), Code::kUnavailable);
}

}  // namespace
}  // namespace cachalot::kvcache
