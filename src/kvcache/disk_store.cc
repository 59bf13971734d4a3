// RocksDB is seen by this file alone.
//
// Two column families: "default" holds the objects, in blob files, so that compaction rewrites keys
// and not pages; "uses" holds (time of the last use, bytes) of each, from which the order of
// eviction is rebuilt when the database is opened without reading any object. RocksDB's own expiry
// counts from the write and its size limits leave out blobs, so both bounds are kept here.
#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/env.h>
#include <rocksdb/listener.h>
#include <rocksdb/table.h>

#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/file.h"
#include "base/format.h"
#include "base/log.h"
#include "kvcache/object_store.h"

namespace cachalot::kvcache {
namespace {

// A use is written down again only when it is this much newer, or every hit would be a write; much
// less than the retention, which counts from it.
constexpr double kUseStepSeconds = 60;
constexpr double kUseStepsOfRetention = 16;
constexpr double kResumeSeconds = 1;
constexpr double kStallSeconds = 2;
// RocksDB would keep every file of the database open, 2,000 of 64 GiB, and connections would lack
// these descriptors. To open one again costs less than to read an object.
constexpr int kMostOpenFiles = 64;
// Compactions collect garbage. Where they lag by so many files, twice what they take at once,
// objects wait: RocksDB would go on until 36 and leave several times the bound behind.
constexpr int kMostFilesBehind = 8;
// Nothing is stored where the file system has less room than this, so that what RocksDB holds in
// memory can be written: after a write that failed, builds of it with assertions may end the
// process.
constexpr int64_t kFreePieces = 6;
// Blocks of keys; objects are not among them. RocksDB would give each family a cache of its own, of
// 8 MiB or 32, and fill it in time with blocks of files that are long gone.
constexpr size_t kBlockCacheBytes = size_t{2} << 20;

double system_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

rocksdb::Slice slice(const PrefixKey& key) {
  return {reinterpret_cast<const char*>(&key), sizeof key};
}

Status status_of(const rocksdb::Status& status) {
  if (status.ok()) {
    return {};
  }
  return {status.IsCorruption() ? Code::kDataLoss : Code::kUnavailable, status.ToString()};
}

// RocksDB's own log would lie beside the objects, and where it cannot be written, as on a full
// disk, builds of RocksDB with assertions end the process. What fails is an error of the call.
class NoLog : public rocksdb::Logger {
 public:
  using rocksdb::Logger::Logv;
  void Logv(const char* /*format*/, va_list /*arguments*/) override {}
};

// On a full disk RocksDB would wait for room that it deems enough, and refuse to go on meanwhile.
class NoRecovery : public rocksdb::EventListener {
 public:
  void OnErrorRecoveryBegin(rocksdb::BackgroundErrorReason /*reason*/,
                            rocksdb::Status error,
                            bool* auto_recovery) override {
    error.PermitUncheckedError();
    *auto_recovery = false;
  }
};

rocksdb::Options database_options() {
  rocksdb::Options options;
  options.create_if_missing = true;
  options.create_missing_column_families = true;
  options.max_open_files = kMostOpenFiles;
  options.info_log = std::make_shared<NoLog>();
  options.listeners = {std::make_shared<NoRecovery>()};
  return options;
}

struct Use {
  double time = 0;
  int64_t bytes = 0;
};

class DiskStore : public ObjectStore {
 public:
  DiskStore(int64_t max_bytes, double retention) : max_bytes_(max_bytes), retention_(retention) {}

  ~DiskStore() override {
    if (db_ != nullptr) {
      objects_.reset();
      uses_.reset();
      // What stays behind is found by the next process through the log.
      db_->Close().PermitUncheckedError();
    }
  }

