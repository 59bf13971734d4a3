#include <iterator>
#include <list>
#include <unordered_map>
#include <utility>

#include "kvcache/object_store.h"

namespace cachalot::kvcache {
namespace {

class MemoryStore : public ObjectStore {
 public:
  explicit MemoryStore(int64_t max_bytes) : max_bytes_(max_bytes) {}

  const char* name() const override { return "host"; }

  Result<std::optional<std::string>> get(const PrefixKey& key) override {
    const auto found = entries_.find(key);
    if (found == entries_.end()) {
      return std::optional<std::string>();
    }
    order_.splice(order_.end(), order_, found->second);
    return std::optional(found->second->second);
  }

  Status put(const PrefixKey& key, std::string_view object) override {
    CACHALOT_RETURN_IF_ERROR(remove(key));
    const auto size = static_cast<int64_t>(object.size());
    if (size > max_bytes_) {
      return {};
    }
    while (bytes_ + size > max_bytes_) {
      CACHALOT_RETURN_IF_ERROR(remove(PrefixKey(order_.front().first)));
    }
    order_.emplace_back(key, object);
    entries_[key] = std::prev(order_.end());
    bytes_ += size;
    return {};
  }

  Status remove(const PrefixKey& key) override {
    if (const auto found = entries_.find(key); found != entries_.end()) {
      bytes_ -= static_cast<int64_t>(found->second->second.size());
      order_.erase(found->second);
      entries_.erase(found);
    }
    return {};
  }

  int64_t bytes() const override { return bytes_; }

 private:
  using Order = std::list<std::pair<PrefixKey, std::string>>;  // least recently used first

  int64_t max_bytes_;
  int64_t bytes_ = 0;
  Order order_;
  std::unordered_map<PrefixKey, Order::iterator, PrefixKeyHash> entries_;
};

}  // namespace

std::unique_ptr<ObjectStore> make_memory_store(int64_t max_bytes) {
  return std::make_unique<MemoryStore>(max_bytes);
}

}  // namespace cachalot::kvcache
