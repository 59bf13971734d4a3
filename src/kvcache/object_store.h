// Stores of objects outside of the page pools: main memory, a disk, a server of other machines.
//
// A store is a cache: it may lose, damage or forget anything at any time, and whatever it returns
// is checked by parse_object(). Each is used by one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"
#include "kvcache/prefix_key.h"

namespace cachalot::kvcache {

class ObjectStore {
 public:
  virtual ~ObjectStore() = default;

  // "host", "disk", "redis".
  virtual const char* name() const = 0;
  // None if it is not there; an error if the store failed, which is no more than a miss.
  virtual Result<std::optional<std::string>> get(const PrefixKey& key) = 0;
  // Replaces what is there. An object larger than the whole store is not stored, and no error.
  virtual Status put(const PrefixKey& key, std::string_view object) = 0;
  virtual Status remove(const PrefixKey& key) = 0;
  // Bytes of the objects, as far as the store counts them.
  virtual int64_t bytes() const = 0;
};

// Main memory. The least recently used objects go when `max_bytes` are exceeded.
std::unique_ptr<ObjectStore> make_memory_store(int64_t max_bytes);

// A RocksDB database in `directory`, which one process can use at a time. Objects go, the least
// recently used first, when they exceed `max_bytes` or when `retention` seconds have passed since
// their last use, by the clock of the system. A database that does not open, for damage or
// for want of room, is emptied. kUnavailable: another process has it, or the directory cannot be
// written.
Result<std::unique_ptr<ObjectStore>> open_disk_store(const std::string& directory,
                                                     int64_t max_bytes,
                                                     double retention);

// A server of the Redis protocol, "redis://HOST[:PORT]". Objects expire after `ttl` seconds. The
// server need not be there: each call fails fast, and it is left alone for a second where nobody
// listens, and for ten times as long as a timeout took.
// kInvalidArgument: not such a URL.
Result<std::unique_ptr<ObjectStore>> make_redis_store(const std::string& url, double ttl);

}  // namespace cachalot::kvcache
