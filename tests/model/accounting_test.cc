#include "model/accounting.h"

#include <gtest/gtest.h>

namespace cachalot::model {
namespace {

TEST(Accounting, ReleasedModel) {
  const Accounting sizes = account(*preset_config("v41-flash"));
  EXPECT_EQ(sizes.tensors, 96085);
  EXPECT_EQ(sizes.total_bytes, 510286023000);
  EXPECT_EQ(sizes.parameters.backbone, 551880835184);
  EXPECT_EQ(sizes.parameters.engram, 196613849600);
  EXPECT_EQ(sizes.parameters.draft, 14225362530);
  EXPECT_EQ(sizes.parameters.vision, 485268480);
  EXPECT_EQ(sizes.parameters.total, 763205315794);
  EXPECT_EQ(sizes.parameters.active_prefill, 7892875448);
  EXPECT_EQ(sizes.parameters.active_decode, 16130588784);
  EXPECT_EQ(sizes.cache_bytes_per_token, 890);
  EXPECT_EQ(sizes.window_bytes_per_request, 2703360);
}

TEST(Accounting, SmallPresets) {
  const Accounting t1 = account(*preset_config("t1"));
  EXPECT_EQ(t1.cache_bytes_per_token, 79.5);  // an entry has 53 bytes
  EXPECT_EQ(t1.window_bytes_per_request, 10 * 8 * 66);
  const Accounting bench = account(*preset_config("bench-s"));
  EXPECT_NEAR(static_cast<double>(bench.parameters.total), 1.3e9, 0.1e9);
  EXPECT_LT(bench.total_bytes, 1'000'000'000);
  const Accounting nano = account(*preset_config("nano"));
  EXPECT_NEAR(static_cast<double>(nano.parameters.backbone + nano.parameters.engram), 505e6, 10e6);
  EXPECT_NEAR(static_cast<double>(nano.parameters.engram), 100e6, 2e6);
}

TEST(Accounting, StorageChangesBytesOnly) {
  ModelConfig config = *preset_config("t1");
  const Accounting official = account(config);
  config.storage = WeightStorage::kF32;
  const Accounting f32 = account(config);
  EXPECT_EQ(f32.parameters.total, official.parameters.total);
  EXPECT_EQ(f32.parameters.active_decode, official.parameters.active_decode);
  EXPECT_EQ(f32.total_bytes, 4 * f32.parameters.total);
}

TEST(Accounting, WithoutSources) {
  ModelConfig config = *preset_config("t1");
  for (const char* assignment : {"compress_ratios=[0,0,0,0,0,0,0,0,0,0,0]",
                                 "kv_source_layer_ids=[]",
                                 "index_source_layer_ids=[]",
                                 "candidate_source_layer_id=-1"}) {
    ASSERT_TRUE(set_config_value(config, assignment).ok());
  }
  ASSERT_TRUE(validate(config).ok()) << validate(config).message();
  const Accounting sizes = account(config);
  EXPECT_EQ(sizes.cache_bytes_per_token, 0);
  EXPECT_EQ(sizes.parameters.active_decode - sizes.parameters.active_prefill,
            config.vocab_size * config.hidden_size + config.hidden_size);
}

}  // namespace
}  // namespace cachalot::model
