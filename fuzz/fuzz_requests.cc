// Any text as a body of any dialect. The first byte chooses; what is accepted must be ready to run,
// and every refusal must be an error that a client can read.
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "server/generation.h"
#include "text/byte_tokenizer.h"
#include "text/control_tokens.h"

namespace {

using namespace cachalot;

const text::Tokenizer& tokenizer() {
  static const text::Tokenizer tokenizer =
      std::move(*text::Tokenizer::parse(text::byte_level_tokenizer_json(512), "fuzz"));
  return tokenizer;
}

const server::ServedModel& served() {
  static const server::ServedModel model = {
      .name = "m",
      .tokenizer = &tokenizer(),
      .vocab_size = 512,
      .context = 4096,
      .bos_id = 0,
      .images = {{.geometry = {.patch = 4, .cell = 2, .min_pixels = 300, .max_slots = 40},
                  .token = *tokenizer().id_of(text::kImageToken)}}};
  return model;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::array dialects = {
      &server::kChatCompletions, &server::kCompletions, &server::kMessages, &server::kResponses};
  if (size == 0) {
    return 0;
  }
  const server::Dialect& dialect = *dialects[data[0] % dialects.size()];
  const std::string_view body(reinterpret_cast<const char*>(data) + 1, size - 1);
  Result<text::Json> parsed = text::parse_json(body, "request body");
  if (!parsed.ok()) {
    return 0;
  }
  const auto job = [&]() -> Result<std::shared_ptr<server::Job>> {
    CACHALOT_TRY(server::GenerationRequest request, dialect.parse(*parsed, served()));
    return server::prepare(std::move(request), dialect, served());
  }();
  if (!job.ok()) {
    const server::ApiError error = server::api_error(job.error(), &*parsed);
    CACHALOT_CHECK(error.status == 400 || error.status == 404, error.status);
    CACHALOT_CHECK(!error.message.empty());
    CACHALOT_CHECK(text::parse_json(dialect.error(error, "id"), "error").ok());
    return 0;
  }
  CACHALOT_CHECK((*job)->max_tokens >= 0 && !(*job)->prompts.empty());
  for (const server::Prompt& prompt : (*job)->prompts) {
    CACHALOT_CHECK(!prompt.ids.empty());
    for (const int32_t id : prompt.ids) {
      CACHALOT_CHECK(id >= 0 && id < 512, id);
    }
  }
  return 0;
}
