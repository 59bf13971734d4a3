// From the images of a chat to the slots of a prompt.
//
//   CACHALOT_TRY(const ImagePrompt prompt, encode_chat(tokenizer, chat, format, most, "messages"));
//   CACHALOT_TRY(const std::vector<PromptImage> images, decode_images(prompt, format));
//
// The first reads no more than the headers of the files, so that counting the tokens of a prompt or
// refusing one that is too long costs no decoding.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"
#include "image/picture.h"
#include "model/config.h"
#include "text/chat.h"

namespace cachalot::engine {

// What a model makes of images.
struct ImageFormat {
  image::Geometry geometry;
  int32_t token = 0;  // the id of every slot
};

// Nothing if the model takes no images: it has no vision tower, or its tokenizer no image token.
std::optional<ImageFormat> image_format(const model::ModelConfig& config,
                                        const text::Tokenizer& tokenizer);

// An image as a client sent it.
struct ImageFile {
  std::string field;  // where it came from, for messages
  std::vector<uint8_t> bytes;
};

struct ImagePrompt {
  std::vector<int32_t> ids;  // with every image token replaced by the slots of its image
  std::vector<ImageFile> files;
  std::vector<int64_t> positions;  // of their first slots
  text::OutputStart start = text::OutputStart::kContent;
};

// kOutOfRange, naming `field`: a text of so many bytes has more than `most_tokens`, however it is
// split.
Status check_length(const text::Tokenizer& tokenizer,
                    int64_t bytes,
                    int64_t most_tokens,
                    std::string_view field);

// `ids` has one image token for each file. Errors: as decoding gives them for headers, naming the
// field; kOutOfRange: the prompt has more than `most_tokens`; kUnimplemented: the model takes no
// images.
Result<ImagePrompt> place_images(const std::vector<int32_t>& ids,
                                 std::vector<ImageFile> files,
                                 const std::optional<ImageFormat>& format,
                                 int64_t most_tokens);

// The prompt of a chat, whose images must be data: URLs. Errors: those of render_chat, check_length
// (naming `field`), encode_prompt and place_images, in this order.
Result<ImagePrompt> encode_chat(const text::Tokenizer& tokenizer,
                                const text::ChatRequest& chat,
                                const std::optional<ImageFormat>& format,
                                int64_t most_tokens,
                                std::string_view field);

// What an engine request takes. Errors name the field.
Result<std::vector<PromptImage>> decode_images(const ImagePrompt& prompt,
                                               const std::optional<ImageFormat>& format);

// Bytes that the images of a request take at most: pixels and rows.
int64_t image_bytes(const EngineRequest& request, const model::ModelConfig& config);

// Whether the images of a request are what the model takes and stand where the prompt has slots,
// and whether they fit into `most_bytes`.
Status check_images(const EngineRequest& request,
                    const model::ModelConfig& config,
                    int64_t most_bytes);

}  // namespace cachalot::engine
