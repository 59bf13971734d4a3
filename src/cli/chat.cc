// cachalot chat: an interactive conversation.
#include <histedit.h>
#include <unistd.h>

#include <cstdio>
#include <memory>

#include "base/file.h"
#include "base/format.h"
#include "base/json.h"
#include "cli/command.h"
#include "cli/input.h"
#include "cli/run_flags.h"
#include "engine/prompt_images.h"
#include "image/data_url.h"
#include "text/chat.h"
#include "text/chat_parser.h"

namespace cachalot::cli {
namespace {

struct ChatFlags {
  RunFlags run;
  SamplingFlags sampling;
  int64_t tokens = 1024;
  std::string system;
  std::vector<std::string> images;
};

struct Turn {
  std::string role, content, reasoning;
  std::vector<std::string> images;  // data: URLs, shown before the text
};

const char kHelp[] =
    "/effort N    reasoning effort, 1 to 100 or low, high, max\n"
    "/think on    think before answering; /think off: answer at once\n"
    "/image FILE  show an image with the next message\n"
    "/reset       forget the conversation, and images that wait for a message\n"
    "/save FILE   write the conversation as a chat-completions request body\n"
    "/quit        leave\n";

char* prompt(EditLine*) {
  static char text[] = "> ";
  return text;
}

// Line editing with history on a terminal, plain lines from a pipe.
class LineReader {
 public:
  LineReader() : terminal_(::isatty(STDIN_FILENO) != 0) {
    if (terminal_) {
      edit_ = el_init("cachalot", stdin, stdout, stderr);
      history_ = history_init();
      HistEvent event;
      history(history_, &event, H_SETSIZE, 1000);
      el_set(edit_, EL_PROMPT, &prompt);
      el_set(edit_, EL_EDITOR, "emacs");
      el_set(edit_, EL_HIST, history, history_);
    }
  }
  ~LineReader() {
    if (terminal_) {
      history_end(history_);
      el_end(edit_);
    }
  }
  LineReader(const LineReader&) = delete;
  LineReader& operator=(const LineReader&) = delete;

  // False at the end of input.
  bool read(std::string& line) {
    line.clear();
    if (terminal_) {
      int count = 0;
      const char* text = el_gets(edit_, &count);
      if (text == nullptr || count <= 0) {
        return false;
      }
      HistEvent event;
      history(history_, &event, H_ENTER, text);
      line.assign(text, static_cast<size_t>(count));
    } else {
      int c;
      while ((c = std::fgetc(stdin)) != EOF && c != '\n') {
        line.push_back(static_cast<char>(c));
      }
      if (c == EOF && line.empty()) {
        return false;
      }
    }
    while (!line.empty() && (line.back() == '\n' || line.back() == '\r')) {
      line.pop_back();
    }
    return true;
  }

 private:
  bool terminal_;
  EditLine* edit_ = nullptr;
  History* history_ = nullptr;
};

class Conversation {
 public:
  // A turn finds the turns before it in the prefix cache.
  Conversation(const ChatFlags& flags, engine::Runtime& runtime)
      : flags_(flags),
        runtime_(runtime),
        generator_(runtime, {.chunk = flags.run.chunk, .max_running = 1, .prefix_cache = true}) {
    reset();
  }

  void reset() {
    turns_.clear();
    shown_.clear();
    if (!flags_.system.empty()) {
      turns_.push_back({"system", flags_.system, "", {}});
    }
  }

  // The conversation as a chat-completions request body.
  std::string body() const {
    JsonWriter w;
    w.begin_object().key("messages").begin_array();
    for (const Turn& turn : turns_) {
      w.begin_object().field("role", turn.role).key("content");
      write_content(w, turn);
      if (!turn.reasoning.empty()) {
        w.field("reasoning_content", turn.reasoning);
      }
      w.end_object();
    }
    w.end_array().key("thinking").begin_object();
    w.field("type", thinking_ ? "enabled" : "disabled").end_object();
    w.key("reasoning_effort").raw(effort_).end_object();
    return w.text();
  }

  Status answer(const std::string& question) {
    turns_.push_back({"user", question, "", std::exchange(shown_, {})});
    const Status status = generate();
    if (!status.ok()) {
      shown_ = std::move(turns_.back().images);
      turns_.pop_back();
    }
    return status;
  }

  // Shows an image with the next message.
  Status show(const std::string& path) {
    CACHALOT_TRY(const std::vector<engine::ImageFile> files, read_image_files({path}));
    shown_.push_back(image::make_data_url(files[0].bytes));
    return {};
  }

