// Encodes images and runs tokens with their rows, and dumps every tensor: what the tests of image
// input compare with the oracle.
//
//   vision_dump MODEL JOB DIR BACKEND PRECISION CHUNK
//
// JOB is a safetensors file: `tokens` I32 [T]; `image` U8 [T], 1 at the slots of images, or
// neither; `patches.I` F32 [N, 3 P P] and `grid.I` I32 [2] (rows, columns) for the images I = 0, 1,
// ... in order. DIR/0.safetensors gets `images.I` beside the tensors of `cachalot score --dump`.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "base/format.h"
#include "engine/dump.h"
#include "engine/runtime.h"
#include "io/safetensors.h"
#include "model/vision.h"

namespace cachalot::engine {
namespace {

struct Job {
  std::string model, file, directory, backend, precision;
  int64_t chunk = 0;
};

// A tensor's values; empty if the file has no such tensor. A mapped tensor need not be aligned.
template <class T>
std::vector<T> values(const io::SafetensorsFile& file, const std::string& name) {
  const TensorView* view = file.find(name);
  std::vector<T> list(view == nullptr ? 0 : static_cast<size_t>(view->shape.elements()));
  if (!list.empty()) {
    std::memcpy(list.data(), view->data, list.size() * sizeof(T));
  }
  return list;
}

Status dump(const Job& job) {
  RuntimeOptions options;
  options.backend = job.backend == "ref"    ? ops::Backend::kRef
                    : job.backend == "cuda" ? ops::Backend::kCuda
                                            : ops::Backend::kCpu;
  options.precision = job.precision == "f32" ? model::Precision::kF32 : model::Precision::kOfficial;
  options.threads = 1;
  CACHALOT_TRY(const auto runtime, Runtime::open(job.model, options));
  CACHALOT_TRY(const io::SafetensorsFile file, io::SafetensorsFile::open(job.file));
  CACHALOT_TRY(const auto tower,
               model::VisionTower::create(runtime->model(),
                                          {.backend = options.backend, .pool = &runtime->threads()},
                                          options.precision));
  DumpObserver observer(job.directory, "");
  CACHALOT_RETURN_IF_ERROR(observer.begin(0));
  std::vector<uint8_t> rows;  // of all images
  for (int64_t i = 0;; ++i) {
    std::vector<float> patches = values<float>(file, fmt::format("patches.{}", i));
    const std::vector<int32_t> grid = values<int32_t>(file, fmt::format("grid.{}", i));
    if (patches.empty()) {
      break;
    }
    const TensorView view(
        patches.data(), DType::kF32, file.find(fmt::format("patches.{}", i))->shape);
    CACHALOT_TRY(const model::ImageRows image, tower.encode(view, {grid[0], grid[1]}));
    const int32_t zero = 0;
    observer.visit(fmt::format("images.{}", i), image.view(), {{}, {&zero, 1}});
    rows.insert(rows.end(), image.bytes.begin(), image.bytes.end());
  }
  const std::vector<int32_t> tokens = values<int32_t>(file, "tokens");
  const std::vector<uint8_t> mask = values<uint8_t>(file, "image");
  CACHALOT_TRY(const auto runner, runtime->make_runner());
  CACHALOT_TRY(const auto cache, runtime->make_cache());
  const DType act = model::activation_dtype(options.precision);
  const int64_t width = runtime->config().hidden_size;
  const auto total = static_cast<int64_t>(tokens.size());
  int64_t row = 0;
  for (int64_t begin = 0; begin < total; begin += job.chunk) {
    const auto n = static_cast<int32_t>(std::min(job.chunk, total - begin));
    const auto of_chunk =
        std::span(mask).subspan(static_cast<size_t>(begin), static_cast<size_t>(n));
    const int64_t images = std::ranges::count(of_chunk, 1);
    model::StepSequence step{
        .view = &cache->view(),
        .tokens = std::span(tokens).subspan(static_cast<size_t>(begin), static_cast<size_t>(n)),
        .image = of_chunk,
        .all_logits = true};
    if (images > 0) {
      step.image_rows = {rows.data() + row * width * dtype_bytes(act), act, {images, width}};
      row += images;
    }
    CACHALOT_RETURN_IF_ERROR(cache->reserve(begin + n));
    CACHALOT_TRY(const TensorView on_backend, runner->run({&step, 1}, &observer));
    CACHALOT_TRY(const TensorView logits, runner->on_host(on_backend));
    const int32_t first = static_cast<int32_t>(begin);
    observer.visit("logits", logits, {{}, {&first, 1}});
    CACHALOT_RETURN_IF_ERROR(runner->commit({&n, 1}));
  }
  return observer.end();
}

}  // namespace
}  // namespace cachalot::engine

int main(int argc, char** argv) {
  if (argc != 7) {
    std::fprintf(stderr, "vision_dump MODEL JOB DIR BACKEND PRECISION CHUNK\n");
    return 2;
  }
  cachalot::engine::Job job{argv[1], argv[2], argv[3], argv[4], argv[5], std::stoll(argv[6])};
  const cachalot::Status status = cachalot::engine::dump(job);
  if (!status.ok()) {
    std::fprintf(stderr, "vision_dump: %s\n", status.message().c_str());
    return 1;
  }
  return 0;
}
