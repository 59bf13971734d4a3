// cachalot score: log-probabilities of given tokens.
#include <cstdio>
#include <memory>

#include "base/file.h"
#include "base/format.h"
#include "base/json.h"
#include "base/progress.h"
#include "cli/command.h"
#include "cli/input.h"
#include "cli/run_flags.h"

namespace cachalot::cli {
namespace {

struct ScoreFlags {
  RunFlags run;
  std::string input, output;
  int64_t top = 0;
};

std::string score_line(const std::vector<int32_t>& tokens, const engine::Generator::Score& score) {
  JsonWriter w;
  w.begin_object().key("tokens").begin_array();
  for (int32_t id : tokens) {
    w.value(id);
  }
  w.end_array().key("logprobs").begin_array();
  for (const std::optional<float>& logprob : score.logprobs) {
    if (logprob.has_value()) {
      w.value(static_cast<double>(*logprob));
    } else {
      w.null();
    }
  }
  w.end_array().key("top").begin_array();
  for (const auto& alternatives : score.top) {
    w.begin_array();
    for (const auto& [id, logprob] : alternatives) {
      w.begin_array().value(id).value(static_cast<double>(logprob)).end_array();
    }
    w.end_array();
  }
  w.end_array().end_object();
  return w.text() + "\n";
}

Status score(const ScoreFlags& flags) {
  CACHALOT_TRY(const std::unique_ptr<engine::Runtime> runtime, open_runtime(flags.run));
  const std::unique_ptr<engine::DumpObserver> observer = make_observer(flags.run);
  CACHALOT_TRY(const auto lines, read_token_lines(flags.input, runtime->tokenizer()));
  engine::Generator generator(*runtime, flags.run.generator_options());
  Progress progress("score", static_cast<int64_t>(lines.size()));
  std::string output;
  for (size_t i = 0; i < lines.size(); ++i) {
    if (observer != nullptr) {
      CACHALOT_RETURN_IF_ERROR(observer->begin(static_cast<int64_t>(i)));
    }
    CACHALOT_TRY(const engine::Generator::Score result,
                 generator.score(lines[i], flags.top, observer.get())
                     .with(fmt::format("{}: request {}", flags.input, i)));
    if (observer != nullptr) {
      CACHALOT_RETURN_IF_ERROR(observer->end());
    }
    output += score_line(lines[i], result);
    progress.advance();
  }
  if (flags.output == "-") {
    std::fputs(output.c_str(), stdout);
    return {};
  }
  return write_file(flags.output, output);
}

}  // namespace

void add_score(CLI::App& app, Action& action) {
  auto flags = std::make_shared<ScoreFlags>();
  CLI::App* command = app.add_subcommand("score", "Log-probabilities of given tokens");
  flags->run.add_to(*command);
  flags->run.add_dump_to(*command);
  command->add_option("--input", flags->input, "JSON lines with 'tokens' or 'text'")->required();
  command->add_option("--output", flags->output, "JSON lines; - for stdout")->required();
  command->add_option("--top", flags->top, "Alternatives per token")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 20))
      ->capture_default_str();
  command->callback([flags, &action] { action = [flags] { return score(*flags); }; });
}

}  // namespace cachalot::cli
