#include "server/metrics.h"

#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>

#include <limits>

#include "base/json.h"

namespace cachalot::server {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

MetricFamily& family(std::vector<MetricFamily>& all,
                     const char* name,
                     const char* help,
                     MetricType type) {
  MetricFamily out;
  out.name = name;
  out.help = help;
  out.type = type;
  all.push_back(std::move(out));
  return all.back();
}

void counter(std::vector<MetricFamily>& all, const char* name, const char* help, uint64_t value) {
  ClientMetric metric;
  metric.counter.value = static_cast<double>(value);
  family(all, name, help, MetricType::Counter).metric.push_back(metric);
}

void gauge(std::vector<MetricFamily>& all, const char* name, const char* help, int64_t value) {
  ClientMetric metric;
  metric.gauge.value = static_cast<double>(value);
  family(all, name, help, MetricType::Gauge).metric.push_back(metric);
}

void histogram(std::vector<MetricFamily>& all,
               const char* name,
               const char* help,
               const engine::Histogram& values) {
  ClientMetric metric;
  uint64_t total = 0;
  for (size_t i = 0; i < values.counts.size(); ++i) {
    total += values.counts[i];
    const double bound =
        i < values.bounds.size() ? values.bounds[i] : std::numeric_limits<double>::infinity();
    metric.histogram.bucket.push_back({total, bound});
  }
  metric.histogram.sample_count = total;
  metric.histogram.sample_sum = values.sum;
  family(all, name, help, MetricType::Histogram).metric.push_back(metric);
}

void engine_families(std::vector<MetricFamily>& all, const engine::EngineStats& s) {
  gauge(all, "cachalot_running", "Requests in the running batch", s.running);
  gauge(all, "cachalot_waiting", "Requests in the queue", s.waiting);
  gauge(all, "cachalot_batch_rows", "Rows of the last step", s.last_batch_rows);
  gauge(all,
        "cachalot_weight_versions",
        "Weights in memory: those in use and replaced ones with requests left",
        s.weight_versions);
  counter(all, "cachalot_weight_swaps_total", "Swaps of the weights", s.weight_swaps);
  counter(
      all, "cachalot_prompt_tokens_total", "Prompt tokens of admitted requests", s.prompt_tokens);
  counter(
      all, "cachalot_cached_tokens_total", "Prompt tokens that a cache answered", s.cached_tokens);
  counter(all,
          "cachalot_replayed_tokens_total",
          "Cached tokens that ran again to rebuild windows",
          s.replayed_tokens);
  counter(all, "cachalot_generated_tokens_total", "Output tokens", s.generated_tokens);
  counter(all, "cachalot_draft_tokens_total", "Drafted tokens that were verified", s.draft_tokens);
  counter(all,
          "cachalot_accepted_tokens_total",
          "Drafted tokens that were accepted",
          s.accepted_tokens);
  counter(all,
          "cachalot_finished_total",
          "Engine requests that ended by themselves",
          s.requests_finished);
  counter(all, "cachalot_failed_total", "Engine requests that failed", s.requests_failed);
  counter(
      all, "cachalot_cancelled_total", "Engine requests that were cancelled", s.requests_cancelled);
  counter(
      all, "cachalot_preemptions_total", "Running requests put back into the queue", s.preemptions);
  counter(all, "cachalot_evictions_total", "Cached pages given up for new ones", s.evictions);
  counter(all,
          "cachalot_images_reused_total",
          "Images of requests whose rows were there",
          s.images_reused);
  gauge(all,
        "cachalot_image_bytes",
        "Memory promised to the images of requests that were not answered yet",
        s.image_bytes);
  const auto pages = [&](const char* name, const char* help, int64_t engine::PoolStats::* field) {
    MetricFamily& out = family(all, name, help, MetricType::Gauge);
    for (const engine::PoolStats& pool : s.pools) {
      ClientMetric metric;
      metric.label.push_back({"pool", pool.name});
      metric.gauge.value = static_cast<double>(pool.*field);
      out.metric.push_back(metric);
    }
  };
  pages("cachalot_cache_pages_in_use", "Pages that requests hold", &engine::PoolStats::in_use);
  pages("cachalot_cache_pages_cached", "Pages kept for later requests", &engine::PoolStats::cached);
  pages("cachalot_cache_pages_total",
        "Pages there are; 0: bounded by memory alone",
        &engine::PoolStats::total);
  const auto tiers = [&](const char* name, const char* help, uint64_t kvcache::TierStats::* field) {
    MetricFamily& out = family(all, name, help, MetricType::Counter);
    for (const kvcache::TierStats& tier : s.tiers) {
      ClientMetric metric;
      metric.label.push_back({"tier", tier.name});
      metric.counter.value = static_cast<double>(tier.*field);
      out.metric.push_back(metric);
    }
  };
  tiers("cachalot_tier_hits_total", "Objects found in a cache tier", &kvcache::TierStats::hits);
  tiers("cachalot_tier_misses_total", "Objects not found", &kvcache::TierStats::misses);
  tiers("cachalot_tier_stored_total", "Objects written", &kvcache::TierStats::stored);
  tiers("cachalot_tier_faults_total",
        "Failed calls and damaged objects",
        &kvcache::TierStats::faults);
  MetricFamily& bytes =
      family(all, "cachalot_tier_bytes", "Bytes of a tier's objects", MetricType::Gauge);
  for (const kvcache::TierStats& tier : s.tiers) {
    ClientMetric metric;
    metric.label.push_back({"tier", tier.name});
    metric.gauge.value = static_cast<double>(tier.bytes);
    bytes.metric.push_back(metric);
  }
  histogram(all, "cachalot_queue_seconds", "Time in the queue", s.queue_seconds);
  histogram(all, "cachalot_first_token_seconds", "Time to the first token", s.first_token_seconds);
  histogram(all, "cachalot_inter_token_seconds", "Time between tokens", s.inter_token_seconds);
  histogram(
      all, "cachalot_image_seconds", "Time of the vision tower for an image", s.image_seconds);
}

}  // namespace