  Status open(const std::string& directory) {
    directory_ = directory;
    rocksdb::Options options = database_options();
    // Small against a small store: the memory that gathers objects, and the files of them, which
    // give their room back when all in them was removed.
    piece_ = std::clamp(max_bytes_ / 16, int64_t{1} << 20, int64_t{32} << 20);
    const auto piece = static_cast<uint64_t>(piece_);
    // A flush of both families lets go of the log before it. Each for itself they did not: where
    // the file system was slow to remove files, "uses" fell behind once, and every log stayed.
    options.atomic_flush = true;
    options.max_total_wal_size = 2 * piece;
    rocksdb::BlockBasedTableOptions tables;
    tables.block_cache = rocksdb::NewLRUCache(kBlockCacheBytes);
    const std::shared_ptr<rocksdb::TableFactory> format(rocksdb::NewBlockBasedTableFactory(tables));
    rocksdb::ColumnFamilyOptions objects;
    objects.table_factory = format;
    objects.enable_blob_files = true;
    objects.enable_blob_garbage_collection = true;
    // Every compaction, which comes after four pieces, moves what is left in the oldest files: as
    // much as has come since the one before.
    objects.blob_garbage_collection_age_cutoff =
        std::min(0.25, 4.0 * static_cast<double>(piece) / static_cast<double>(max_bytes_));
    objects.blob_file_size = piece;
    objects.write_buffer_size = piece;
    objects.max_write_buffer_number = 4;
    objects.level0_slowdown_writes_trigger = kMostFilesBehind;
    objects.level0_stop_writes_trigger = kMostFilesBehind;
    objects.compression = rocksdb::kNoCompression;  // FP4 and FP8 rows do not compress
    rocksdb::ColumnFamilyOptions uses;
    uses.table_factory = format;
    uses.write_buffer_size = piece;
    const std::vector<rocksdb::ColumnFamilyDescriptor> families = {
        {rocksdb::kDefaultColumnFamilyName, objects}, {"uses", uses}};
    std::vector<rocksdb::ColumnFamilyHandle*> handles;
    rocksdb::DB* db = nullptr;
    CACHALOT_RETURN_IF_ERROR(
        status_of(rocksdb::DB::Open(options, directory, families, &handles, &db)));
    db_.reset(db);
    const auto own = [this](rocksdb::ColumnFamilyHandle* handle) {
      return Handle(handle, [this](rocksdb::ColumnFamilyHandle* h) {
        db_->DestroyColumnFamilyHandle(h).PermitUncheckedError();
      });
    };
    objects_ = own(handles[0]);
    uses_ = own(handles[1]);
    const std::unique_ptr<rocksdb::Iterator> use(
        db_->NewIterator(rocksdb::ReadOptions(), uses_.get()));
    for (use->SeekToFirst(); use->Valid(); use->Next()) {
      PrefixKey key;
      Use entry;
      if (use->key().size() == sizeof key && use->value().size() == sizeof entry) {
        std::memcpy(&key, use->key().data(), sizeof key);
        std::memcpy(&entry, use->value().data(), sizeof entry);
        remember(key, entry);
      }
    }
    CACHALOT_RETURN_IF_ERROR(status_of(use->status()));
    return make_room(0);
  }

  const char* name() const override { return "disk"; }

  Result<std::optional<std::string>> get(const PrefixKey& key) override {
    const auto found = entries_.find(key);
    if (found == entries_.end()) {
      return std::optional<std::string>();
    }
    // What is written in passing may fail, as on a full disk; reading goes on.
    const double now = system_seconds();
    if (expired(found->second, now)) {
      static_cast<void>(remove(key));
      return std::optional<std::string>();
    }
    std::string object;
    const rocksdb::Status status =
        db_->Get(rocksdb::ReadOptions(), objects_.get(), slice(key), &object);
    if (status.IsNotFound()) {
      forget(key);
      return std::optional<std::string>();
    }
    CACHALOT_RETURN_IF_ERROR(status_of(status));
    if (now - found->second.time > std::min(kUseStepSeconds, retention_ / kUseStepsOfRetention)) {
      const Use use{now, found->second.bytes};
      forget(key);
      remember(key, use);
      rocksdb::WriteBatch batch;
      CACHALOT_RETURN_IF_ERROR(status_of(batch.Put(uses_.get(), slice(key), bytes_of(use))));
      static_cast<void>(write(batch));
    }
    return std::optional(std::move(object));
  }

  Status put(const PrefixKey& key, std::string_view object) override {
    const Use use{system_seconds(), static_cast<int64_t>(object.size())};
    if (use.bytes > max_bytes_) {
      return {};
    }
    CACHALOT_RETURN_IF_ERROR(check_disk());
    rocksdb::WriteBatch batch;
    CACHALOT_RETURN_IF_ERROR(
        status_of(batch.Put(objects_.get(), slice(key), {object.data(), object.size()})));
    CACHALOT_RETURN_IF_ERROR(status_of(batch.Put(uses_.get(), slice(key), bytes_of(use))));
    const auto found = entries_.find(key);
    const std::optional<Use> before =
        found != entries_.end() ? std::optional(found->second) : std::nullopt;
    forget(key);
    Status status = make_room(use.bytes);
    if (status.ok()) {
      status = write(batch);
    }
    if (status.ok()) {
      remember(key, use);
    } else if (before) {
      remember(key, *before);
    }
    return status;
  }

  Status remove(const PrefixKey& key) override {
    rocksdb::WriteBatch batch;
    CACHALOT_RETURN_IF_ERROR(status_of(batch.Delete(objects_.get(), slice(key))));
    CACHALOT_RETURN_IF_ERROR(status_of(batch.Delete(uses_.get(), slice(key))));
    CACHALOT_RETURN_IF_ERROR(write(batch));
    forget(key);
    return {};
  }

