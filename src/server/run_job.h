// Runs a job on the engine and answers its exchange.
#pragma once

#include <functional>
#include <memory>

#include "engine/engine.h"
#include "server/exchange.h"
#include "server/generation.h"

namespace cachalot::server {

// Submits every choice of the job, all to run on `weights` (null: those in use); their events
// become the answer, in one piece or as a stream. A client that goes away cancels all of them.
// `done` is told the HTTP status just before the answer is complete: 499 if there is nobody left to
// answer. `engine` must outlive the exchange; everything runs on the exchange's strand.
void run_job(engine::Engine& engine,
             std::shared_ptr<const Job> job,
             std::shared_ptr<const engine::LoadedModel> weights,
             const Dialect& dialect,
             std::shared_ptr<Exchange> exchange,
             std::function<void(int status)> done);

}  // namespace cachalot::server
