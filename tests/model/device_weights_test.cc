// Which weights copy_to_device() copies, with host memory as the device's.
#include "model/device_weights.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "ops/context.h"

namespace cachalot::model {
namespace {

struct Source {
  std::vector<float> embed{1, 2, 3, 4}, values{5, 6, 7, 8, 9, 10}, bias{11}, start{12};
  ModelWeights weights;

  Source() {
    weights.embed.values = {embed.data(), DType::kF32, {2, 2}};
    weights.layers.resize(2);
    weights.layers[1].engram.table.values = {values.data(), DType::kF32, {3, 2}};
    weights.vision.blocks.resize(1);
    weights.vision.blocks[0].wqkv.bias = {bias.data(), DType::kF32, {1}};
    weights.vision.image_start = {start.data(), DType::kF32, {1}};
  }
};

bool is_copy(const TensorView& got, const TensorView& source) {
  return got.data != source.data &&
         std::memcmp(got.data, source.data, static_cast<size_t>(source.bytes())) == 0;
}

TEST(DeviceWeights, TablesLieWhereTheyShould) {
  ops::Memory& memory = **ops::backend_memory(ops::Backend::kCpu);
  const Source source;
  const TensorView& table = source.weights.layers[1].engram.table.values;
  for (TablePlace place : {TablePlace::kHost, TablePlace::kDevice, TablePlace::kAuto}) {
    const Result<DeviceWeights> made = copy_to_device(source.weights, memory, place);
    ASSERT_TRUE(made.ok());
    const ModelWeights& got = made->weights;
    EXPECT_TRUE(is_copy(got.embed.values, source.weights.embed.values));
    EXPECT_TRUE(got.layers[0].engram.table.values.empty());
    EXPECT_TRUE(is_copy(got.vision.blocks[0].wqkv.bias, source.weights.vision.blocks[0].wqkv.bias));
    // What the host lays out stays with it.
    EXPECT_EQ(got.vision.image_start.data, source.start.data());
    // Tables of 24 bytes are less than a quarter of any memory.
    if (place == TablePlace::kHost) {
      EXPECT_EQ(got.layers[1].engram.table.values.data, table.data);
    } else {
      EXPECT_TRUE(is_copy(got.layers[1].engram.table.values, table));
    }
  }
}

}  // namespace
}  // namespace cachalot::model