void RequestCounts::add(const std::string& endpoint, int status) {
  const std::lock_guard lock(mutex_);
  ++counts_[{endpoint, status}];
}

std::map<std::pair<std::string, int>, uint64_t> RequestCounts::snapshot() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

std::string prometheus_text(const engine::EngineStats* stats, const RequestCounts& requests) {
  std::vector<MetricFamily> all;
  MetricFamily& total =
      family(all, "cachalot_requests_total", "HTTP requests answered", MetricType::Counter);
  for (const auto& [key, count] : requests.snapshot()) {
    ClientMetric metric;
    metric.label.push_back({"endpoint", key.first});
    metric.label.push_back({"status", std::to_string(key.second)});
    metric.counter.value = static_cast<double>(count);
    total.metric.push_back(metric);
  }
  if (stats != nullptr) {
    engine_families(all, *stats);
  }
  return prometheus::TextSerializer().prometheus::Serializer::Serialize(all);
}

std::string stats_json(const engine::EngineStats* stats, const std::string& state) {
  JsonWriter w;
  w.begin_object().field("state", state);
  if (stats != nullptr) {
    const engine::EngineStats& s = *stats;
    w.field("running", s.running)
        .field("waiting", s.waiting)
        .field("batch_rows", s.last_batch_rows);
    w.field("weights", s.weights).field("weight_versions", s.weight_versions);
    w.field("requests_finished", s.requests_finished).field("requests_failed", s.requests_failed);
    w.field("requests_cancelled", s.requests_cancelled);
    w.field("prompt_tokens", s.prompt_tokens).field("cached_tokens", s.cached_tokens);
    w.field("generated_tokens", s.generated_tokens).field("draft_tokens", s.draft_tokens);
    w.field("accepted_tokens", s.accepted_tokens).field("preemptions", s.preemptions);
    w.field("evictions", s.evictions).key("pools").begin_array();
    for (const engine::PoolStats& pool : s.pools) {
      w.begin_object().field("name", pool.name).field("in_use", pool.in_use);
      w.field("cached", pool.cached).field("total", pool.total).end_object();
    }
    w.end_array().key("tiers").begin_array();
    for (const kvcache::TierStats& tier : s.tiers) {
      w.begin_object().field("name", tier.name).field("hits", tier.hits);
      w.field("misses", tier.misses).field("stored", tier.stored).field("faults", tier.faults);
      w.field("bytes", tier.bytes).end_object();
    }
    w.end_array();
  }
  w.end_object();
  return w.text();
}

}  // namespace cachalot::server
