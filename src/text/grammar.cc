// Structured output over the xgrammar core. Every request becomes one structural tag, the core's
// own description of formats, so that there is a single way in.
#include "text/grammar.h"

#include <dlpack/dlpack.h>
#include <xgrammar/xgrammar.h>

#include <algorithm>
#include <exception>
#include <string_view>

#include "base/format.h"
#include "base/json.h"
#include "text/control_tokens.h"
#include "text/json_tree.h"

namespace cachalot::text {
namespace {

constexpr size_t kMaxText = size_t{256} << 10;
// The core's parsers of expressions and grammars recurse.
constexpr int kMaxNesting = 128;
constexpr int64_t kCacheBytes = int64_t{256} << 20;
// Consecutive blanks between JSON tokens: enough for indentation, and an end to blanks without end.
constexpr int kMaxBlanks = 64;

Status check_text(const GrammarSpec& spec) {
  size_t size = spec.text.size();
  for (const std::string& choice : spec.choices) {
    size += choice.size();
  }
  for (const GrammarTool& tool : spec.tools) {
    size += tool.name.size() + tool.schema.size();
  }
  if (size > kMaxText) {
    return invalid("a grammar of {} bytes, must be at most {}", size, kMaxText);
  }
  if (spec.kind == GrammarSpec::Kind::kSchema) {
    // Bounds the depth, and names the place of a syntax error.
    return parse_json(spec.text, "schema").status();
  }
  int depth = 0;
  for (const char c : spec.text) {
    depth += c == '(' || c == '[' || c == '{' ? 1 : c == ')' || c == ']' || c == '}' ? -1 : 0;
    if (depth > kMaxNesting) {
      return invalid("brackets are nested more than {} deep", kMaxNesting);
    }
  }
  return {};
}

void write_schema(JsonWriter& w, std::string_view schema, const char* style) {
  w.begin_object().field("type", "json_schema").field("style", style);
  w.field("max_whitespace_cnt", kMaxBlanks).key("json_schema").raw(schema).end_object();
}

void write_constant(JsonWriter& w, std::string_view text) {
  w.begin_object().field("type", "const_string").field("value", text).end_object();
}

// The block of calls in the trained markup (text_protocol: calls, invoke, parameter).
void write_calls(JsonWriter& w, const GrammarSpec& spec) {
  const std::string dsml(kDsmlToken);
  w.begin_object().field("type", "sequence").key("elements").begin_array();
  if (!spec.open) {
    write_constant(w, "\n\n<" + dsml + " calls>\n");
  }
  w.begin_object().field("type", "tags_with_separator").field("separator", "");
  w.field("at_least_one", true).field("stop_after_first", !spec.parallel);
  w.key("tags").begin_array();
  for (const GrammarTool& tool : spec.tools) {
    w.begin_object().field("type", "tag");
    w.field("begin", "<" + dsml + " invoke name=\"" + tool.name + "\">\n");
    w.field("end", "</" + dsml + " invoke>\n").key("content");
    write_schema(
        w, tool.schema.empty() ? R"({"type": "object"})" : tool.schema, "deepseek_v4_1_xml");
    w.end_object();
  }
  w.end_array().end_object();
  write_constant(w, "</" + dsml + " calls>");
  w.end_array().end_object();
}

void write_text(JsonWriter& w, const GrammarSpec& spec) {
  switch (spec.kind) {
    case GrammarSpec::Kind::kJson:
      write_schema(w, R"({"type": "object"})", "json");
      return;
    case GrammarSpec::Kind::kSchema:
      write_schema(w, spec.text, "json");
      return;
    case GrammarSpec::Kind::kRegex:
      w.begin_object().field("type", "regex").field("pattern", spec.text).end_object();
      return;
    case GrammarSpec::Kind::kEbnf:
      w.begin_object().field("type", "grammar").field("grammar", spec.text).end_object();
      return;
    case GrammarSpec::Kind::kChoice:
      w.begin_object().field("type", "or").key("elements").begin_array();
      for (const std::string& choice : spec.choices) {
        write_constant(w, choice);
      }
      w.end_array().end_object();
      return;
    case GrammarSpec::Kind::kCalls:
      write_calls(w, spec);
      return;
  }
}

std::string structural_tag(const GrammarSpec& spec) {
  JsonWriter w;
  w.begin_object().field("type", "structural_tag").key("format");
  // Tools that may be called instead of answering.
  const bool either = spec.kind != GrammarSpec::Kind::kCalls && !spec.tools.empty();
  if (either) {
    w.begin_object().field("type", "or").key("elements").begin_array();
  }
  write_text(w, spec);
  if (either) {
    write_calls(w, spec);
    w.end_array().end_object();
  }
  w.end_object();
  return w.text();
}

// The DSML marker counts only as its control token, but in the core's grammars it is text, which
// ordinary tokens can spell as well. These ids are what such a spelling would need.
struct DsmlSpellings {
  int32_t token = -1;
  std::vector<int32_t> begins;  // begin the marker's text, or continue it: barred where it may come
  std::vector<int32_t> glued;   // hold a bracket and the marker's beginning: always barred
};

DsmlSpellings find_spellings(const Tokenizer& tokenizer) {
  DsmlSpellings out;
  out.token = tokenizer.id_of(kDsmlToken).value_or(-1);
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    const std::string_view bytes = tokenizer.token_bytes(id);
    if (tokenizer.is_control(id) || bytes.empty()) {
      continue;
    }
    const auto fits = [](std::string_view a, std::string_view b) {
      const size_t n = std::min(a.size(), b.size());
      return a.substr(0, n) == b.substr(0, n);
    };
    if (fits(bytes, kDsmlToken)) {
      out.begins.push_back(id);
      continue;
    }
    for (size_t i = 1; i < bytes.size(); ++i) {
      if ((bytes[i - 1] == '<' || bytes[i - 1] == '/') && fits(bytes.substr(i), kDsmlToken)) {
        out.glued.push_back(id);
        break;
      }
    }
  }
  return out;
}

}  // namespace

