#include "server/openai_fields.h"

#include <charconv>
#include <limits>

#include "base/format.h"
#include "base/json.h"
#include "text/json_fields.h"

namespace cachalot::server {
namespace {

using text::Json;

constexpr int64_t kMaxChoices = 128;
constexpr size_t kMaxStops = 16;
constexpr size_t kMaxStopBytes = 1024;
constexpr int64_t kMaxOutput = int64_t{1} << 31;
constexpr int64_t kMaxPriority = 1000;
constexpr double kLeastTimeout = 0.001, kLongestTimeout = 86400;  // seconds

// Fields that change the result in ways we do not have: refused, since ignoring them would answer
// another question. Everything else that is unknown is ignored, as clients expect.
constexpr std::string_view kRefused[] = {"audio",
                                         "function_call",
                                         "functions",
                                         "min_tokens",
                                         "best_of",
                                         "use_beam_search",
                                         "truncate_prompt_tokens"};

Status read_logit_bias(const Json& body, engine::SamplingParams* out) {
  CACHALOT_TRY(const Json* biases, text::object_field(body, "", "logit_bias"));
  for (size_t i = 0; biases != nullptr && i < biases->items.size(); ++i) {
    const std::string& key = biases->keys[i];
    int32_t id = 0;
    const auto [end, failed] = std::from_chars(key.data(), key.data() + key.size(), id);
    if (failed != std::errc() || end != key.data() + key.size()) {
      return invalid("logit_bias has the key '{}', which is not a token id", key);
    }
    const std::optional<double> value = biases->items[i].number();
    if (!value) {
      return text::must_be(fmt::format("logit_bias.{}", key), "a number", biases->items[i]);
    }
    out->logit_bias[id] = static_cast<float>(*value);
  }
  return {};
}

Status read_sampling(const Json& body, GenerationRequest* out) {
  engine::SamplingParams& p = out->sampling;
  // The model card's defaults.
  p.temperature = 1.0f;
  p.top_p = 0.95f;
  const auto number = [&](const char* key, double low, double high, float* value) -> Status {
    CACHALOT_TRY(const std::optional<double> given, text::number_field(body, "", key, low, high));
    if (given) {
      *value = static_cast<float>(*given);
    }
    return {};
  };
  CACHALOT_RETURN_IF_ERROR(number("temperature", 0, 2, &p.temperature));
  CACHALOT_RETURN_IF_ERROR(number("top_p", 0, 1, &p.top_p));
  CACHALOT_RETURN_IF_ERROR(number("min_p", 0, 1, &p.min_p));
  CACHALOT_RETURN_IF_ERROR(number("frequency_penalty", -2, 2, &p.frequency_penalty));
  CACHALOT_RETURN_IF_ERROR(number("presence_penalty", -2, 2, &p.presence_penalty));
  CACHALOT_RETURN_IF_ERROR(number("repetition_penalty", 0.01, 100, &p.repetition_penalty));
  CACHALOT_TRY(const std::optional<int64_t> top_k,
               text::integer_field(body, "", "top_k", -1, std::numeric_limits<int32_t>::max()));
  p.top_k = std::max<int64_t>(0, top_k.value_or(0));
  CACHALOT_RETURN_IF_ERROR(read_logit_bias(body, &p));
  CACHALOT_TRY(const std::optional<int64_t> seed,
               text::integer_field(body, "", "seed", 0, std::numeric_limits<int64_t>::max()));
  if (seed) {
    out->seed = static_cast<uint64_t>(*seed);
  }
  return {};
}

Status read_streaming(const Json& body, GenerationRequest* out) {
  CACHALOT_TRY(const std::optional<bool> stream, text::bool_field(body, "", "stream"));
  out->stream = stream.value_or(false);
  CACHALOT_TRY(const Json* options, text::object_field(body, "", "stream_options"));
  if (options == nullptr) {
    return {};
  }
  if (!out->stream) {
    return invalid("stream_options must be absent unless stream is true");
  }
  CACHALOT_TRY(const std::optional<bool> usage,
               text::bool_field(*options, "stream_options", "include_usage"));
  out->include_usage = usage.value_or(false);
  return {};
}

// structured_outputs: {"json": schema} or {"regex"}, {"grammar"}, {"choice": [...]}.
Status read_structure(const Json& body, GenerationRequest* out) {
  constexpr std::string_view kField = "structured_outputs";
  CACHALOT_TRY(const Json* structure, text::object_field(body, "", kField));
  if (structure == nullptr) {
    return {};
  }
  text::GrammarSpec spec;
  int given = 0;
  if (const Json* schema = text::present(*structure, "json")) {
    ++given;
    spec.kind = text::GrammarSpec::Kind::kSchema;
    spec.text = schema->is_string() ? schema->text : text::python_json(*schema);
  }
  CACHALOT_TRY(const std::string regex, text::string_field(*structure, kField, "regex"));
  if (!regex.empty()) {
    ++given;
    spec.kind = text::GrammarSpec::Kind::kRegex;
    spec.text = regex;
  }
  CACHALOT_TRY(const std::string grammar, text::string_field(*structure, kField, "grammar"));
  if (!grammar.empty()) {
    ++given;
    spec.kind = text::GrammarSpec::Kind::kEbnf;
    spec.text = grammar;
  }
  CACHALOT_TRY(const Json* choices, text::array_field(*structure, kField, "choice"));
  if (choices != nullptr) {
    ++given;
    spec.kind = text::GrammarSpec::Kind::kChoice;
    for (size_t i = 0; i < choices->items.size(); ++i) {
      const Json& choice = choices->items[i];
      if (!choice.is_string() || choice.text.empty()) {
        return text::must_be(
            fmt::format("{}.choice[{}]", kField, i), "a string that is not empty", choice);
      }
      spec.choices.push_back(choice.text);
    }
    if (spec.choices.empty()) {
      return invalid("{}.choice must be an array that is not empty", kField);
    }
  }
  if (given != 1) {
    return invalid("{} must be an object with one of json, regex, grammar and choice", kField);
  }
  if (out->structure) {
    return invalid("{} must be absent where response_format asks for JSON", kField);
  }
  out->structure = std::move(spec);
  out->structure_field = kField;
  return {};
}

Status read_extensions(const Json& body, GenerationRequest* out) {
  for (const std::string_view field : kRefused) {
    const Json* value = text::present(body, field);
    const bool neutral = value != nullptr &&
                         (value->integer() == 0 || (field == "best_of" && value->integer() == 1) ||
                          (value->is(Json::Kind::kBool) && !value->flag));
    if (value != nullptr && !neutral) {
      return error(Code::kUnimplemented, "{} is not supported", field);
    }
  }
  CACHALOT_TRY(const std::optional<bool> ids, text::bool_field(body, "", "return_token_ids"));
  out->return_token_ids = ids.value_or(false);
  CACHALOT_TRY(const std::optional<bool> ignore, text::bool_field(body, "", "ignore_eos"));
  out->ignore_eos = ignore.value_or(false);
  CACHALOT_TRY(const Json* stop_ids, text::array_field(body, "", "stop_token_ids"));
  if (stop_ids != nullptr) {
    CACHALOT_TRY(out->stop_ids, read_ids(*stop_ids, "stop_token_ids"));
  }
  return {};
}

}  // namespace

Status read_openai_fields(const Json& body, GenerationRequest* out) {
  CACHALOT_TRY(out->model, text::string_field(body, "", "model"));
  CACHALOT_RETURN_IF_ERROR(read_sampling(body, out));
  CACHALOT_TRY(out->stop, read_stop(body, "stop"));
  CACHALOT_TRY(const std::optional<int64_t> n, text::integer_field(body, "", "n", 1, kMaxChoices));
  out->n = n.value_or(1);
  for (const char* key : {"max_tokens", "max_completion_tokens"}) {
    CACHALOT_TRY(const std::optional<int64_t> limit,
                 text::integer_field(body, "", key, 0, kMaxOutput));
    if (limit) {
      out->max_tokens = limit;
    }
  }
  CACHALOT_RETURN_IF_ERROR(read_streaming(body, out));
  CACHALOT_RETURN_IF_ERROR(read_structure(body, out));
  CACHALOT_RETURN_IF_ERROR(read_scheduling(body, out));
  return read_extensions(body, out);
}

Status read_scheduling(const Json& body, GenerationRequest* out) {
  CACHALOT_TRY(const std::optional<int64_t> priority,
               text::integer_field(body, "", "priority", -kMaxPriority, kMaxPriority));
  out->priority = static_cast<int>(priority.value_or(0));
  CACHALOT_TRY(out->timeout,
               text::number_field(body, "", "timeout", kLeastTimeout, kLongestTimeout));
  return {};
}

Result<std::vector<std::string>> read_stop(const Json& body, std::string_view key) {
  std::vector<std::string> stops;
  const Json* stop = text::present(body, key);
  if (stop == nullptr) {
    return stops;
  }
  if (stop->is_string()) {
    stops.push_back(stop->text);
  } else if (!stop->is_array()) {
    return text::must_be(key, "a string or an array of strings", *stop);
  }
  for (size_t i = 0; i < stop->items.size(); ++i) {
    if (!stop->items[i].is_string()) {
      return text::must_be(fmt::format("{}[{}]", key, i), "a string", stop->items[i]);
    }
    stops.push_back(stop->items[i].text);
  }
  std::erase(stops, std::string());
  if (stops.size() > kMaxStops) {
    return invalid("{} has {} entries, must have at most {}", key, stops.size(), kMaxStops);
  }
  for (const std::string& text : stops) {
    if (text.size() > kMaxStopBytes) {
      return invalid(
          "{} holds a string of {} bytes, must be at most {}", key, text.size(), kMaxStopBytes);
    }
  }
  return stops;
}

Result<std::vector<int32_t>> read_ids(const Json& array, const std::string& path) {
  std::vector<int32_t> ids;
  ids.reserve(array.items.size());
  for (size_t i = 0; i < array.items.size(); ++i) {
    const std::optional<int64_t> id = array.items[i].integer();
    if (!id || *id < 0 || *id > std::numeric_limits<int32_t>::max()) {
      return text::must_be(
          fmt::format("{}[{}]", path, i), "a token id of the vocabulary", array.items[i]);
    }
    ids.push_back(static_cast<int32_t>(*id));
  }
  return ids;
}

std::string openai_usage(const Usage& usage) {
  JsonWriter w;
  w.begin_object().field("prompt_tokens", usage.prompt_tokens);
  w.field("completion_tokens", usage.completion_tokens);
  w.field("total_tokens", usage.prompt_tokens + usage.completion_tokens);
  w.field("prompt_cache_hit_tokens", usage.cached_tokens);
  w.field("prompt_cache_miss_tokens", usage.prompt_tokens - usage.cached_tokens);
  w.key("prompt_tokens_details").begin_object();
  w.field("cached_tokens", usage.cached_tokens).end_object();
  w.key("completion_tokens_details").begin_object();
  w.field("reasoning_tokens", usage.reasoning_tokens).end_object();
  w.end_object();
  return w.text();
}

void append_openai_error(std::string& out, const ApiError& error) {
  append_event(out, "", openai_error_json(error));
}

std::string_view openai_finish(const Finish& finish) {
  switch (finish.reason) {
    case Finish::Reason::kStop:
    case Finish::Reason::kStopSequence:
      return "stop";
    case Finish::Reason::kLength:
      return "length";
    case Finish::Reason::kToolCalls:
      return "tool_calls";
  }
  return "stop";
}

}  // namespace cachalot::server
