// The vision tower beside the engine thread: pictures in, rows of the language model out.
//
// An image takes seconds on a CPU. It is encoded on a thread with a pool and, of a device, a stream
// of its own, one image at a time, while the requests that run go on; its request waits. What
// nobody waits for any more is not encoded, and the tower stops in the middle of it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "base/status.h"
#include "base/thread_pool.h"
#include "engine/histogram.h"
#include "engine/loaded_model.h"
#include "image/picture.h"
#include "model/vision.h"

namespace cachalot::engine {

// A picture, then what the tower made of it. Whoever waits for it holds it, and nobody else does:
// the memory of one that was given up is free at once, or before the tower's next block.
class EncodedImage {
 public:
  EncodedImage(std::shared_ptr<const LoadedModel> weights,
               std::shared_ptr<const image::Picture> picture)
      : weights_(std::move(weights)), picture_(std::move(picture)) {}

  bool ready() const { return ready_.load(std::memory_order_acquire); }
  // Once ready: the rows of all slots, or why there are none.
  const Result<model::ImageRows>& rows() const { return rows_; }

 private:
  friend class ImageEncoder;
  // Until it is ready.
  std::shared_ptr<const LoadedModel> weights_;
  std::shared_ptr<const image::Picture> picture_;
  Result<model::ImageRows> rows_ = Status(Code::kUnavailable, "the image is not encoded yet");
  std::atomic<bool> ready_ = false;
};

class ImageEncoder {
 public:
  explicit ImageEncoder(const RuntimeOptions& options);
  // What is queued is left out, and the tower stops before its next block.
  ~ImageEncoder();

  // Called on the encoder's thread whenever it is through with an image: that is ready, or was
  // given up. Before the first encode().
  void on_ready(std::function<void()> call) { on_ready_ = std::move(call); }

  // Any thread. The weights are held until the image was encoded.
  std::shared_ptr<const EncodedImage> encode(std::shared_ptr<const LoadedModel> weights,
                                             std::shared_ptr<const image::Picture> picture);

  // Seconds of every image that was encoded to its end.
  Histogram seconds() const;

 private:
  void run();
  // Makes it ready, if it is held until then.
  void encode(const std::weak_ptr<EncodedImage>& job);
  // kCancelled once `stop` says so.
  Result<model::ImageRows> run_tower(const LoadedModel& weights,
                                     const image::Picture& picture,
                                     const std::function<bool()>& stop);

  const RuntimeOptions options_;
  std::function<void()> on_ready_;
  // Of the thread, made for the first image.
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<ops::BackgroundStream> stream_;

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::weak_ptr<EncodedImage>> jobs_;
  std::atomic<bool> stopping_ = false;  // written under the mutex
  Histogram seconds_ = Histogram::of_latencies();
  std::thread thread_;  // started by the first image
};

// What is encoded, and the rows of images used lately, by digest: of one version of the weights, so
// that those of another never come up. Not thread-safe: the scheduler's.
class EncodedImages {
 public:
  EncodedImages(ImageEncoder& encoder, int64_t most_bytes)
      : encoder_(encoder), most_bytes_(most_bytes) {}

  // The picture's image, begun now if it is not known.
  std::shared_ptr<const EncodedImage> get(const std::shared_ptr<const LoadedModel>& weights,
                                          const std::shared_ptr<const image::Picture>& picture);
  // Keeps one that is ready for later requests, and gives up the least recently used beyond the
  // bound.
  void keep(const std::shared_ptr<const EncodedImage>& encoded);
  void clear();
  uint64_t reused() const { return reused_; }

 private:
  ImageEncoder& encoder_;
  int64_t most_bytes_;
  std::map<image::Digest, std::weak_ptr<const EncodedImage>> known_;
  std::list<std::shared_ptr<const EncodedImage>> kept_;  // the latest first
  int64_t kept_bytes_ = 0;
  uint64_t reused_ = 0;
};

}  // namespace cachalot::engine