class CompiledGrammar {
 public:
  CompiledGrammar(xgrammar::CompiledGrammar compiled,
                  std::shared_ptr<const DsmlSpellings> spellings,
                  int32_t vocab_size)
      : compiled_(std::move(compiled)), spellings_(std::move(spellings)), vocab_size_(vocab_size) {}

  xgrammar::CompiledGrammar compiled_;
  std::shared_ptr<const DsmlSpellings> spellings_;  // null where the grammar has no calls
  int32_t vocab_size_;
};

namespace {

// The core's messages begin with the time and a place in its source: "[12:00:00] FILE.cc:7:
// WHAT\n".
std::string_view reason_of(const std::exception& failed) {
  std::string_view message = failed.what();
  const size_t what = message.find(": ", message.find(".cc:"));
  if (message.starts_with('[') && what != std::string_view::npos) {
    message.remove_prefix(what + 2);
  }
  while (message.ends_with('\n')) {
    message.remove_suffix(1);
  }
  return message;
}

class Compiler final : public GrammarCompiler {
 public:
  Compiler(const Tokenizer& tokenizer, int32_t vocab_size)
      : vocab_size_(vocab_size),
        spellings_(std::make_shared<const DsmlSpellings>(find_spellings(tokenizer))),
        compiler_(token_info(tokenizer, vocab_size), 1, true, kCacheBytes) {}

  Result<std::shared_ptr<const CompiledGrammar>> compile(const GrammarSpec& spec) override {
    CACHALOT_RETURN_IF_ERROR(check_text(spec));
    try {
      xgrammar::CompiledGrammar compiled = compiler_.CompileStructuralTag(structural_tag(spec));
      return std::make_shared<const CompiledGrammar>(
          std::move(compiled), spec.tools.empty() ? nullptr : spellings_, vocab_size_);
    } catch (const std::exception& failed) {
      return invalid("{}", reason_of(failed));
    }
  }

