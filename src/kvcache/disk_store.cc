// RocksDB is seen by this file alone.
//
// Two column families: "default" holds the objects, in blob files, so that compaction rewrites keys
// and not pages; "uses" holds (time of the last use, bytes) of each, from which the order of
// eviction is rebuilt when the database is opened without reading any object. RocksDB's own expiry
// counts from the write and its size limits leave out blobs, so both bounds are kept here.
#include <rocksdb/db.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <set>
#include <unordered_map>
#include <vector>

#include "base/file.h"
#include "base/format.h"
#include "base/log.h"
#include "kvcache/object_store.h"

namespace cachalot::kvcache {
namespace {

// A use is written down again only when it is this much newer, or every hit would be a write.
constexpr double kUseStepSeconds = 60;

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
    rocksdb::Options options;
    options.create_if_missing = true;
    options.create_missing_column_families = true;
    options.keep_log_file_num = 2;
    options.max_total_wal_size = uint64_t{64} << 20;
    rocksdb::ColumnFamilyOptions objects;
    objects.enable_blob_files = true;
    objects.enable_blob_garbage_collection = true;
    objects.blob_file_size = uint64_t{64} << 20;
    objects.write_buffer_size = size_t{32} << 20;
    objects.compression = rocksdb::kNoCompression;  // FP4 and FP8 rows do not compress
    const std::vector<rocksdb::ColumnFamilyDescriptor> families = {
        {rocksdb::kDefaultColumnFamilyName, objects}, {"uses", {}}};
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
    const double now = system_seconds();
    if (expired(found->second, now)) {
      CACHALOT_RETURN_IF_ERROR(remove(key));
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
    if (now - found->second.time > kUseStepSeconds) {
      const Use use{now, found->second.bytes};
      forget(key);
      remember(key, use);
      CACHALOT_RETURN_IF_ERROR(
          status_of(db_->Put(rocksdb::WriteOptions(), uses_.get(), slice(key), bytes_of(use))));
    }
    return std::optional(std::move(object));
  }

  Status put(const PrefixKey& key, std::string_view object) override {
    const Use use{system_seconds(), static_cast<int64_t>(object.size())};
    if (use.bytes > max_bytes_) {
      return {};
    }
    forget(key);
    CACHALOT_RETURN_IF_ERROR(make_room(use.bytes));
    rocksdb::WriteBatch batch;
    CACHALOT_RETURN_IF_ERROR(
        status_of(batch.Put(objects_.get(), slice(key), {object.data(), object.size()})));
    CACHALOT_RETURN_IF_ERROR(status_of(batch.Put(uses_.get(), slice(key), bytes_of(use))));
    // Not synced: a crash of the machine may lose the last objects, one of this process does not.
    CACHALOT_RETURN_IF_ERROR(status_of(db_->Write(rocksdb::WriteOptions(), &batch)));
    remember(key, use);
    return {};
  }

  Status remove(const PrefixKey& key) override {
    forget(key);
    rocksdb::WriteBatch batch;
    CACHALOT_RETURN_IF_ERROR(status_of(batch.Delete(objects_.get(), slice(key))));
    CACHALOT_RETURN_IF_ERROR(status_of(batch.Delete(uses_.get(), slice(key))));
    return status_of(db_->Write(rocksdb::WriteOptions(), &batch));
  }

  int64_t bytes() const override { return bytes_; }

 private:
  using Handle = std::unique_ptr<rocksdb::ColumnFamilyHandle,
                                 std::function<void(rocksdb::ColumnFamilyHandle*)>>;

  static rocksdb::Slice bytes_of(const Use& use) {
    return {reinterpret_cast<const char*>(&use), sizeof use};
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
  std::unique_ptr<rocksdb::DB> db_;
  Handle objects_, uses_;
  std::unordered_map<PrefixKey, Use, PrefixKeyHash> entries_;
  std::set<std::pair<double, PrefixKey>> order_;  // by the time of the last use
  int64_t bytes_ = 0;
};

bool is_lock(const Status& status) {
  return status.message().find("lock") != std::string::npos;
}

}  // namespace

Result<std::unique_ptr<ObjectStore>> open_disk_store(const std::string& directory,
                                                     int64_t max_bytes,
                                                     double retention) {
  CACHALOT_RETURN_IF_ERROR(make_directories(directory));
  auto store = std::make_unique<DiskStore>(max_bytes, retention);
  Status status = store->open(directory);
  if (!status.ok() && !is_lock(status)) {
    log_warning("cache on disk '{}' is damaged and is emptied: {}", directory, status.message());
    store = std::make_unique<DiskStore>(max_bytes, retention);
    // Removes files with the names that RocksDB gives, and no others.
    CACHALOT_RETURN_IF_ERROR(status_of(rocksdb::DestroyDB(directory, rocksdb::Options())));
    status = store->open(directory);
  }
  CACHALOT_RETURN_IF_ERROR(status.with(fmt::format("cache on disk '{}'", directory)));
  return std::unique_ptr<ObjectStore>(std::move(store));
}

}  // namespace cachalot::kvcache
