// A synthetic checkpoint of t1 or of a model about as small, made once per test suite.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "base/rng.h"
#include "engine/runtime.h"
#include "model/synth.h"
#include "tests/support/temp_directory.h"
#include "text/byte_tokenizer.h"

namespace cachalot::engine {

class T1Fixture : public testing::Test {
 public:
  static std::vector<int32_t> tokens(int64_t count, uint64_t seed = 1) {
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < count; ++i) {
      ids.push_back(static_cast<int32_t>(Philox(seed).uniform(static_cast<uint64_t>(i)) * 509) + 3);
    }
    return ids;
  }

 protected:
  static void SetUpTestSuite() { set_up("t1"); }
  static void TearDownTestSuite() { directory_.reset(); }

  static void set_up(const char* preset) { set_up(model::preset_config(preset).value()); }
  static void set_up(const model::ModelConfig& config) {
    directory_ = std::make_unique<test::TempDirectory>();
    write_checkpoint(*directory_, 4, config);
  }
  static void write_checkpoint(const test::TempDirectory& target,
                               uint64_t seed,
                               const model::ModelConfig& config = *model::preset_config("t1")) {
    ThreadPool pool(1);
    const Status status =
        model::synthesize(config,
                          target.path(),
                          {.seed = seed, .tokenizer_json = text::byte_level_tokenizer_json(512)},
                          pool);
    ASSERT_TRUE(status.ok()) << status.message();
  }

  static std::string directory() { return directory_->path(); }
  static std::unique_ptr<Runtime> open(RuntimeOptions options = {}) {
    options.threads = std::max(options.threads, 1);  // t1 is too small to share
    auto runtime = Runtime::open(directory(), options);
    EXPECT_TRUE(runtime.ok()) << runtime.error().message();
    return std::move(*runtime);
  }

 private:
  static inline std::unique_ptr<test::TempDirectory> directory_;
};

}  // namespace cachalot::engine
