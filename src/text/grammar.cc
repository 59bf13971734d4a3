// Structured output over the xgrammar core. Every request becomes one structural tag, the core's
// own description of formats, so that there is a single way in.
#include "text/grammar.h"

#include <dlpack/dlpack.h>
#include <xgrammar/xgrammar.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <limits>
#include <string_view>
#include <utility>

#include "base/format.h"
#include "base/json.h"
#include "text/control_tokens.h"
#include "text/grammar_work.h"
#include "text/json_tree.h"

namespace cachalot::text {

thread_local int64_t grammar_work_left = std::numeric_limits<int64_t>::max();

namespace {

constexpr size_t kMaxText = size_t{256} << 10;
// The core's parsers of expressions and grammars recurse.
constexpr int kMaxNesting = 128;
constexpr int64_t kCacheBytes = int64_t{256} << 20;
// Steps of the parser for all masks of a grammar, made once: about half a minute.
constexpr int64_t kCompileWork = 400'000'000;
// Consecutive blanks between JSON tokens: enough for indentation, and an end to blanks without end.
constexpr int kMaxBlanks = 64;

bool is_empty(const std::vector<uint32_t>& bits) {
  return std::all_of(bits.begin(), bits.end(), [](uint32_t word) { return word == 0; });
}

// The bytes of its texts.
Result<size_t> checked_size(const GrammarSpec& spec) {
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
    CACHALOT_RETURN_IF_ERROR(parse_json(spec.text, "schema"));
    return size;
  }
  int depth = 0;
  for (const char c : spec.text) {
    depth += c == '(' || c == '[' || c == '{' ? 1 : c == ')' || c == ']' || c == '}' ? -1 : 0;
    if (depth > kMaxNesting) {
      return invalid("brackets are nested more than {} deep", kMaxNesting);
    }
  }
  return size;
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

// Runs `call` with at most `work` steps and takes off those that it used. What the core throws is
// the error.
template <class F>
Status bounded(int64_t& work, const F& call) {
  const int64_t outer = std::exchange(grammar_work_left, work);
  Status status;
  try {
    call();
  } catch (const GrammarWorkExceeded&) {
    status = invalid("the grammar is too ambiguous or too large to follow");
  } catch (const std::exception& failed) {
    status = invalid("{}", reason_of(failed));
  }
  work = std::exchange(grammar_work_left, outer);
  return status;
}

class Compiler final : public GrammarCompiler {
 public:
  Compiler(const Tokenizer& tokenizer, int32_t vocab_size)
      : vocab_size_(vocab_size),
        spellings_(std::make_shared<const DsmlSpellings>(find_spellings(tokenizer))),
        compiler_(token_info(tokenizer, vocab_size), 1, true, kCacheBytes) {}

  Result<std::shared_ptr<const CompiledGrammar>> compile(const GrammarSpec& spec) override {
    CACHALOT_TRY(const size_t size, checked_size(spec));
    std::shared_ptr<const CompiledGrammar> compiled;
    int64_t work = kCompileWork;
    const Status status = bounded(work, [&] {
      compiled = std::make_shared<const CompiledGrammar>(
          compiler_.CompileStructuralTag(structural_tag(spec)),
          spec.tools.empty() ? nullptr : spellings_,
          vocab_size_);
    });
    if (!status.ok()) {
      forget_failures(size);
      return status;
    }
    std::vector<uint32_t> first;
    CACHALOT_RETURN_IF_ERROR(GrammarMatcher(compiled).fill(first));
    if (is_empty(first)) {
      return invalid("the grammar allows no text");
    }
    return compiled;
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

  // The core's cache keeps the texts of failures as well and counts nothing for them.
  void forget_failures(size_t size) {
    if (failed_bytes_.fetch_add(size) + size > static_cast<size_t>(kCacheBytes)) {
      failed_bytes_ = 0;
      compiler_.ClearCache();
    }
  }

  int32_t vocab_size_;
  std::shared_ptr<const DsmlSpellings> spellings_;
  xgrammar::GrammarCompiler compiler_;
  std::atomic<size_t> failed_bytes_ = 0;
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
  int64_t work = kMostWork;    // left
  std::vector<uint32_t> mask;  // of the present state, or empty

  // Fills `mask`.
  Status fill();
};

GrammarMatcher::GrammarMatcher(std::shared_ptr<const CompiledGrammar> grammar)
    : state_(new State{.grammar = grammar,
                       .matcher = xgrammar::GrammarMatcher(grammar->compiled_),
                       .mask = {}}) {}
GrammarMatcher::~GrammarMatcher() = default;
GrammarMatcher::GrammarMatcher(GrammarMatcher&&) noexcept = default;

Status GrammarMatcher::State::fill() {
  if (!mask.empty()) {
    return {};
  }
  std::vector<uint32_t> bits(static_cast<size_t>(xgrammar::GetBitmaskSize(grammar->vocab_size_)),
                             0);
  if (!matcher.IsTerminated()) {
    int64_t shape = static_cast<int64_t>(bits.size());
    DLTensor view{};
    view.data = bits.data();
    view.device = {kDLCPU, 0};
    view.ndim = 1;
    view.dtype = xgrammar::GetBitmaskDLType();
    view.shape = &shape;
    bool narrows = true;
    CACHALOT_RETURN_IF_ERROR(bounded(work, [&] { narrows = matcher.FillNextTokenBitmask(&view); }));
    if (!narrows) {
      std::fill(bits.begin(), bits.end(), ~uint32_t{0});
    }
  }
  if (grammar->spellings_ != nullptr) {
    const DsmlSpellings& dsml = *grammar->spellings_;
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
  mask = std::move(bits);
  return {};
}

Status GrammarMatcher::fill(std::vector<uint32_t>& bits) {
  CACHALOT_RETURN_IF_ERROR(state_->fill());
  bits = state_->mask;
  return {};
}

Result<bool> GrammarMatcher::accept(int32_t token) {
  if (state_->matcher.IsTerminated()) {
    return false;
  }
  bool accepted = false;
  CACHALOT_RETURN_IF_ERROR(
      bounded(state_->work, [&] { accepted = state_->matcher.AcceptToken(token); }));
  if (accepted) {
    state_->work = std::min(state_->work + kWorkPerToken, kMostWork);
    state_->mask.clear();
  }
  return accepted;
}

Result<bool> GrammarMatcher::finished() {
  if (state_->matcher.IsTerminated()) {
    return true;
  }
  if (!state_->matcher.IsCompleted()) {
    return false;
  }
  CACHALOT_RETURN_IF_ERROR(state_->fill());
  std::vector<uint32_t> others = state_->mask;
  for (const int32_t id : state_->matcher.GetStopTokenIds()) {
    others[static_cast<size_t>(id) / 32] &= ~(uint32_t{1} << (id % 32));
  }
  return is_empty(others);
}

}  // namespace cachalot::text