  int64_t bytes() const override { return bytes_; }

 private:
  using Handle = std::unique_ptr<rocksdb::ColumnFamilyHandle,
                                 std::function<void(rocksdb::ColumnFamilyHandle*)>>;

  static rocksdb::Slice bytes_of(const Use& use) {
    return {reinterpret_cast<const char*>(&use), sizeof use};
  }

  Status check_disk() const {
    std::error_code unknown;
    const std::filesystem::space_info disk = std::filesystem::space(directory_, unknown);
    const auto least = static_cast<uintmax_t>(kFreePieces * piece_);
    if (!unknown && disk.available < least) {
      return error(Code::kUnavailable,
                   "the disk is full: {} bytes are free, {} are kept free",
                   disk.available,
                   least);
    }
    return {};
  }

  // Not synced: a crash of the machine may lose the last objects, one of this process does not.
  Status write(rocksdb::WriteBatch& batch) {
    if (stopped_) {
      // After a write that failed RocksDB takes no others until it is told to go on.
      const double now = now_seconds();
      if (now - resumed_ < kResumeSeconds) {
        return error(Code::kUnavailable, "an earlier write failed");
      }
      resumed_ = now;
      CACHALOT_RETURN_IF_ERROR(status_of(db_->Resume()));
      stopped_ = false;
    }
    // While flushes lag behind RocksDB would wait as long as it takes, on a full disk for ever.
    rocksdb::WriteOptions options;
    options.no_slowdown = true;
    const double begin = now_seconds();
    rocksdb::Status status = db_->Write(options, &batch);
    while (status.IsIncomplete() && now_seconds() - begin < kStallSeconds) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      status = db_->Write(options, &batch);
    }
    stopped_ = !status.ok();
    return status_of(status);
  }

  // A clock that was set back must not keep an object for ever.
  bool expired(const Use& use, double now) const {
    return now - use.time > retention_ || use.time - now > retention_;
  }

  void remember(const PrefixKey& key, const Use& use) {
    entries_[key] = use;
    order_.emplace(use.time, key);
    bytes_ += use.bytes;
  }

  void forget(const PrefixKey& key) {
    if (const auto found = entries_.find(key); found != entries_.end()) {
      order_.erase({found->second.time, key});
      bytes_ -= found->second.bytes;
      entries_.erase(found);
    }
  }

  // Removes what is expired, and the oldest until `more` bytes fit.
  Status make_room(int64_t more) {
    const double now = system_seconds();
    while (!order_.empty()) {
      const PrefixKey oldest = order_.begin()->second;
      if (bytes_ + more <= max_bytes_ && !expired(entries_.at(oldest), now)) {
        break;
      }
      CACHALOT_RETURN_IF_ERROR(remove(oldest));
    }
    return {};
  }

  int64_t max_bytes_;
  double retention_;
  std::string directory_;
  int64_t piece_ = 0;
  std::unique_ptr<rocksdb::DB> db_;
  Handle objects_, uses_;
  std::unordered_map<PrefixKey, Use, PrefixKeyHash> entries_;
  std::set<std::pair<double, PrefixKey>> order_;  // by the time of the last use
  int64_t bytes_ = 0;
  bool stopped_ = false;  // by a write that failed
  double resumed_ = 0;    // when that was last tried
};

// Another process has the directory. RocksDB gives this no code of its own.
bool is_lock(const Status& status, const std::string& directory) {
  return status.code() == Code::kUnavailable &&
         status.message().find(directory + "/LOCK: ") != std::string::npos;
}

}  // namespace

Result<std::unique_ptr<ObjectStore>> open_disk_store(const std::string& directory,
                                                     int64_t max_bytes,
                                                     double retention) {
  CACHALOT_RETURN_IF_ERROR(make_directories(directory));
  auto store = std::make_unique<DiskStore>(max_bytes, retention);
  Status status = store->open(directory);
  if (!status.ok() && !is_lock(status, directory)) {
    log_warning("cache on disk '{}' does not open and is emptied: {}", directory, status.message());
    store = std::make_unique<DiskStore>(max_bytes, retention);
    // Removes files with the names that RocksDB gives, and no others.
    CACHALOT_RETURN_IF_ERROR(status_of(rocksdb::DestroyDB(directory, database_options())));
    status = store->open(directory);
  }
  CACHALOT_RETURN_IF_ERROR(status.with(fmt::format("cache on disk '{}'", directory)));
  return std::unique_ptr<ObjectStore>(std::move(store));
}

}  // namespace cachalot::kvcache
