// Images that are given up, over a tower that takes about a second for one: what nobody waits for
// takes neither memory nor time.
#include "engine/image_encoder.h"

#include <ctime>
#include <future>
#include <numeric>
#include <thread>

#include "tests/engine/t1_fixture.h"

namespace cachalot::engine {
namespace {

using image::Picture;

class ImageEncoderTest : public T1Fixture {
 protected:
  static void SetUpTestSuite() {
    model::ModelConfig config = *model::preset_config("t1-vision");
    config.vision.num_hidden_layers = 256;
    set_up(config);
  }

  void SetUp() override {
    runtime_ = open();
    encoder_ = std::make_unique<ImageEncoder>(runtime_->options());
  }

  std::shared_ptr<const Picture> picture(int64_t rows, int64_t columns) const {
    const model::VisionConfig& vision = runtime_->config().vision;
    Picture out{.patch = vision.patch_size,
                .rows = rows,
                .columns = columns,
                .slots = model::image_slots(vision, {rows, columns})};
    out.rgb.resize(static_cast<size_t>(rows * columns * out.patch * out.patch * 3));
    return std::make_shared<const Picture>(std::move(out));
  }
  std::shared_ptr<const Picture> small() const { return picture(1, 1); }

  std::shared_ptr<const EncodedImage> encode(const std::shared_ptr<const Picture>& picture) {
    return encoder_->encode(runtime_->loaded(), picture);
  }
  // One that takes about a second, begun.
  std::shared_ptr<const EncodedImage> begin_slow() {
    const auto large = picture(18, 24);
    std::shared_ptr<const EncodedImage> encoded = encode(large);
    while (large.use_count() < 3) {  // here, in the image, and on the encoder's thread
      std::this_thread::yield();
    }
    return encoded;
  }
  void wait(const std::shared_ptr<const EncodedImage>& encoded) {
    while (!encoded->ready()) {
      std::this_thread::yield();
    }
  }
  uint64_t count() const {
    const Histogram seconds = encoder_->seconds();
    return std::accumulate(seconds.counts.begin(), seconds.counts.end(), uint64_t{0});
  }

  std::unique_ptr<Runtime> runtime_;
  std::unique_ptr<ImageEncoder> encoder_;
};

TEST_F(ImageEncoderTest, APictureIsHeldUntilItIsEncoded) {
  std::shared_ptr<const Picture> shown = small();
  const std::weak_ptr<const Picture> left = shown;
  const auto encoded = encode(std::exchange(shown, nullptr));
  wait(encoded);
  ASSERT_TRUE(encoded->rows().ok());
  EXPECT_EQ(encoded->rows()->slots, 4);
  EXPECT_TRUE(left.expired());
  EXPECT_EQ(count(), 1u);
}

// Requests that hang up behind an image that takes long.
TEST_F(ImageEncoderTest, PicturesThatWereGivenUpAreFreeAtOnce) {
  std::promise<void> go_on;
  encoder_->on_ready([&, future = go_on.get_future().share()] { future.wait(); });
  const auto first = encode(small());
  while (!first->ready()) {
    std::this_thread::yield();
  }
  std::vector<std::weak_ptr<const Picture>> pictures;
  for (int i = 0; i < 50; ++i) {
    const auto shown = small();
    pictures.push_back(shown);
    encode(shown);
  }
  const auto last = encode(small());
  EXPECT_TRUE(std::ranges::all_of(pictures, [](const auto& weak) { return weak.expired(); }));
  go_on.set_value();
  wait(last);
  EXPECT_TRUE(last->rows().ok());
  EXPECT_EQ(count(), 2u);
}

// In time of the processor, which other processes do not lengthen.
TEST_F(ImageEncoderTest, OneThatWasGivenUpLetsTheNextOnesPass) {
  std::clock_t begin = std::clock();
  wait(begin_slow());
  const std::clock_t whole = std::clock() - begin;
  begin_slow();  // and given up
  begin = std::clock();
  const auto next = encode(small());
  wait(next);
  EXPECT_TRUE(next->rows().ok());
  EXPECT_LT(std::clock() - begin, whole / 2);
  EXPECT_EQ(count(), 2u);
}

TEST_F(ImageEncoderTest, ItsEndStopsTheTower) {
  const auto held = begin_slow();
  encoder_.reset();
  ASSERT_TRUE(held->ready());
  EXPECT_EQ(held->rows().status().code(), Code::kCancelled);
}

}  // namespace
}  // namespace cachalot::engine
