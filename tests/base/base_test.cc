#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <thread>
#include <vector>

#include "base/file.h"
#include "base/format.h"
#include "base/json.h"
#include "base/rng.h"
#include "base/thread_pool.h"
#include "base/utf8.h"

namespace {

int synced_files = 0, synced_directories = 0;

}  // namespace

// Stands before the C library's, to see what is synced.
extern "C" int fsync(int fd) {
  struct stat info{};
  if (::fstat(fd, &info) == 0) {
    ++(S_ISDIR(info.st_mode) ? synced_directories : synced_files);
  }
  return static_cast<int>(::syscall(SYS_fsync, fd));
}

namespace cachalot {
namespace {

Result<int> half(int n) {
  if (n % 2 != 0) {
    return invalid("{} is odd", n);
  }
  return n / 2;
}

Result<int> quarter(int n) {
  CACHALOT_TRY(const int h, half(n).with("first half"));
  return half(h).with("second half");
}

TEST(Status, ErrorsCarryTheirContext) {
  EXPECT_EQ(*quarter(8), 2);
  EXPECT_EQ(quarter(3).error().message(), "first half: 3 is odd");
  EXPECT_EQ(quarter(6).error().message(), "second half: 3 is odd");
  EXPECT_EQ(quarter(6).error().code(), Code::kInvalidArgument);
}

TEST(ThreadPool, CoversEveryIndexOnceWhateverTheThreadCount) {
  for (int threads : {1, 2, 3, 7}) {
    ThreadPool pool(threads);
    for (int64_t n : {0, 1, 2, 63, 64, 65, 1000}) {
      for (int64_t grain : {1, 8, 64}) {
        std::vector<std::atomic<int>> hits(static_cast<size_t>(n));
        const auto body = [&](int64_t begin, int64_t end) {
          EXPECT_EQ(begin % grain, 0);
          for (int64_t i = begin; i < end; ++i) {
            ++hits[static_cast<size_t>(i)];
          }
        };
        pool.parallel_for(n, grain, body);
        pool.parallel_for_dynamic(n, grain, body);
        std::vector<std::atomic<int>> users(static_cast<size_t>(threads));
        pool.parallel_for_threads(n, grain, [&](int thread, int64_t begin, int64_t end) {
          std::atomic<int>& memory = users.at(static_cast<size_t>(thread));
          EXPECT_EQ(++memory, 1) << "two ranges at a time on thread " << thread;
          body(begin, end);
          --memory;
        });
        for (const auto& hit : hits) {
          EXPECT_EQ(hit.load(), 3);
        }
      }
    }
  }
}

TEST(ThreadPool, SurvivesManyShortTasks) {
  ThreadPool pool(3);
  std::atomic<int64_t> sum{0};
  for (int i = 0; i < 5000; ++i) {
    pool.parallel_for(3, 1, [&](int64_t begin, int64_t end) { sum += end - begin; });
  }
  EXPECT_EQ(sum.load(), 15000);
}

TEST(ThreadPool, WakesThreadsThatSleep) {
  constexpr std::chrono::milliseconds kLong(5);  // for a thread that polls
  ThreadPool pool(3);
  std::atomic<int64_t> sum{0};
  for (int i = 0; i < 20; ++i) {
    // The workers sleep before a task, the caller before the last worker is done.
    std::this_thread::sleep_for(kLong);
    pool.parallel_for(3, 1, [&](int64_t begin, int64_t end) {
      if (begin == 2) {
        std::this_thread::sleep_for(kLong);
      }
      sum += end - begin;
    });
  }
  EXPECT_EQ(sum.load(), 60);
}

// Known answers of Random123's philox4x32-10.
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(Philox(0, 0).words(0),
            (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const uint64_t ones = ~uint64_t{0};
  EXPECT_EQ(Philox(ones, ones).words(ones),
            (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
}

TEST(Philox, MomentsOfTheDistributions) {
  const Philox rng(5);
  constexpr int kCount = 100000;
  double sum = 0, square = 0, uniform = 0;
  for (int i = 0; i < kCount; ++i) {
    const double x = rng.normal(static_cast<uint64_t>(i));
    sum += x;
    square += x * x;
    uniform += rng.uniform(static_cast<uint64_t>(i));
  }
  // Four standard errors.
  EXPECT_NEAR(sum / kCount, 0, 4 / std::sqrt(kCount));
  EXPECT_NEAR(square / kCount, 1, 4 * std::sqrt(2.0 / kCount));
  EXPECT_NEAR(uniform / kCount, 0.5, 4 * std::sqrt(1.0 / 12 / kCount));
}

TEST(JsonWriter, WhatItWritesReadsBack) {
  JsonWriter w;
  w.begin_object()
      .field("text", std::string("a\"b\\c\n\t\x01 \xC3\xA9 \xF0\x9F\x90\x8B"))
      .field("third", 1.0 / 3.0)
      .field("tenth", 0.1f)
      .field("big", std::numeric_limits<int64_t>::min())
      .field("unsigned", std::numeric_limits<uint64_t>::max())
      .field("yes", true)
      .field("nan", std::nan(""))
      .key("list")
      .begin_array()
      .value(1)
      .begin_object()
      .end_object()
      .null()
      .end_array()
      .end_object();
  const auto parsed = nlohmann::json::parse(w.text());
  EXPECT_EQ(parsed["text"], "a\"b\\c\n\t\x01 \xC3\xA9 \xF0\x9F\x90\x8B");
  EXPECT_EQ(parsed["third"].get<double>(), 1.0 / 3.0);
  EXPECT_EQ(parsed["tenth"].get<float>(), 0.1f);
  EXPECT_EQ(parsed["big"].get<int64_t>(), std::numeric_limits<int64_t>::min());
  EXPECT_EQ(parsed["unsigned"].get<uint64_t>(), std::numeric_limits<uint64_t>::max());
  EXPECT_TRUE(parsed["nan"].is_null());
  EXPECT_EQ(parsed["list"].size(), 3u);
}

TEST(JsonWriter, InvalidUtf8BecomesReplacementCharacters) {
  for (const char* bad : {"\xFF", "\xC0\x80", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xE2\x82"}) {
    const std::string text = nlohmann::json::parse(json_quote(bad)).get<std::string>();
    EXPECT_NE(text.find("\xEF\xBF\xBD"), std::string::npos);
  }
}

TEST(Utf8, AcceptsExactlyTheWellFormedSequences) {
  EXPECT_EQ(utf8_sequence_length("a"), 1);
  EXPECT_EQ(utf8_sequence_length("\xC2\x80"), 2);
  EXPECT_EQ(utf8_sequence_length("\xE0\xA0\x80"), 3);
  EXPECT_EQ(utf8_sequence_length("\xF4\x8F\xBF\xBF"), 4);
  for (const char* bad :
       {"\x80", "\xC1\xBF", "\xE0\x9F\xBF", "\xF0\x8F\xBF\xBF", "\xF5\x80\x80\x80"}) {
    EXPECT_EQ(utf8_sequence_length(bad), 0);
  }
  EXPECT_EQ(utf8_sequence_length(""), 0);
}

class TemporaryDirectory {
 public:
  TemporaryDirectory() : path_(std::filesystem::temp_directory_path() / "cachalot_base_test") {
    std::filesystem::create_directories(path_);
  }
  ~TemporaryDirectory() { std::filesystem::remove_all(path_); }
  std::string file(const char* name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

TEST(File, WritesReadsAndMaps) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("a"), text(100000, 'x');
  ASSERT_TRUE(write_file(path, text).ok());
  ASSERT_TRUE(write_file(path, text + "y").ok());
  EXPECT_EQ(*read_file(path), text + "y");
  const auto mapped = MappedFile::open(path);
  ASSERT_TRUE(mapped.ok());
  EXPECT_EQ(mapped->bytes().size(), text.size() + 1);
  ASSERT_TRUE(write_file(directory.file("empty"), "").ok());
  EXPECT_TRUE(MappedFile::open(directory.file("empty")).ok());
}

std::vector<std::string> names(const std::string& directory) {
  std::vector<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    found.push_back(entry.path().filename().string());
  }
  std::sort(found.begin(), found.end());
  return found;
}

TEST(File, AppearsWholeOrNotAtAll) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("a");
  {
    auto file = NewFile::create(path);
    ASSERT_TRUE(file.ok() && file->write("half").ok());
    EXPECT_FALSE(file_exists(path));
    auto same = NewFile::create(path);  // two writers do not share a temporary file
    ASSERT_TRUE(same.ok() && same->write("whole").ok());
    NewFile moved = std::move(*same);
    ASSERT_TRUE(moved.commit().ok());
    EXPECT_EQ(*read_file(path), "whole");
  }
  EXPECT_EQ(names(directory.file("")), std::vector<std::string>{"a"});
}

TEST(File, ReplacedFilesAndTheirNamesAreOnTheDisk) {
  const TemporaryDirectory directory;
  for (const auto write : {write_file, replace_file}) {
    synced_files = synced_directories = 0;
    ASSERT_TRUE(write(directory.file("a"), "x").ok());
    EXPECT_EQ(synced_files, 1);
    EXPECT_EQ(synced_directories, 1);
  }
}

TEST(File, RemovesWhatInterruptedWritersLeft) {
  const TemporaryDirectory directory;
  auto living = NewFile::create(directory.file("state"));
  ASSERT_TRUE(living.ok() && living->write("x").ok());
  const pid_t child = ::fork();
  if (child == 0) {  // ends without a commit
    auto file = NewFile::create(directory.file("state"));
    ::_exit(file.ok() && file->write("torn").ok() ? 0 : 1);
  }
  int status = 1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  for (const char* kept : {"notes.tmp", "a.1.tmp", "1-2.tmp", ".1-2.tmp", "b.1-2.tmpx"}) {
    ASSERT_TRUE(write_file(directory.file(kept), "mine").ok());
  }
  ASSERT_TRUE(write_file(directory.file("b.12-3.tmp"), "torn").ok());
  EXPECT_EQ(names(directory.file("")).size(), 8u);
  ASSERT_TRUE(remove_unfinished(directory.file("")).ok());
  ASSERT_TRUE(living->commit().ok());
  EXPECT_EQ(names(directory.file("")),
            (std::vector<std::string>{
                ".1-2.tmp", "1-2.tmp", "a.1.tmp", "b.1-2.tmpx", "notes.tmp", "state"}));
  EXPECT_TRUE(remove_unfinished(directory.file("absent")).ok());
}

// What a user's path names is written as a shell would; what a program owns is replaced.
TEST(File, OutputGoesWhereThePathLeads) {
  const TemporaryDirectory directory;
  const std::string real = directory.file("real"), link = directory.file("link"),
                    chain = directory.file("chain"), dangling = directory.file("dangling");
  ASSERT_TRUE(write_file(real, "old").ok());
  ASSERT_EQ(::chmod(real.c_str(), 0600), 0);
  ASSERT_EQ(::symlink("real", link.c_str()), 0);
  ASSERT_EQ(::symlink(link.c_str(), chain.c_str()), 0);
  ASSERT_EQ(::symlink("new", dangling.c_str()), 0);
  ASSERT_TRUE(write_file(chain, "through").ok());
  EXPECT_TRUE(std::filesystem::is_symlink(chain) && std::filesystem::is_symlink(link));
  EXPECT_EQ(*read_file(real), "through");
  struct stat info{};
  ASSERT_EQ(::stat(real.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0600u);
  ASSERT_TRUE(write_file(dangling, "x").ok());
  EXPECT_TRUE(std::filesystem::is_symlink(dangling));
  EXPECT_EQ(*read_file(directory.file("new")), "x");
  ASSERT_TRUE(replace_file(link, "own").ok());
  EXPECT_FALSE(std::filesystem::is_symlink(link));
  EXPECT_EQ(*read_file(real), "through");

  ASSERT_EQ(::symlink("loop", directory.file("loop").c_str()), 0);
  EXPECT_NE(write_file(directory.file("loop"), "x").message().find("loop'"), std::string::npos);

  const std::string fifo = directory.file("fifo"), text(300000, 'y');
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  std::string received;
  std::thread reader([&] { received = *read_file(fifo); });
  EXPECT_TRUE(write_file(fifo, text).ok());
  reader.join();
  EXPECT_EQ(received, text);
  EXPECT_TRUE(std::filesystem::is_fifo(fifo));

  // Through links, so that code which replaces what it is given harms no device.
  const std::string null = directory.file("null"), full = directory.file("full");
  ASSERT_EQ(::symlink("/dev/null", null.c_str()), 0);
  ASSERT_EQ(::symlink("/dev/full", full.c_str()), 0);
  EXPECT_TRUE(write_file(null, "x").ok());
  EXPECT_NE(write_file(full, "x").message().find("full'"), std::string::npos);
  EXPECT_TRUE(std::filesystem::is_symlink(null) && std::filesystem::is_symlink(full));
  EXPECT_NE(write_file(directory.file("."), "x").message().find("cannot open"), std::string::npos);

  // An open file, as /dev/stdout is one, is continued where it stands.
  const int fd = ::open(real.c_str(), O_WRONLY | O_APPEND);
  ASSERT_TRUE(write_file(fmt::format("/dev/fd/{}", fd), " and on").ok());
  ::close(fd);
  EXPECT_EQ(*read_file(real), "through and on");
}

TEST(File, ErrorsNameTheFile) {
  const TemporaryDirectory directory;
  const std::string missing = directory.file("missing");
  EXPECT_EQ(read_file(missing).error().code(), Code::kNotFound);
  EXPECT_NE(read_file(missing).error().message().find(missing), std::string::npos);
  EXPECT_NE(MappedFile::open(missing).error().message().find(missing), std::string::npos);
  EXPECT_FALSE(MappedFile::open(directory.file(".")).ok());
  EXPECT_FALSE(write_file(directory.file("no/such/folder"), "x").ok());
  ASSERT_TRUE(write_file(directory.file("long"), std::string(100, 'x')).ok());
  EXPECT_EQ(read_file(directory.file("long"), 99).error().code(), Code::kOutOfRange);
}

}  // namespace
}  // namespace cachalot
