// Weights that are swapped while requests run: every request belongs to one version, nothing of
// another's caches is found, and a checkpoint that does not fit changes nothing.
#include <atomic>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/file.h"
#include "tests/engine/inbox.h"
#include "tests/engine/scheduler_bench.h"
#include "tests/engine/t1_fixture.h"

namespace cachalot::engine {
namespace {

class WeightsTest : public T1Fixture {
 protected:
  static void SetUpTestSuite() {
    T1Fixture::SetUpTestSuite();
    other_ = std::make_unique<test::TempDirectory>();
    write_checkpoint(*other_, 5);
  }
  static void TearDownTestSuite() {
    other_.reset();
    T1Fixture::TearDownTestSuite();
  }
  static std::string other() { return other_->path(); }

  // What a fresh server with the weights in `directory` gives.
  static Answer fresh(const std::string& directory, EngineRequest r, RuntimeOptions options = {}) {
    options.threads = 1;
    const auto runtime = Runtime::open(directory, options);
    Bench bench(**runtime, {.prefix_cache = false});
    return bench.run(std::move(r));
  }
  static void swap(Runtime& runtime, Bench& bench, const std::string& directory) {
    auto loaded = runtime.load(directory);
    ASSERT_TRUE(loaded.ok()) << loaded.error().message();
    const Status status = bench.scheduler().use(*loaded);
    ASSERT_TRUE(status.ok()) << status.message();
  }
  // A copy of the other checkpoint to spoil.
  static void copy_other(const test::TempDirectory& target) {
    std::filesystem::copy(other(),
                          target.path(),
                          std::filesystem::copy_options::recursive |
                              std::filesystem::copy_options::overwrite_existing);
  }

