// The image encoder over a synthetic t1-vision checkpoint. Its values are compared with the
// oracle's in tests/e2e/test_vision.py.
#include "model/vision.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/rng.h"
#include "model/checkpoint.h"
#include "model/synth.h"
#include "tests/support/temp_directory.h"

namespace cachalot::model {
namespace {

// Slots of the released model for images of these many patches, with the sizes they come from.
TEST(ImageSlots, OfTheReleasedModel) {
  const VisionConfig vision = preset_config("v41-flash")->vision;
  EXPECT_EQ(image_slots(vision, {39, 39}), 184);    // 544 x 544
  EXPECT_EQ(image_slots(vision, {35, 46}), 206);    // 640 x 480
  EXPECT_EQ(image_slots(vision, {50, 72}), 427);    // 1000 x 700
  EXPECT_EQ(image_slots(vision, {93, 93}), 994);    // 1302 x 1302
  EXPECT_EQ(image_slots(vision, {69, 122}), 968);   // 1920 x 1080
  EXPECT_EQ(image_slots(vision, {122, 69}), 986);   // 1080 x 1920
  EXPECT_EQ(image_slots(vision, {8, 715}), 722);    // 10000 x 100
  EXPECT_EQ(image_slots(vision, {1533, 3}), 1024);  // 50 x 60000
  EXPECT_EQ(image_slots(vision, {3, 3063}), 1024);  // 60000 x 50
}

class VisionTowerTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    directory_ = std::make_unique<test::TempDirectory>();
    ThreadPool pool(1);
    ASSERT_TRUE(synthesize(*preset_config("t1-vision"), directory_->path(), {}, pool).ok());
  }
  static void TearDownTestSuite() { directory_.reset(); }

  void SetUp() override {
    auto opened = Checkpoint::open(directory_->path());
    ASSERT_TRUE(opened.ok()) << opened.error().message();
    checkpoint_ = std::make_unique<Checkpoint>(std::move(*opened));
    std::vector<int32_t> classes(512);
    std::iota(classes.begin(), classes.end(), 0);
    model_ = std::make_unique<Model>(
        make_model(checkpoint_->config(), checkpoint_->weights(), std::move(classes)).value());
  }

  VisionTower tower(ThreadPool* pool = nullptr,
                    Precision precision = Precision::kOfficial,
                    ops::Backend backend = ops::Backend::kCpu) const {
    return VisionTower::create(*model_, {.backend = backend, .pool = pool}, precision).value();
  }

  // Values that BF16 holds.
  static std::vector<float> pixels(ImageGrid grid) {
    std::vector<float> values(static_cast<size_t>(grid.rows * grid.columns * 48));
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<float>(static_cast<int>(Philox(3).uniform(i) * 256) - 128) / 128.0f;
    }
    return values;
  }
  static TensorView view(std::vector<float>& values) {
    return {values.data(), DType::kF32, {static_cast<int64_t>(values.size()) / 48, 48}};
  }

  static inline std::unique_ptr<test::TempDirectory> directory_;
  std::unique_ptr<Checkpoint> checkpoint_;
  std::unique_ptr<Model> model_;
};

TEST_F(VisionTowerTest, LearnedVectorsLieAroundTheCells) {
  const ImageGrid grid{4, 7};  // two rows of three cells
  std::vector<float> values = pixels(grid);
  for (Precision precision : {Precision::kOfficial, Precision::kF32}) {
    const ImageRows image = *tower(nullptr, precision).encode(view(values), grid);
    ASSERT_EQ(image.slots, image_slots(model_->config.vision, grid));
    ASSERT_EQ(image.view().shape, (Shape{10, 64}));
    EXPECT_EQ(image.dtype, activation_dtype(precision));
    const auto is = [&](int64_t slot, const char* name) {
      const TensorView expected = checkpoint_->tensor(name), got = image.view().rows(slot, 1);
      for (int64_t i = 0; i < 64; ++i) {
        const float value =
            got.dtype == DType::kBF16 ? static_cast<float>(got.as<bf16>()[i]) : got.as<float>()[i];
        if (value != static_cast<float>(expected.as<bf16>()[i])) {
          return false;
        }
      }
      return true;
    };
    for (int64_t slot = 0; slot < 10; ++slot) {
      EXPECT_EQ(is(slot, "image_start"), slot == 0) << slot;
      EXPECT_EQ(is(slot, "image_newline"), slot == 4 || slot == 8) << slot;
      EXPECT_EQ(is(slot, "image_end"), slot == 9) << slot;
    }
  }
}

TEST_F(VisionTowerTest, ThreadsAndDtypeDoNotMatter) {
  const ImageGrid grid{9, 11};
  std::vector<float> values = pixels(grid);
  std::vector<bf16> narrow(values.begin(), values.end());
  const std::vector<uint8_t> expected = tower().encode(view(values), grid)->bytes;
  for (int threads : {1, 3}) {
    ThreadPool pool(threads);
    EXPECT_EQ(tower(&pool).encode(view(values), grid)->bytes, expected);
  }
  EXPECT_EQ(tower().encode({narrow.data(), DType::kBF16, {99, 48}}, grid)->bytes, expected);
}

// Both axes have their places: neither a turned nor a reordered image is the same.
TEST_F(VisionTowerTest, GridsOfAsManyPatchesDiffer) {
  std::vector<float> values = pixels({6, 3});
  EXPECT_NE(tower().encode(view(values), {6, 3})->bytes,
            tower().encode(view(values), {3, 6})->bytes);
}

TEST_F(VisionTowerTest, StopsBeforeTheBlockWhereItIsAskedTo) {
  std::vector<float> values = pixels({6, 3});
  const int64_t blocks = model_->config.vision.num_hidden_layers;
  for (int64_t last = 1; last <= blocks + 1; ++last) {
    int64_t asked = 0;
    const auto image = tower().encode(view(values), {6, 3}, [&] { return ++asked == last; });
    EXPECT_EQ(asked, std::min(last, blocks));
    EXPECT_EQ(image.status().code(), last > blocks ? Code::kOk : Code::kCancelled);
  }
}

TEST_F(VisionTowerTest, BadImagesAreRefused) {
  std::vector<float> values = pixels({64, 64});
  const VisionTower encoder = tower();
  const auto refused = [&](ImageGrid grid, Shape shape, DType dtype = DType::kF32) {
    const auto image = encoder.encode({values.data(), dtype, shape}, grid);
    return !image.ok() && image.error().code() == Code::kInvalidArgument;
  };
  EXPECT_FALSE(refused({18, 24}, {18 * 24, 48}));  // 6 * 9 + 2 of 64 tokens
  EXPECT_TRUE(refused({24, 24}, {24 * 24, 48}));   // 8 * 9 + 2
  EXPECT_TRUE(refused({0, 3}, {0, 48}));
  EXPECT_TRUE(refused({-3, -3}, {9, 48}));
  EXPECT_TRUE(refused({int64_t{1} << 62, 4}, {0, 48}));
  EXPECT_TRUE(refused({3, 3}, {8, 48}));
  EXPECT_TRUE(refused({3, 3}, {9, 47}));
  EXPECT_TRUE(refused({3, 3}, {9, 48}, DType::kI32));
}

TEST_F(VisionTowerTest, ModelsWithoutOneAreRefused) {
  model_->weights.vision = {};
  const auto made = VisionTower::create(*model_, {}, Precision::kOfficial);
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.error().code(), Code::kFailedPrecondition);
}

}  // namespace
}  // namespace cachalot::model