  // Returns false for /quit.
  bool command(const std::string& line) {
    const size_t space = line.find(' ');
    const std::string name = line.substr(0, space);
    const std::string value = space == std::string::npos ? "" : line.substr(space + 1);
    if (name == "/quit") {
      return false;
    }
    if (name == "/reset") {
      reset();
    } else if (name == "/image" && !value.empty()) {
      if (const Status status = show(value); !status.ok()) {
        std::fputs(fmt::format("{}\n", status.message()).c_str(), stderr);
      }
    } else if (name == "/think" && (value == "on" || value == "off")) {
      thinking_ = value == "on";
    } else if (name == "/effort" && !value.empty()) {
      const std::string before = effort_;
      const bool number = value.find_first_not_of("0123456789") == std::string::npos;
      effort_ = number ? value : json_quote(value);
      if (const auto parsed = text::parse_chat_request(probe()); !parsed.ok()) {
        std::fputs(fmt::format("{}\n", parsed.error().message()).c_str(), stderr);
        effort_ = before;
      }
    } else if (name == "/save" && !value.empty()) {
      if (const Status status = write_file(value, body() + "\n"); !status.ok()) {
        std::fputs(fmt::format("{}\n", status.message()).c_str(), stderr);
      }
    } else {
      std::fputs(kHelp, stderr);
    }
    return true;
  }

 private:
  static void write_content(JsonWriter& w, const Turn& turn) {
    if (turn.images.empty()) {
      w.value(turn.content);
      return;
    }
    w.begin_array();
    for (const std::string& url : turn.images) {
      w.begin_object().field("type", "image_url").key("image_url").begin_object();
      w.field("url", url).end_object().end_object();
    }
    w.begin_object().field("type", "text").field("text", turn.content).end_object().end_array();
  }

  // A minimal request with the present effort, to check it.
  std::string probe() const {
    return R"({"messages": [{"role": "user", "content": ""}], "reasoning_effort": )" + effort_ +
           "}";
  }

  Status generate() {
    CACHALOT_TRY(const text::ChatRequest request, text::parse_chat_request(body()));
    const auto format = engine::image_format(runtime_.config(), runtime_.tokenizer());
    CACHALOT_TRY(engine::ImagePrompt prompt,
                 engine::encode_chat(runtime_.tokenizer(),
                                     request,
                                     format,
                                     runtime_.config().max_position_embeddings,
                                     "messages"));
    CACHALOT_TRY(std::vector<engine::PromptImage> images, engine::decode_images(prompt, format));
    CACHALOT_TRY(const engine::SamplingParams sampling, flags_.sampling.resolve());
    text::ChatParser parser(runtime_.tokenizer(),
                            {.start = prompt.start, .stop = flags_.sampling.stop});
    Turn answer{"assistant", "", "", {}};
    const auto show = [&](const std::vector<text::ChatEvent>& events) {
      for (const text::ChatEvent& event : events) {
        const bool reasoning = event.type == text::ChatEvent::Type::kReasoning;
        if (!reasoning && event.type != text::ChatEvent::Type::kContent) {
          continue;
        }
        (reasoning ? answer.reasoning : answer.content) += event.text;
        // Reasoning goes to stderr, dimmed on a terminal: stdout holds the answers alone.
        std::FILE* out = reasoning ? stderr : stdout;
        const bool dim = reasoning && ::isatty(STDERR_FILENO) != 0;
        std::fputs(((dim ? "\x1b[2m" : "") + event.text + (dim ? "\x1b[0m" : "")).c_str(), out);
        std::fflush(out);
      }
    };
    CACHALOT_RETURN_IF_ERROR(generator_.generate(
        {{.prompt = std::move(prompt.ids),
          .images = std::move(images),
          .sampling = sampling,
          .max_tokens = flags_.tokens}},
        nullptr,
        {.on_token = [&](size_t, int32_t token) { show(parser.push(token)); }}));
    show(parser.finish());
    std::fputs("\n", stdout);
    turns_.push_back(std::move(answer));
    return {};
  }

  const ChatFlags& flags_;
  engine::Runtime& runtime_;
  engine::Generator generator_;
  std::vector<Turn> turns_;
  std::vector<std::string> shown_;  // images of the next message, as data: URLs
  bool thinking_ = false;
  std::string effort_ = "\"high\"";
};

Status chat(const ChatFlags& flags) {
  CACHALOT_TRY(const std::unique_ptr<engine::Runtime> runtime, open_runtime(flags.run));
  std::fputs("Type a message, /help for commands, Ctrl-D to leave.\n", stderr);
  LineReader reader;
  Conversation conversation(flags, *runtime);
  for (const std::string& path : flags.images) {
    CACHALOT_RETURN_IF_ERROR(conversation.show(path));
  }
  std::string line;
  while (reader.read(line)) {
    if (line.empty()) {
      continue;
    }
    if (line.front() == '/') {
      if (!conversation.command(line)) {
        break;
      }
      continue;
    }
    if (const Status status = conversation.answer(line); !status.ok()) {
      std::fputs(fmt::format("{}\n", status.message()).c_str(), stderr);
    }
  }
  return {};
}

}  // namespace

void add_chat(CLI::App& app, Action& action) {
  auto flags = std::make_shared<ChatFlags>();
  CLI::App* command = app.add_subcommand("chat", "An interactive conversation");
  flags->run.add_to(*command);
  flags->sampling.add_to(*command);
  command->add_option("-n,--tokens", flags->tokens, "Tokens per answer")->capture_default_str();
  command->add_option("--system", flags->system, "A system message");
  command->add_option(
      "--image", flags->images, "An image file to show with the first message (repeatable)");
  command->callback([flags, &action] { action = [flags] { return chat(*flags); }; });
}

}  // namespace cachalot::cli
