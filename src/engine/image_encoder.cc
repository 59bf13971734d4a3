#include "engine/image_encoder.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"

namespace cachalot::engine {
namespace {

int64_t bytes_of(const EncodedImage& encoded) {
  return static_cast<int64_t>(encoded.rows()->bytes.size());
}

}  // namespace

ImageEncoder::ImageEncoder(const RuntimeOptions& options) : options_(options) {}

ImageEncoder::~ImageEncoder() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) {
    thread_.join();
  }
}

std::shared_ptr<const EncodedImage> ImageEncoder::encode(
    std::shared_ptr<const LoadedModel> weights, std::shared_ptr<const image::Picture> picture) {
  auto encoded = std::make_shared<EncodedImage>(std::move(weights), std::move(picture));
  {
    const std::lock_guard lock(mutex_);
    // Those that were given up, or they would gather behind an image that takes minutes.
    std::erase_if(jobs_, [](const auto& job) { return job.expired(); });
    jobs_.push_back(encoded);
    if (!thread_.joinable()) {
      thread_ = std::thread([this] { run(); });
    }
  }
  wake_.notify_one();
  return encoded;
}

Histogram ImageEncoder::seconds() const {
  const std::lock_guard lock(mutex_);
  return seconds_;
}

void ImageEncoder::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
    if (stopping_) {
      return;
    }
    const std::weak_ptr<EncodedImage> job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    encode(job);
    if (on_ready_) {
      on_ready_();
    }
    lock.lock();
  }
}

void ImageEncoder::encode(const std::weak_ptr<EncodedImage>& job) {
  std::shared_ptr<EncodedImage> encoded = job.lock();
  if (encoded == nullptr) {
    return;
  }
  const std::shared_ptr<const LoadedModel> weights = encoded->weights_;
  const std::shared_ptr<const image::Picture> picture = encoded->picture_;
  // Not held meanwhile, so that the last of those who wait for it can give it up.
  encoded.reset();
  const double begin = now_seconds();
  Result<model::ImageRows> rows =
      run_tower(*weights, *picture, [&] { return stopping_ || job.expired(); });
  encoded = job.lock();
  if (encoded == nullptr) {
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    seconds_.record(now_seconds() - begin);
  }
  encoded->rows_ = std::move(rows);
  encoded->weights_.reset();
  encoded->picture_.reset();
  encoded->ready_.store(true, std::memory_order_release);
}

Result<model::ImageRows> ImageEncoder::run_tower(const LoadedModel& weights,
                                                 const image::Picture& picture,
                                                 const std::function<bool()>& stop) {
  if (pool_ == nullptr) {
    pool_ = std::make_unique<ThreadPool>(options_.threads);
  }
  if (stream_ == nullptr) {
    CACHALOT_TRY(ops::Memory* const memory, ops::backend_memory(options_.backend));
    CACHALOT_TRY(stream_, memory->background_stream());
  }
  ops::OpContext context;
  context.backend = options_.backend;
  context.pool = pool_.get();
  context.stream = stream_->handle();
  CACHALOT_TRY(const model::VisionTower tower,
               model::VisionTower::create(weights.model(), context, options_.precision));
  std::vector<float> patches = picture.patches();
  const int64_t count = picture.rows * picture.columns;
  return tower.encode({patches.data(), DType::kF32, {count, 3 * picture.patch * picture.patch}},
                      {picture.rows, picture.columns},
                      stop);
}

std::shared_ptr<const EncodedImage> EncodedImages::get(
    const std::shared_ptr<const LoadedModel>& weights,
    const std::shared_ptr<const image::Picture>& picture) {
  std::weak_ptr<const EncodedImage>& known = known_[picture->digest];
  if (std::shared_ptr<const EncodedImage> encoded = known.lock();
      encoded != nullptr && !(encoded->ready() && !encoded->rows().ok())) {
    ++reused_;
    if (encoded->ready()) {
      keep(encoded);
    }
    return encoded;
  }
  std::shared_ptr<const EncodedImage> encoded = encoder_.encode(weights, picture);
  known = encoded;
  return encoded;
}

void EncodedImages::keep(const std::shared_ptr<const EncodedImage>& encoded) {
  if (const auto found = std::ranges::find(kept_, encoded); found != kept_.end()) {
    kept_.splice(kept_.begin(), kept_, found);
    return;
  }
  kept_.push_front(encoded);
  kept_bytes_ += bytes_of(*encoded);
  while (kept_bytes_ > most_bytes_) {
    kept_bytes_ -= bytes_of(*kept_.back());
    kept_.pop_back();
  }
  std::erase_if(known_, [](const auto& entry) { return entry.second.expired(); });
}

void EncodedImages::clear() {
  known_.clear();
  kept_.clear();
  kept_bytes_ = 0;
  most_bytes_ = 0;
}

}  // namespace cachalot::engine