 private:
  // Control tokens have no text, so that no grammar allows them; the marker of calls has.
  static xgrammar::TokenizerInfo token_info(const Tokenizer& tokenizer, int32_t vocab_size) {
    std::vector<std::string> vocab;
    for (int32_t id = 0; id < std::min(tokenizer.vocab_size(), vocab_size); ++id) {
      const bool hidden = tokenizer.is_control(id) && tokenizer.token_bytes(id) != kDsmlToken;
      vocab.emplace_back(hidden ? std::string_view() : tokenizer.token_bytes(id));
    }
    std::vector<int32_t> stops;
    if (const std::optional<int32_t> eos = tokenizer.eos_id()) {
      stops.push_back(*eos);
    }
    return {vocab, xgrammar::VocabType::RAW, vocab_size, stops};
  }

  int32_t vocab_size_;
  std::shared_ptr<const DsmlSpellings> spellings_;
  xgrammar::GrammarCompiler compiler_;
};

}  // namespace

Result<std::shared_ptr<GrammarCompiler>> GrammarCompiler::create(const Tokenizer& tokenizer,
                                                                 int64_t vocab_size) {
  try {
    return std::shared_ptr<GrammarCompiler>(
        std::make_shared<Compiler>(tokenizer, static_cast<int32_t>(vocab_size)));
  } catch (const std::exception& failed) {
    return error(Code::kInternal, "grammar core: {}", failed.what());
  }
}

struct GrammarMatcher::State {
  std::shared_ptr<const CompiledGrammar> grammar;
  xgrammar::GrammarMatcher matcher;
  std::vector<uint32_t> scratch;
};

GrammarMatcher::GrammarMatcher(std::shared_ptr<const CompiledGrammar> grammar)
    : state_(new State{grammar, xgrammar::GrammarMatcher(grammar->compiled_), {}}) {}
GrammarMatcher::~GrammarMatcher() = default;
GrammarMatcher::GrammarMatcher(GrammarMatcher&&) noexcept = default;

void GrammarMatcher::fill(std::vector<uint32_t>& bits) {
  const CompiledGrammar& grammar = *state_->grammar;
  bits.assign(static_cast<size_t>(xgrammar::GetBitmaskSize(grammar.vocab_size_)), 0);
  int64_t shape = static_cast<int64_t>(bits.size());
  DLTensor view{};
  view.data = bits.data();
  view.device = {kDLCPU, 0};
  view.ndim = 1;
  view.dtype = xgrammar::GetBitmaskDLType();
  view.shape = &shape;
  if (state_->matcher.IsTerminated()) {
    return;
  }
  if (!state_->matcher.FillNextTokenBitmask(&view)) {
    std::fill(bits.begin(), bits.end(), ~uint32_t{0});
  }
  if (grammar.spellings_ == nullptr) {
    return;
  }
  const DsmlSpellings& dsml = *grammar.spellings_;
  const auto clear = [&](const std::vector<int32_t>& ids) {
    for (const int32_t id : ids) {
      bits[static_cast<size_t>(id) / 32] &= ~(uint32_t{1} << (id % 32));
    }
  };
  clear(dsml.glued);
  if (dsml.token >= 0 &&
      (bits[static_cast<size_t>(dsml.token) / 32] >> (dsml.token % 32) & 1) != 0) {
    clear(dsml.begins);
  }
}

bool GrammarMatcher::accept(int32_t token) {
  return !state_->matcher.IsTerminated() && state_->matcher.AcceptToken(token);
}

void GrammarMatcher::rollback(int64_t tokens) {
  if (tokens > 0) {
    state_->matcher.Rollback(static_cast<int>(tokens));
  }
}

bool GrammarMatcher::finished() {
  if (state_->matcher.IsTerminated()) {
    return true;
  }
  if (!state_->matcher.IsCompleted()) {
    return false;
  }
  fill(state_->scratch);
  for (const int32_t id : state_->matcher.GetStopTokenIds()) {
    state_->scratch[static_cast<size_t>(id) / 32] &= ~(uint32_t{1} << (id % 32));
  }
  return std::all_of(
      state_->scratch.begin(), state_->scratch.end(), [](uint32_t word) { return word == 0; });
}

}  // namespace cachalot::text
