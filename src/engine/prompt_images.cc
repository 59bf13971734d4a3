#include "engine/prompt_images.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "base/check.h"
#include "base/format.h"
#include "base/math.h"
#include "image/data_url.h"
#include "image/decode.h"
#include "model/vision.h"
#include "text/control_tokens.h"

namespace cachalot::engine {
namespace {

// Of all images of a prompt. A file of some kilobytes can hold the largest image; this bounds how
// long a request keeps a thread at decoding.
constexpr int64_t kMostPixels = 10 * image::kMaxPixels;

}  // namespace

std::optional<ImageFormat> image_format(const model::ModelConfig& config,
                                        const text::Tokenizer& tokenizer) {
  const model::VisionConfig& vision = config.vision;
  const std::optional<int32_t> token = tokenizer.id_of(text::kImageToken);
  if (vision.num_hidden_layers == 0 || !token || *token != config.image_token_id) {
    return std::nullopt;
  }
  return ImageFormat{.geometry = {.patch = vision.patch_size,
                                  .cell = vision.downsample_ratio,
                                  .min_pixels = vision.min_pixels,
                                  .max_slots = vision.max_image_tokens},
                     .token = *token};
}

Result<ImagePrompt> place_images(const std::vector<int32_t>& ids,
                                 std::vector<ImageFile> files,
                                 const std::optional<ImageFormat>& format,
                                 int64_t most_tokens) {
  ImagePrompt prompt;
  prompt.files = std::move(files);
  if (prompt.files.empty()) {
    prompt.ids = ids;
    return prompt;
  }
  if (!format) {
    return error(Code::kUnimplemented, "{}: this model takes no images", prompt.files[0].field);
  }
  CACHALOT_CHECK(std::ranges::count(ids, format->token) == std::ssize(prompt.files),
                 prompt.files.size());
  int64_t pixels = 0;
  for (const int32_t id : ids) {
    if (id != format->token) {
      prompt.ids.push_back(id);
      continue;
    }
    const ImageFile& file = prompt.files[prompt.positions.size()];
    CACHALOT_TRY(const image::Size size, image::read_size(file.bytes).with(file.field));
    pixels += size.width * size.height;
    if (pixels > kMostPixels) {
      return invalid("{}: the images up to this one have {} pixels, at most {} million are taken",
                     file.field,
                     pixels,
                     kMostPixels / 1'000'000);
    }
    CACHALOT_TRY(const image::Fit place, image::fit(format->geometry, size).with(file.field));
    prompt.positions.push_back(std::ssize(prompt.ids));
    prompt.ids.insert(prompt.ids.end(), static_cast<size_t>(place.slots), format->token);
    if (std::ssize(prompt.ids) > most_tokens) {
      return error(Code::kOutOfRange,
                   "{}: this model's maximum context length is {} tokens, and the prompt has {} up "
                   "to the end of this image",
                   file.field,
                   most_tokens,
                   prompt.ids.size());
    }
  }
  return prompt;
}

Status check_length(const text::Tokenizer& tokenizer,
                    int64_t bytes,
                    int64_t most_tokens,
                    std::string_view field) {
  if (const int64_t least = ceil_div(bytes, tokenizer.longest_token()); least > most_tokens) {
    return error(Code::kOutOfRange,
                 "{}: this model's maximum context length is {} tokens, and the prompt of {} bytes "
                 "has at least {}",
                 field,
                 most_tokens,
                 bytes,
                 least);
  }
  return {};
}

Result<ImagePrompt> encode_chat(const text::Tokenizer& tokenizer,
                                const text::ChatRequest& chat,
                                const std::optional<ImageFormat>& format,
                                int64_t most_tokens,
                                std::string_view field) {
  CACHALOT_TRY(const text::RenderedChat rendered, text::render_chat(chat));
  int64_t bytes = 0;
  for (const text::PromptPart& part : rendered.parts) {
    bytes += part.control ? 0 : std::ssize(part.text);
  }
  CACHALOT_RETURN_IF_ERROR(check_length(tokenizer, bytes, most_tokens, field));
  std::vector<ImageFile> files;
  for (const text::ImageSource& source : rendered.images) {
    if (!format) {
      return error(Code::kUnimplemented, "{}: this model takes no images", source.field);
    }
    CACHALOT_TRY(std::vector<uint8_t> file, image::read_data_url(source.url).with(source.field));
    files.push_back({source.field, std::move(file)});
  }
  CACHALOT_TRY(const std::vector<int32_t> ids, text::encode_prompt(tokenizer, rendered));
  CACHALOT_TRY(ImagePrompt prompt, place_images(ids, std::move(files), format, most_tokens));
  prompt.start = rendered.start;
  return prompt;
}

Result<std::vector<PromptImage>> decode_images(const ImagePrompt& prompt,
                                               const std::optional<ImageFormat>& format) {
  std::vector<PromptImage> images;
  for (size_t i = 0; i < prompt.files.size(); ++i) {
    const ImageFile& file = prompt.files[i];
    CACHALOT_TRY(image::Picture picture,
                 image::make_picture(file.bytes, format->geometry).with(file.field));
    images.push_back(
        {prompt.positions[i], std::make_shared<const image::Picture>(std::move(picture))});
  }
  return images;
}

int64_t image_bytes(const EngineRequest& request, const model::ModelConfig& config) {
  int64_t bytes = 0;
  for (const PromptImage& image : request.images) {
    // Rows have four bytes per value at most.
    bytes += std::ssize(image.picture->rgb) + image.picture->slots * config.hidden_size * 4;
  }
  return bytes;
}

Status check_images(const EngineRequest& request,
                    const model::ModelConfig& config,
                    int64_t most_bytes) {
  if (request.images.empty()) {
    return {};
  }
  if (config.vision.num_hidden_layers == 0) {
    return error(Code::kUnimplemented, "images: this model has no vision tower");
  }
  int64_t end = 0;
  for (size_t i = 0; i < request.images.size(); ++i) {
    const image::Picture& picture = *request.images[i].picture;
    const int64_t begin = request.images[i].position;
    if (picture.patch != config.vision.patch_size || picture.digest == image::Digest{} ||
        picture.slots != model::image_slots(config.vision, {picture.rows, picture.columns})) {
      return invalid("images[{}] was not made for this model", i);
    }
    if (begin < end || picture.slots > std::ssize(request.prompt) - begin) {
      return invalid("images[{}] has no {} slots at position {}", i, picture.slots, begin);
    }
    end = begin + picture.slots;
    for (int64_t p = begin; p < end; ++p) {
      if (request.prompt[static_cast<size_t>(p)] != config.image_token_id) {
        return invalid("prompt[{}] is no slot of images[{}]", p, i);
      }
    }
  }
  if (const int64_t bytes = image_bytes(request, config); bytes > most_bytes) {
    return invalid("images take {} bytes of memory, at most {} are given", bytes, most_bytes);
  }
  return {};
}

}  // namespace cachalot::engine
