#include "cli/engine_flags.h"

#include <chrono>

namespace cachalot::cli {

void EngineFlags::add_to(CLI::App& app) {
  run.add_to(app);
  app.add_option("--max-context",
                 engine.max_context,
                 "Tokens of a request's prompt and output; 0: the model's")
      ->capture_default_str();
  app.add_option("--max-running", engine.max_running, "Requests in a batch")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  app.add_option(
         "--max-waiting", engine.max_waiting, "Requests beside those in the batch; more get 429")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  app.add_option("--page", run.page_tokens, "Cache page in tokens; 0: 128, 16 for t1")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 20))
      ->capture_default_str();
  app.add_option("--pool",
                 run.max_cached_tokens,
                 "Tokens that the global cache holds; 0: bounded by memory alone")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 40))
      ->capture_default_str();
  app.add_option("--window-pool",
                 engine.cached_states,
                 "Window states kept for the prefixes of later requests")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 20))
      ->capture_default_str();
  app.add_option("--window-ttl", window_ttl, "Seconds since its last use that one is kept")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30))
      ->capture_default_str();
  app.add_option("--prefix-cache", prefix_cache, "Reuse what earlier prompts computed")
      ->check(CLI::IsMember({"on", "off"}))
      ->capture_default_str();
  const CLI::Range any_bytes(int64_t{0}, int64_t{1} << 50);
  app.add_option("--image-memory",
                 engine.image_bytes,
                 "Bytes of the images of requests that were not answered yet; more get 429")
      ->check(any_bytes)
      ->capture_default_str();
  app.add_option("--image-cache",
                 engine.image_cache_bytes,
                 "Bytes of the rows of images kept for later requests")
      ->check(any_bytes)
      ->capture_default_str();
  kvcache::TierOptions& tiers = engine.tiers;
  app.add_option("--host-pool", tiers.host_bytes, "Bytes of main memory for evicted prefixes")
      ->check(any_bytes)
      ->capture_default_str();
  app.add_option("--disk", tiers.disk, "Directory in which prefixes outlive the server");
  app.add_option("--disk-bytes", tiers.disk_bytes, "Bytes of prefixes on disk")
      ->check(any_bytes)
      ->capture_default_str();
  app.add_option("--disk-retention",
                 disk_retention_hours,
                 "Hours since its last use that a prefix stays on disk")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
  app.add_option("--prefix-wait",
                 prefix_wait,
                 "Seconds that a request waits for its prefix to be read; the rest is computed")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
  app.add_option("--redis", tiers.redis, "Share prefixes with other servers: redis://HOST[:PORT]");
}

engine::EngineOptions EngineFlags::options() const {
  engine::EngineOptions out = engine;
  out.chunk = run.chunk;
  out.speculation.length = run.spec_length;
  out.state_ttl = std::chrono::seconds(window_ttl);
  out.prefix_wait = std::chrono::milliseconds(static_cast<int64_t>(prefix_wait * 1000));
  out.tiers.redis_ttl = static_cast<double>(window_ttl);
  out.tiers.disk_retention = disk_retention_hours * 3600;
  out.prefix_cache = prefix_cache == "on";
  return out;
}

}  // namespace cachalot::cli