 private:
  static inline std::unique_ptr<test::TempDirectory> other_;
};

// running, waiting and preempted requests end on the weights they came to; a new one has the
// bits of a fresh server with the new weights and finds nothing of the old ones' caches.
TEST_F(WeightsTest, A27_NoRequestMixesWeights) {
  for (const bool draft : {false, true}) {
    const auto runtime = open({.draft = draft});
    const std::vector<int32_t> prompt = tokens(100);
    const auto again = [&](int priority) {
      EngineRequest r = request(prompt, 20);
      r.sampling = {.temperature = 0};
      r.priority = priority;
      return r;
    };
    const Answer old_answer = fresh(directory(), again(0), {.draft = draft});
    const Answer new_answer = fresh(other(), again(0), {.draft = draft});
    ASSERT_FALSE(old_answer.ids == new_answer.ids);
    Bench bench(*runtime, {.chunk = 64, .max_running = 2, .speculation = {.length = 2}});
    const RequestId running = bench.add(again(0)), preempted = bench.add(again(0)),
                    waiting = bench.add(again(0));
    while (bench.answer(running).ids.size() < 3 || bench.answer(preempted).ids.size() < 3) {
      bench.scheduler().step();
    }
    swap(*runtime, bench, other());
    EXPECT_EQ(bench.stats().weight_versions, 2);
    // Takes the place of one, so that both versions share the caches' pool and the steps.
    const RequestId first = bench.add(again(1)), second = bench.add(again(0));
    bench.finish();
    for (const RequestId id : {running, preempted, waiting}) {
      EXPECT_TRUE(bench.answer(id).same(old_answer)) << id << " draft " << draft;
    }
    for (const RequestId id : {first, second}) {
      EXPECT_TRUE(bench.answer(id).same(new_answer)) << id << " draft " << draft;
    }
    EXPECT_EQ(bench.answer(first).cached, 0);
    EXPECT_GT(bench.stats().preemptions, 0u);
    EXPECT_EQ(bench.stats().weight_versions, 1);
    EXPECT_EQ(bench.stats().weights, runtime->loaded()->fingerprint());
    // The new ones share what they computed.
    const Answer hit = bench.run(again(0));
    EXPECT_TRUE(hit.same(new_answer));
    EXPECT_EQ(hit.cached, 96);
  }
}

// Requests that belong together run on the same weights, though a swap came between them, and
// though all others of the old version have ended.
TEST_F(WeightsTest, RequestsCanNameTheirWeights) {
  const auto runtime = open();
  const Answer old_answer = fresh(directory(), request(tokens(40)));
  Bench bench(*runtime, {});
  const std::shared_ptr<const LoadedModel> old_weights = runtime->loaded();
  EXPECT_TRUE(bench.run(request(tokens(40))).same(old_answer));
  swap(*runtime, bench, other());
  EXPECT_EQ(bench.stats().weight_versions, 1);
  const Answer unnamed = bench.run(request(tokens(40)));
  EXPECT_FALSE(unnamed.ids == old_answer.ids);
  EngineRequest named = request(tokens(40));
  named.weights = old_weights;
  const Answer answer = bench.run(std::move(named));
  EXPECT_TRUE(answer.same(old_answer));
  EXPECT_EQ(answer.cached, 0);
  EXPECT_EQ(old_weights.use_count(), 1) << "replaced weights are kept";
  EXPECT_TRUE(bench.run(request(tokens(40))).same(unnamed));
}

// A swap frees the pages of the old version; swapping back finds them on disk.
TEST_F(WeightsTest, SwappingBackFindsPrefixesOnDisk) {
  const test::TempDirectory disk;
  const auto runtime = open();
  const std::vector<int32_t> prompt = tokens(200);
  const Answer old_answer = fresh(directory(), request(prompt));
  const Answer new_answer = fresh(other(), request(prompt));
  Bench bench(*runtime, {.tiers = {.disk = disk.path()}});
  EXPECT_TRUE(bench.run(request(prompt)).same(old_answer));
  EXPECT_GT(bench.pool("main").cached, 0);
  swap(*runtime, bench, other());
  EXPECT_EQ(bench.pool("main").cached, 0);
  EXPECT_EQ(bench.pool("window").cached, 0);
  const Answer first = bench.run(request(prompt));
  EXPECT_EQ(first.cached, 0);
  EXPECT_TRUE(first.same(new_answer));
  swap(*runtime, bench, directory());
  const Answer back = bench.run(request(prompt));
  EXPECT_EQ(back.cached, 192);
  EXPECT_TRUE(back.same(old_answer));
  swap(*runtime, bench, other());
  const Answer forth = bench.run(request(prompt));
  EXPECT_EQ(forth.cached, 192);
  EXPECT_TRUE(forth.same(new_answer));
  EXPECT_EQ(bench.stats().weight_swaps, 3u);
}

// One value of one tensor makes another version.
TEST_F(WeightsTest, TheFingerprintSeesEveryTensorAndTheConfig) {
  const auto runtime = open();
  const auto same = runtime->load(directory());
  ASSERT_TRUE(same.ok());
  EXPECT_EQ((*same)->fingerprint(), runtime->loaded()->fingerprint());
  EXPECT_EQ((*same)->cache_key(), runtime->loaded()->cache_key());
  const test::TempDirectory changed;
  copy_other(changed);
  const auto before = runtime->load(changed.path());
  ASSERT_TRUE(before.ok());
  std::ofstream(changed.path() + "/config.json", std::ios::app) << "\n";
  const auto config = runtime->load(changed.path());
  ASSERT_TRUE(config.ok()) << config.error().message();
  EXPECT_NE((*config)->cache_key(), (*before)->cache_key());
}

// Whatever is wrong with a checkpoint, the engine says so and goes on with the weights it has.
TEST_F(WeightsTest, BadCheckpointsAreRefused) {
  const auto runtime = open();
  const Answer expected = fresh(directory(), request(tokens(20)));
  const auto engine = std::move(*Engine::start(*runtime, {}));
  const std::string fingerprint = engine->stats().weights;
  const auto refuses = [&](const std::string& target, Code code, const std::string& what) {
    const Status status = engine->load_weights(target);
    EXPECT_EQ(status.code(), code) << status.message();
    EXPECT_NE(status.message().find(what), std::string::npos) << status.message();
    Inbox inbox;
    const RequestId id = *engine->submit(request(tokens(20)), inbox.sink());
    EXPECT_EQ(inbox.wait(id).first, expected.ids) << what;
    EXPECT_EQ(engine->stats().weights, fingerprint);
    EXPECT_EQ(engine->weights()->fingerprint(), fingerprint);
  };
  refuses("/nonexistent", Code::kNotFound, "/nonexistent");
  const test::TempDirectory empty;
  refuses(empty.path(), Code::kNotFound, "config.json");
  {
    auto config = *model::preset_config("t1");
    config.index_topk = 5;
    const test::TempDirectory target;
    copy_other(target);
    ASSERT_TRUE(write_file(target.path() + "/config.json", model::config_to_json(config)).ok());
    refuses(target.path(), Code::kInvalidArgument, "text_config.index_topk is 5, not 4");
  }
  {
    const test::TempDirectory target;
    copy_other(target);
    std::ofstream(target.path() + "/tokenizer.json", std::ios::app) << "\n";
    refuses(target.path(), Code::kInvalidArgument, "tokenizer.json");
  }
  std::string shard;
  for (const auto& entry : std::filesystem::directory_iterator(other())) {
    if (entry.path().extension() == ".safetensors") {
      shard = entry.path().filename().string();
    }
  }
  {
    const test::TempDirectory target;
    copy_other(target);
    std::filesystem::resize_file(target.path() + "/" + shard, 100000);
    refuses(target.path(), Code::kDataLoss, shard);
  }
  {
    const test::TempDirectory target;
    copy_other(target);
    std::filesystem::remove(target.path() + "/" + shard);
    refuses(target.path(), Code::kNotFound, shard);
  }
  EXPECT_EQ(engine->stats().weight_swaps, 0u);
}

// Clients under load see the old or the new answer, never anything else; after the swap has
// returned, the new one alone.
TEST_F(WeightsTest, ClientsSeeOneVersionOrTheOther) {
  const auto runtime = open();
  const auto long_request = [&] { return request(tokens(24), 40); };
  const std::vector<int32_t> old_ids = fresh(directory(), long_request()).ids,
                             new_ids = fresh(other(), long_request()).ids;
  ASSERT_NE(old_ids, new_ids);
  const auto engine = std::move(*Engine::start(*runtime, {.max_running = 3}));
  std::atomic<bool> stop = false;
  std::atomic<int> mixed = 0, late = 0;
  std::vector<std::thread> clients;
  for (int client = 0; client < 4; ++client) {
    clients.emplace_back([&] {
      while (!stop) {
        Inbox inbox;
        // Two choices of one request.
        const auto weights = engine->weights();
        const bool is_new = weights->directory() == other();
        for (int choice = 0; choice < 2; ++choice) {
          EngineRequest r = long_request();
          r.weights = weights;
          const RequestId id = *engine->submit(std::move(r), inbox.sink());
          mixed += inbox.wait(id).first == (is_new ? new_ids : old_ids) ? 0 : 1;
        }
      }
    });
  }
  Inbox inbox;
  const RequestId endless = *engine->submit(request(tokens(24), 16000), inbox.sink());
  inbox.wait_for_tokens(endless, 10);
  Status status = engine->load_weights(other());
  EXPECT_TRUE(status.ok()) << status.message();
  for (int i = 0; i < 5; ++i) {
    const RequestId id = *engine->submit(long_request(), inbox.sink());
    late += inbox.wait(id).first == new_ids ? 0 : 1;
  }
  // Not a third version while the first has a request left.
  EXPECT_EQ(engine->load_weights(directory()).code(), Code::kUnavailable);
  engine->cancel(endless);
  EXPECT_EQ(inbox.wait(endless).second.code(), Code::kCancelled);
  stop = true;
  for (std::thread& client : clients) {
    client.join();
  }
  EXPECT_EQ(mixed, 0);
  EXPECT_EQ(late, 0);
  status = engine->load_weights(directory());
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(engine->drain(std::chrono::seconds(60)));
  EXPECT_EQ(engine->load_weights(other()).code(), Code::kUnavailable);
  for (const PoolStats& pool : engine->stats().pools) {
    EXPECT_EQ(pool.in_use, 0) << pool.name;
  }
}

}  // namespace
}  // namespace cachalot::engine
