#include "cli/input.h"

#include "base/file.h"
#include "base/format.h"
#include "text/chat.h"
#include "text/json_fields.h"

namespace cachalot::cli {
namespace {

Result<std::vector<int32_t>> parse_line(const std::string& line, const text::Tokenizer& tokenizer) {
  CACHALOT_TRY(const text::Json value, text::parse_json(line, "the line"));
  if (!value.is_object()) {
    return text::must_be("the line", "an object", value);
  }
  if (const text::Json* text = value.find("text")) {
    return text->is_string() ? tokenizer.encode(text->text)
                             : text::must_be("'text'", "a string", *text);
  }
  const text::Json* tokens = value.find("tokens");
  if (tokens == nullptr || !tokens->is_array()) {
    return invalid("neither 'text' nor an array 'tokens'");
  }
  return text::token_ids(*tokens, "tokens");
}

}  // namespace

Result<std::vector<std::vector<int32_t>>> read_token_lines(const std::string& path,
                                                           const text::Tokenizer& tokenizer) {
  CACHALOT_TRY(const std::string content, read_file(path));
  std::vector<std::vector<int32_t>> result;
  size_t begin = 0, number = 0;
  while (begin < content.size()) {
    const size_t end = std::min(content.find('\n', begin), content.size());
    const std::string line = content.substr(begin, end - begin);
    begin = end + 1;
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string::npos) {
      continue;
    }
    CACHALOT_TRY(std::vector<int32_t> ids,
                 parse_line(line, tokenizer).with(fmt::format("{}:{}", path, number)));
    result.push_back(std::move(ids));
  }
  return result;
}

Result<engine::ImagePrompt> read_chat(const std::string& path,
                                      const text::Tokenizer& tokenizer,
                                      const model::ModelConfig& config) {
  CACHALOT_TRY(const std::string body, read_file(path));
  CACHALOT_TRY(const text::ChatRequest request, text::parse_chat_request(body).with(path));
  return engine::encode_chat(tokenizer,
                             request,
                             engine::image_format(config, tokenizer),
                             config.max_position_embeddings,
                             "messages")
      .with(path);
}

Result<std::vector<engine::ImageFile>> read_image_files(const std::vector<std::string>& paths) {
  std::vector<engine::ImageFile> files;
  for (const std::string& path : paths) {
    CACHALOT_TRY(const std::string bytes, read_file(path));
    files.push_back({fmt::format("'{}'", path), {bytes.begin(), bytes.end()}});
  }
  return files;
}

}  // namespace cachalot::cli
