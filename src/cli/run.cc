// cachalot run: generate from a prompt, a chat request, or a file of prompts.
#include <unistd.h>

#include <cstdio>
#include <memory>

#include "base/file.h"
#include "base/format.h"
#include "base/json.h"
#include "cli/command.h"
#include "cli/input.h"
#include "cli/run_flags.h"

namespace cachalot::cli {
namespace {

struct RunCommandFlags {
  RunFlags run;
  SamplingFlags sampling;
  std::string prompt, chat, input, output;
  std::vector<std::string> images;
  int64_t tokens = 128;
  bool ignore_eos = false;
  bool json = false;
};

std::string result_json(const engine::Runtime& runtime,
                        const engine::GenerateRequest& request,
                        const engine::GenerateResult& result) {
  JsonWriter w;
  const auto ids = [&](std::string_view name, const std::vector<int32_t>& values) {
    w.key(name).begin_array();
    for (int32_t id : values) {
      w.value(id);
    }
    w.end_array();
  };
  w.begin_object();
  ids("prompt_token_ids", request.prompt);
  ids("token_ids", result.token_ids);
  w.field("text", result.text).key("logprobs").begin_array();
  for (float logprob : result.logprobs) {
    w.value(static_cast<double>(logprob));
  }
  w.end_array()
      .field("finish_reason", result.finish == engine::FinishReason::kStop ? "stop" : "length")
      .key("timing")
      .begin_object()
      .field("load_s", runtime.load_seconds())
      .field("prefill_s", result.prefill_seconds)
      .field("decode_s", result.decode_seconds)
      .end_object()
      .key("speculation")
      .begin_object()
      .field("draft_tokens", result.draft_tokens)
      .field("accepted_tokens", result.accepted_tokens)
      .end_object()
      .end_object();
  return w.text() + "\n";
}

double rate(int64_t tokens, double seconds) {
  return seconds > 0 ? static_cast<double>(tokens) / seconds : 0;
}

// The images and the text behind them.
Result<engine::ImagePrompt> continued_prompt(const RunCommandFlags& flags,
                                             const engine::Runtime& runtime) {
  const model::ModelConfig& config = runtime.config();
  CACHALOT_TRY(const std::vector<int32_t> text, runtime.tokenizer().encode(flags.prompt));
  CACHALOT_TRY(std::vector<engine::ImageFile> files, read_image_files(flags.images));
  // A continuation starts like every training document: with BOS.
  std::vector<int32_t> ids = {static_cast<int32_t>(config.bos_token_id)};
  ids.insert(ids.end(), files.size(), static_cast<int32_t>(config.image_token_id));
  ids.insert(ids.end(), text.begin(), text.end());
  return engine::place_images(ids,
                              std::move(files),
                              engine::image_format(config, runtime.tokenizer()),
                              config.max_position_embeddings);
}

Status run(const RunCommandFlags& flags) {
  CACHALOT_TRY(const std::unique_ptr<engine::Runtime> runtime, open_runtime(flags.run));
  const std::unique_ptr<engine::DumpObserver> observer = make_observer(flags.run);
  CACHALOT_TRY(const engine::SamplingParams sampling, flags.sampling.resolve());
  std::vector<engine::ImagePrompt> prompts;
  if (!flags.input.empty()) {
    CACHALOT_TRY(std::vector<std::vector<int32_t>> lines,
                 read_token_lines(flags.input, runtime->tokenizer()));
    for (std::vector<int32_t>& ids : lines) {
      prompts.push_back({.ids = std::move(ids)});
    }
  } else if (!flags.chat.empty()) {
    CACHALOT_TRY(engine::ImagePrompt prompt,
                 read_chat(flags.chat, runtime->tokenizer(), runtime->config()));
    prompts.push_back(std::move(prompt));
  } else {
    CACHALOT_TRY(engine::ImagePrompt prompt, continued_prompt(flags, *runtime));
    prompts.push_back(std::move(prompt));
  }
  std::vector<engine::GenerateRequest> requests;
  for (const engine::ImagePrompt& prompt : prompts) {
    CACHALOT_TRY(std::vector<engine::PromptImage> images,
                 engine::decode_images(
                     prompt, engine::image_format(runtime->config(), runtime->tokenizer())));
    requests.push_back({.prompt = prompt.ids,
                        .images = std::move(images),
                        .sampling = sampling,
                        .max_tokens = flags.tokens,
                        .stop = flags.sampling.stop,
                        .ignore_eos = flags.ignore_eos});
  }
  engine::Generator generator(*runtime, flags.run.generator_options());
  const bool stream = flags.input.empty() && !flags.json;
  if (stream && flags.chat.empty()) {
    std::fputs(flags.prompt.c_str(), stdout);
  }
  engine::Generator::Listener listener;
  if (stream) {
    listener.on_text = [](size_t, std::string_view piece) {
      std::fwrite(piece.data(), 1, piece.size(), stdout);
      std::fflush(stdout);
    };
  }
  CACHALOT_TRY(const std::vector<engine::GenerateResult> results,
               generator.generate(requests, observer.get(), listener));
  if (!flags.input.empty()) {
    std::string lines;
    for (size_t i = 0; i < results.size(); ++i) {
      lines += result_json(*runtime, requests[i], results[i]);
    }
    if (flags.output == "-") {
      std::fputs(lines.c_str(), stdout);
      return {};
    }
    return write_file(flags.output, lines);
  }
  const engine::GenerateResult& result = results[0];
  if (flags.json) {
    std::fputs(result_json(*runtime, requests[0], result).c_str(), stdout);
    return {};
  }
  std::fputs("\n", stdout);
  const auto generated = static_cast<int64_t>(result.token_ids.size());
  std::fputs(
      fmt::format("load {:.2f} s; prefill {} tokens, {:.1f} tokens/s; decode {} tokens, {:.1f} "
                  "tokens/s\n",
                  runtime->load_seconds(),
                  requests[0].prompt.size(),
                  rate(static_cast<int64_t>(requests[0].prompt.size()), result.prefill_seconds),
                  generated,
                  rate(generated - 1, result.decode_seconds))
          .c_str(),
      stderr);
  return {};
}

}  // namespace

void add_run(CLI::App& app, Action& action) {
  auto flags = std::make_shared<RunCommandFlags>();
  CLI::App* command = app.add_subcommand("run", "Generate text");
  flags->run.add_to(*command);
  flags->run.add_dump_to(*command);
  flags->sampling.add_to(*command);
  auto* input = command->add_option_group("input");
  auto* prompt = input->add_option("-p,--prompt", flags->prompt, "A text to continue");
  input->add_option("--chat", flags->chat, "A file with a chat-completions request body");
  auto* file = input->add_option("--input", flags->input, "JSON lines with 'tokens' or 'text'");
  input->require_option(1);
  command
      ->add_option(
          "--image", flags->images, "A JPEG, PNG, WebP or GIF file before the text (repeatable)")
      ->needs(prompt);
  command->add_option("--output", flags->output, "JSON lines of results; - for stdout")
      ->needs(file);
  file->needs(command->get_option("--output"));
  command->add_option("-n,--tokens", flags->tokens, "Tokens to generate")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  command->add_flag("--ignore-eos", flags->ignore_eos, "Go on after the end-of-sequence token");
  command->add_flag("--json", flags->json, "One JSON document instead of streamed text");
  command->callback([flags, &action] { action = [flags] { return run(*flags); }; });
}

}  // namespace cachalot::cli
