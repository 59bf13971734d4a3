// cachalot serve: the HTTP server.
#include <malloc.h>
#include <semaphore.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "base/format.h"
#include "base/log.h"
#include "cli/command.h"
#include "cli/engine_flags.h"
#include "cli/server_process.h"
#include "engine/engine.h"
#include "server/app.h"
#include "server/http.h"

namespace cachalot::cli {
namespace {

struct ServeFlags {
  EngineFlags engine;
  server::HttpOptions http;
  server::AppOptions app;
  std::vector<std::string> names;
  double drain_seconds = 30;
};

// glibc gives memory back in pieces as large as any that it has seen freed, up to 32 MiB: the arena
// of every thread that once needed as much would keep that. A fixed size ends this.
void give_memory_back() {
  constexpr int kPieceBytes = 1 << 20;
  mallopt(M_MMAP_THRESHOLD, kPieceBytes);
  mallopt(M_TRIM_THRESHOLD, kPieceBytes);
}

sem_t stop_requested;

void request_stop(int /*signal*/) {
  sem_post(&stop_requested);
}

// Waits for SIGINT or SIGTERM. A second one ends the process at once, as one while the model loads
// does.
void wait_for_signal() {
  sem_init(&stop_requested, 0, 0);
  struct sigaction action{};
  action.sa_handler = request_stop;
  action.sa_flags = SA_RESETHAND;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  while (sem_wait(&stop_requested) != 0) {
  }
}

server::ServedModel served_model(const ServeFlags& flags,
                                 const engine::Runtime& runtime,
                                 const engine::Engine& engine) {
  server::ServedModel out;
  const model::ModelConfig& config = runtime.config();
  out.tokenizer = &runtime.tokenizer();
  out.vocab_size = config.vocab_size;
  const int64_t limit = engine.options().max_context;
  out.context = limit > 0 ? limit : config.max_position_embeddings;
  out.bos_id = static_cast<int32_t>(config.bos_token_id);
  out.images = engine::image_format(config, runtime.tokenizer());
  out.name =
      flags.names.empty()
          ? std::filesystem::weakly_canonical(runtime.loaded()->directory()).filename().string()
          : flags.names.front();
  for (size_t i = 1; i < flags.names.size(); ++i) {
    out.aliases.push_back(flags.names[i]);
  }
  // The names that clients of the hosted service use.
  for (const char* name : {"deepseek-flash", "deepseek-v4-flash", "deepseek-v4-flash-vision-exp"}) {
    out.aliases.emplace_back(name);
  }
  Result<std::shared_ptr<text::GrammarCompiler>> grammar =
      text::GrammarCompiler::create(runtime.tokenizer(), out.vocab_size);
  if (grammar.ok()) {
    out.grammar = *grammar;
  } else {
    log_warning("structured output is off: {}", grammar.error().message());
  }
  return out;
}

Status serve(ServeFlags flags) {
  raise_file_limit();
  give_memory_back();
  server::App app(flags.app);
  CACHALOT_TRY(const std::unique_ptr<server::HttpServer> http,
               server::HttpServer::start(
                   flags.http,
                   [&app](server::HttpRequest request, std::shared_ptr<server::Exchange> exchange) {
                     app.handle(std::move(request), std::move(exchange));
                   },
                   server::App::unread_error));
  const bool v6 = flags.http.host.find(':') != std::string::npos;
  const std::string host = v6 ? "[" + flags.http.host + "]" : flags.http.host;
  std::fputs(fmt::format("http://{}:{}\n", host, http->port()).c_str(), stdout);
  std::fflush(stdout);

  CACHALOT_TRY(const std::unique_ptr<engine::Runtime> runtime, open_runtime(flags.engine.run));
  CACHALOT_TRY(const std::unique_ptr<engine::Engine> engine,
               engine::Engine::start(*runtime, flags.engine.options()));
  const server::ServedModel model = served_model(flags, *runtime, *engine);
  app.serve(*engine, model);
  log_info("serving {} with a context of {} tokens", model.name, model.context);

  wait_for_signal();
  log_info("draining for at most {} s; a second signal ends at once", flags.drain_seconds);
  app.drain();
  const std::chrono::milliseconds limit(static_cast<int64_t>(flags.drain_seconds * 1000));
  const bool drained = engine->drain(limit);
  // What the engine has produced is still to be written.
  const bool written = http->stop(std::chrono::milliseconds(drained ? 5000 : 1000));
  return drained && written ? Status() : error(Code::kUnavailable, "some requests were cut off");
}

}  // namespace

void add_serve(CLI::App& app, Action& action) {
  auto flags = std::make_shared<ServeFlags>();
  CLI::App* command = app.add_subcommand("serve", "The HTTP server and its web page");
  flags->engine.add_to(*command);
  command->add_option("--host", flags->http.host, "Address to listen on")->capture_default_str();
  command->add_option("--port", flags->http.port, "Port; 0: any free one")->capture_default_str();
  command->add_option("--model-name",
                      flags->names,
                      "Name of the model in requests; default: the directory's (repeatable)");
  // What a shell makes of a variable that is not set would let everyone in.
  const CLI::Validator not_empty(
      [](const std::string& key) { return key.empty() ? "the key is empty" : ""; }, "");
  command
      ->add_option(
          "--api-key", flags->app.api_keys, "Clients must send one of these keys (repeatable)")
      ->check(not_empty);
  command
      ->add_option("--admin-key",
                   flags->app.admin_keys,
                   "Key of requests that swap the weights; default: the API keys (repeatable)")
      ->check(not_empty);
  command->add_option("--max-body", flags->http.max_body, "Largest request body in bytes")
      ->capture_default_str();
  command
      ->add_option("--max-connections",
                   flags->http.max_connections,
                   "Connections at a time; further ones are closed")
      ->capture_default_str();
  command
      ->add_option("--request-timeout",
                   flags->app.request_timeout,
                   "Seconds that a request may take; 0: as long as it needs")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
  command
      ->add_option(
          "--drain-timeout", flags->drain_seconds, "Seconds for requests in progress after SIGTERM")
      ->check(CLI::Range(0.0, 86400.0))
      ->capture_default_str();
  command->callback([flags, &action] { action = [flags] { return serve(*flags); }; });
}

}  // namespace cachalot::cli
