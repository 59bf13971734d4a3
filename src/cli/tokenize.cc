// cachalot tokenize: token ids of a text or of a chat request.
#include <cstdio>
#include <memory>

#include "base/file.h"
#include "base/format.h"
#include "base/json.h"
#include "cli/command.h"
#include "cli/input.h"
#include "cli/run_flags.h"
#include "text/detokenizer.h"

namespace cachalot::cli {
namespace {

struct TokenizeFlags {
  std::string model, text, text_file, chat;
  bool json = false;
};

Status tokenize(const TokenizeFlags& flags) {
  const std::string directory = flags.model.empty() ? default_model() : flags.model;
  CACHALOT_TRY(const text::Tokenizer tokenizer,
               text::Tokenizer::load(directory + "/tokenizer.json"));
  std::vector<int32_t> ids;
  if (!flags.chat.empty()) {
    const std::string config_path = directory + "/config.json";
    model::ModelConfig config;  // a tokenizer alone takes no images
    if (file_exists(config_path)) {
      CACHALOT_TRY(const std::string json, read_file(config_path));
      CACHALOT_TRY(config, model::parse_config(json, config_path));
    }
    CACHALOT_TRY(engine::ImagePrompt prompt, read_chat(flags.chat, tokenizer, config));
    ids = std::move(prompt.ids);
  } else {
    std::string text = flags.text;
    if (!flags.text_file.empty()) {
      CACHALOT_TRY(text, read_file(flags.text_file));
    }
    CACHALOT_TRY(ids, tokenizer.encode(text));
  }
  const std::string decoded = text::decode(tokenizer, ids, {.skip_control = false});
  if (flags.json) {
    JsonWriter w;
    w.begin_object().key("token_ids").begin_array();
    for (int32_t id : ids) {
      w.value(id);
    }
    w.end_array().field("text", decoded).end_object();
    std::fputs((w.text() + "\n").c_str(), stdout);
    return {};
  }
  for (int32_t id : ids) {
    const std::string piece = text::decode(tokenizer, {&id, 1}, {.skip_control = false});
    std::fputs(fmt::format("{:>7}  {}\n", id, json_quote(piece)).c_str(), stdout);
  }
  return {};
}

}  // namespace

void add_tokenize(CLI::App& app, Action& action) {
  auto flags = std::make_shared<TokenizeFlags>();
  CLI::App* command = app.add_subcommand("tokenize", "Token ids of a text or of a chat request");
  command->add_option(
      "-m,--model", flags->model, "Checkpoint directory; default: the embedded model");
  auto* input = command->add_option_group("input");
  input->add_option("--text", flags->text, "A text");
  input->add_option("--text-file", flags->text_file, "A file of text");
  input->add_option("--chat", flags->chat, "A file with a chat-completions request body");
  input->require_option(1);
  command->add_flag("--json", flags->json, "One JSON document: token_ids, text");
  command->callback([flags, &action] { action = [flags] { return tokenize(*flags); }; });
}

}  // namespace cachalot::cli
