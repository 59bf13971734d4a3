#include "train/run_config.h"

#include <toml++/toml.h>

#include <algorithm>
#include <charconv>
#include <set>
#include <sstream>

#include "base/format.h"
#include "base/json.h"

namespace cachalot::train {
namespace {

// A value as TOML, on one line and cut to a readable length.
std::string spelled(const toml::node& node) {
  constexpr size_t kLongest = 60;
  std::ostringstream stream;
  node.visit([&](const auto& value) { stream << value; });
  std::string text = stream.str();
  std::replace(text.begin(), text.end(), '\n', ' ');
  if (text.size() > kLongest) {
    text.resize(kLongest);
    text += "...";
  }
  return text;
}

// Reads keys of one table and remembers them, so that what is left is unknown.
class Reader {
 public:
  Reader(toml::table& root, std::string name, std::string source, Status& status)
      : name_(std::move(name)), source_(std::move(source)), status_(status) {
    if (toml::node* node = root.get(name_)) {
      table_ = node->as_table();
      if (table_ == nullptr) {
        fail("", node, "must be a table");
      }
    }
  }

  void field(const char* key, std::string& value) {
    if (const toml::node* node = take(key)) {
      if (const auto text = node->value_exact<std::string>()) {
        value = *text;
      } else {
        fail(key, node, "must be a string");
      }
    }
  }
  void field(const char* key, bool& value) {
    if (const toml::node* node = take(key)) {
      if (const auto flag = node->value_exact<bool>()) {
        value = *flag;
      } else {
        fail(key, node, "must be true or false");
      }
    }
  }
  void field(const char* key, int64_t& value, int64_t least, int64_t most) {
    if (const toml::node* node = take(key)) {
      const auto number = node->value_exact<int64_t>();
      if (!number || *number < least || *number > most) {
        fail(key, node, fmt::format("must be an integer in [{}, {}]", least, most));
      } else {
        value = *number;
      }
    }
  }
  void field(const char* key, double& value, double least, double most) {
    if (const toml::node* node = take(key)) {
      const auto number = node->value<double>();
      if (!node->is_number() || !number || !(*number >= least && *number <= most)) {
        fail(key, node, fmt::format("must be a number in [{}, {}]", least, most));
      } else {
        value = *number;
      }
    }
  }
  void field(const char* key, std::vector<std::string>& values) {
    if (const toml::node* node = take(key)) {
      const toml::array* list = node->as_array();
      for (size_t i = 0; list != nullptr && i < list->size(); ++i) {
        if (const auto text = (*list)[i].value_exact<std::string>()) {
          values.push_back(*text);
        } else {
          list = nullptr;
        }
      }
      if (list == nullptr) {
        fail(key, node, "must be a list of strings");
      }
    }
  }
  // Paths, or tables {path = ..., repeat = ...}.
  void field(const char* key, std::vector<DataSource>& values) {
    const toml::node* node = take(key);
    if (node == nullptr) {
      return;
    }
    bool good = node->is_array();
    for (size_t i = 0; good && i < node->as_array()->size(); ++i) {
      const toml::node& item = (*node->as_array())[i];
      if (const auto text = item.value_exact<std::string>()) {
        values.push_back({*text, 1});
        continue;
      }
      const toml::table* table = item.as_table();
      const auto path =
          table == nullptr ? std::nullopt : (*table)["path"].value_exact<std::string>();
      const auto repeat =
          table == nullptr ? std::nullopt : (*table)["repeat"].value_exact<int64_t>();
      good = path && repeat && *repeat >= 1 && *repeat <= 1000 && table->size() == 2;
      if (good) {
        values.push_back({*path, *repeat});
      }
    }
    if (!good) {
      fail(key,
           node,
           "must be a list of paths or of {path = \"...\", repeat = N} with N in [1, 1000]");
    }
  }
  // A share of `whole`, in its unit.
  void share(const char* key, double& value, double whole) {
    double of_whole = 1;
    field(key, of_whole, 0, 1);
    value = of_whole * whole;
  }
  // One of the names; the index of it.
  size_t choose(const char* key, const std::vector<std::string_view>& names, size_t value) {
    std::string text(names[value]);
    field(key, text);
    size_t i = 0;
    std::string list;
    for (const std::string_view name : names) {
      if (text == name) {
        return i;
      }
      list += fmt::format("{}\"{}\"", list.empty() ? "" : ", ", name);
      ++i;
    }
    fail(key, take(key), fmt::format("must be one of {}", list));
    return value;
  }

  // Reports keys that nobody read.
  void finish() {
    if (table_ == nullptr) {
      return;
    }
    for (const auto& [key, node] : *table_) {
      if (!known_.contains(std::string(key.str()))) {
        fail(std::string(key.str()).c_str(), &node, "is not a known key");
      }
    }
  }

 private:
  const toml::node* take(const char* key) {
    known_.insert(key);
    return table_ == nullptr ? nullptr : table_->get(key);
  }
  void fail(const char* key, const toml::node* node, const std::string& what) {
    if (status_.ok()) {
      status_ = invalid("{}: {}{}{} {} (it is {})",
                        source_,
                        name_,
                        *key == 0 ? "" : ".",
                        key,
                        what,
                        spelled(*node));
    }
  }

  std::string name_, source_;
  toml::table* table_ = nullptr;
  Status& status_;
  std::set<std::string> known_;
};

// Lists the keys of a section with their values instead.
class Lister {
 public:
  Lister(std::string name, Settings& settings) : name_(std::move(name)), settings_(settings) {}

  void field(const char* key, const std::string& value) { put(key, json_quote(value)); }
  void field(const char* key, bool value) { put(key, value ? "true" : "false"); }
  void field(const char* key, int64_t value, int64_t, int64_t) {
    put(key, fmt::format("{}", value));
  }
  // The shortest text that reads back as the same double.
  void field(const char* key, double value, double, double) { put(key, fmt::format("{}", value)); }
  void field(const char* key, const std::vector<std::string>& values) {
    std::vector<std::string> quoted;
    for (const std::string& value : values) {
      quoted.push_back(json_quote(value));
    }
    put(key, fmt::format("[{}]", fmt::join(quoted, ", ")));
  }
  void field(const char* key, const std::vector<DataSource>& values) {
    std::vector<std::string> quoted;
    for (const DataSource& value : values) {
      quoted.push_back(
          fmt::format("{{path = {}, repeat = {}}}", json_quote(value.path), value.repeat));
    }
    put(key, fmt::format("[{}]", fmt::join(quoted, ", ")));
  }
  void share(const char* key, double value, double) { put(key, fmt::format("{}", value)); }
  size_t choose(const char* key, const std::vector<std::string_view>& names, size_t value) {
    field(key, std::string(names[value]));
    return value;
  }
  void finish() const {}

 private:
  void put(const char* key, std::string value) {
    settings_[fmt::format("{}.{}", name_, key)] = std::move(value);
  }

  std::string name_;
  Settings& settings_;
};

constexpr int64_t kMost = int64_t{1} << 40;

template <class Section>
void visit_model(Section s, RunConfig& c) {
  s.field("preset", c.preset);
  s.field("config", c.config);
  s.field("set", c.set);
  s.field("tokenizer", c.tokenizer);
  s.field("from", c.from);
  c.stage = static_cast<Stage>(
      s.choose("stage", {"backbone", "drafter", "indexer"}, static_cast<size_t>(c.stage)));
  c.classes_from_tokenizer =
      s.choose("engram_classes", {"config", "tokenizer"}, c.classes_from_tokenizer ? 1 : 0) == 1;
  c.forward.mixing = static_cast<Mixing>(s.choose(
      "mixing", {kMixingNames.begin(), kMixingNames.end()}, static_cast<size_t>(c.forward.mixing)));
  auto seed = static_cast<int64_t>(c.seed);
  s.field("seed", seed, 0, kMost);
  c.seed = static_cast<uint64_t>(seed);
  s.finish();
}

template <class Section>
void visit_data(Section s, RunConfig& c) {
  s.field("train", c.train);
  s.field("heldout", c.heldout);
  s.field("sequence", c.sequence, 2, 1 << 20);
  s.field("batch_tokens", c.batch_tokens, 2, 1 << 28);
  s.field("micro_tokens", c.micro_tokens, 2, 1 << 20);
  s.finish();
}

template <class Section>
void visit_schedule(Section s, RunConfig& c) {
  s.field("steps", c.steps, 1, kMost);
  s.field("peak", c.schedule.peak, 0, 1);
  s.field("last", c.schedule.last, 0, 1);
  s.field("warmup_steps", c.schedule.warmup_steps, 0, kMost);
  const double tokens = static_cast<double>(c.steps) * static_cast<double>(c.batch_tokens);
  s.share("decay_begin", c.schedule.decay_begin, tokens);
  s.share("decay_end", c.schedule.decay_end, tokens);
  c.schedule.decay = static_cast<Schedule::Decay>(
      s.choose("decay", {"cosine", "linear"}, static_cast<size_t>(c.schedule.decay)));
  s.finish();
}

template <class Section>
void visit_optimizer(Section s, RunConfig& c) {
  OptimizerOptions& o = c.optimizer;
  s.field("momentum", o.muon.momentum, 0, 1);
  double decay = o.muon.weight_decay;
  s.field("weight_decay", decay, 0, 1);
  o.muon.weight_decay = o.adam_weight_decay = decay;
  double rms = o.muon.update_rms;
  s.field("update_rms", rms, 0, 1);
  o.muon.update_rms = o.sinkhorn.update_rms = rms;
  s.field("sinkhorn_average", o.sinkhorn.average, 0, 1);
  s.field("sinkhorn_threshold", o.sinkhorn.threshold, 0, 1);
  s.field("adam_first", o.adam.first, 0, 1);
  s.field("adam_second", o.adam.second, 0, 1);
  s.field("engram_rate", o.engram_rate, 0, 1000);
  s.field("matrix_rate", o.matrix_rate, 0, 1000);
  s.field("table_rate", o.table_rate, 0, 1000);
  o.adam_for_matrices = s.choose("matrices", {"muon", "adamw"}, o.adam_for_matrices ? 1 : 0) == 1;
  o.adam_for_tables = s.choose("tables", {"sinkhorn", "adamw"}, o.adam_for_tables ? 1 : 0) == 1;
  s.field("clip", c.clip, 0, 1e9);
  s.field("bias_speed", c.bias_speed, 0, 1);
  s.finish();
}

template <class Section>
void visit_objective(Section s, RunConfig& c) {
  ForwardOptions& f = c.forward;
  s.field("balance", f.balance_coefficient, 0, 1);
  s.field("indexer", f.indexer.coefficient, 0, 1);
  s.field("indexer_queries", f.indexer.queries, 1, 1 << 20);
  f.indexer.selected_only =
      s.choose("indexer_entries", {"visible", "selected"}, f.indexer.selected_only ? 1 : 0) == 1;
  f.indexer.own_layer =
      s.choose("indexer_teacher", {"served", "own"}, f.indexer.own_layer ? 1 : 0) == 1;
  s.field("candidates", f.candidates);
  s.finish();
}

template <class Section>
void visit_drafter(Section s, RunConfig& c) {
  DraftObjective& d = c.forward.draft;
  s.field("anchors", d.anchors, 1, 1 << 20);
  s.field("decay", d.decay, 0, 1e9);
  s.field("cross_entropy", d.cross_entropy, 0, 1e3);
  s.field("distance", d.distance, 0, 1e3);
  s.field("confidence", d.confidence, 0, 1e3);
  s.finish();
}

template <class Section>
void visit_quant(Section s, RunConfig& c) {
  QuantSwitches& q = c.forward.quant;
  s.field("window", q.window);
  s.field("main", q.main);
  s.field("index", q.index);
  s.field("experts", q.experts);
  s.field("engram", q.engram);
  s.field("linears", q.linears);
  s.field("plain", q.plain);
  s.finish();
}

template <class Section>
void visit_run(Section s, RunConfig& c) {
  s.field("out", c.out);
  s.field("threads", c.threads, 0, 1024);
  s.field("recompute", c.forward.recompute);
  s.field("checkpoint_every", c.checkpoint_every, 1, kMost);
  s.field("keep_checkpoints", c.keep_checkpoints, 1, 1000);
  s.field("evaluate_every", c.evaluate_every, 0, kMost);
  s.field("evaluate_tokens", c.evaluate_tokens, 1, kMost);
  s.field("divergence", c.divergence, 0, 1e9);
  s.finish();
}

// Every key of a run file; `section` makes what reads or lists those of one table.
template <class MakeSection>
void visit(const MakeSection& section, RunConfig& c) {
  visit_model(section("model"), c);
  visit_data(section("data"), c);
  visit_schedule(section("schedule"), c);
  visit_optimizer(section("optimizer"), c);
  visit_objective(section("objective"), c);
  visit_drafter(section("drafter"), c);
  visit_quant(section("quant"), c);
  visit_run(section("run"), c);
}

// "a.b=value" into the tables of `root`.
Status assign(toml::table& root, const std::string& assignment) {
  toml::table parsed;
  try {
    parsed = toml::parse(assignment);
  } catch (const toml::parse_error& e) {
    return invalid("--set {}: {} (a string needs quotes)", assignment, e.description());
  }
  for (auto&& [section, node] : parsed) {
    toml::table* from = node.as_table();
    if (from == nullptr) {
      return invalid("--set {}: needs the form section.key=value", assignment);
    }
    auto* to = root[section].as_table();
    if (to == nullptr) {
      to = root.insert_or_assign(section, toml::table{}).first->second.as_table();
    }
    for (auto&& [key, value] : *from) {
      to->insert_or_assign(key, value);
    }
  }
  return {};
}

// No step depends on these.
constexpr std::string_view kFree[] = {"data.heldout",
                                      "schedule.steps",
                                      "run.out",
                                      "run.threads",
                                      "run.recompute",
                                      "run.checkpoint_every",
                                      "run.keep_checkpoints",
                                      "run.evaluate_every",
                                      "run.evaluate_tokens",
                                      "run.divergence"};
// No step before the decay depends on these.
constexpr std::string_view kDecay[] = {
    "schedule.last", "schedule.decay", "schedule.decay_begin", "schedule.decay_end"};

// Whether the rate has begun to fall; `tokens` are those of the run so far.
bool decay_has_begun(const Settings& settings, int64_t tokens) {
  const auto number = [&](const char* key) {
    const auto found = settings.find(key);
    double value = 0;
    if (found != settings.end()) {
      std::from_chars(found->second.data(), found->second.data() + found->second.size(), value);
    }
    return value;
  };
  const double begin = number("schedule.decay_begin");
  return number("schedule.decay_end") > begin && static_cast<double>(tokens) > begin;
}

}  // namespace

Settings settings_of(RunConfig config) {
  Settings settings;
  visit([&](const char* name) { return Lister(name, settings); }, config);
  return settings;
}

Settings step_settings_of(const RunConfig& config) {
  Settings settings = settings_of(config);
  for (const std::string_view key : kFree) {
    settings.erase(std::string(key));
  }
  return settings;
}

Status check_resumed(const Settings& now, const Settings& before, int64_t tokens) {
  const bool decays = decay_has_begun(now, tokens) || decay_has_begun(before, tokens);
  for (const auto& [key, value] : before) {
    const auto found = now.find(key);
    if (found == now.end() || found->second == value ||
        (!decays && std::ranges::find(kDecay, key) != std::end(kDecay))) {
      continue;
    }
    return error(Code::kFailedPrecondition,
                 "{} is {}; the run so far had {}, and goes on with that alone",
                 key,
                 found->second,
                 value);
  }
  return {};
}

Result<RunConfig> parse_run_config(std::string_view text,
                                   const std::string& source,
                                   const std::vector<std::string>& assignments) {
  toml::table root;
  try {
    root = toml::parse(text, source);
  } catch (const toml::parse_error& e) {
    return invalid("{}:{}: {}", source, e.source().begin.line, e.description());
  }
  for (const std::string& assignment : assignments) {
    CACHALOT_RETURN_IF_ERROR(assign(root, assignment));
  }
  RunConfig c;
  Status status;
  visit([&](const char* name) { return Reader(root, name, source, status); }, c);
  for (const auto& [key, node] : root) {
    const std::set<std::string_view> known = {
        "model", "data", "schedule", "optimizer", "objective", "drafter", "quant", "run"};
    if (status.ok() && !known.contains(key.str())) {
      status = invalid("{}: [{}] is not a known section", source, key.str());
    }
  }
  CACHALOT_RETURN_IF_ERROR(status);
  if (int{!c.preset.empty()} + int{!c.config.empty()} + int{!c.from.empty()} != 1) {
    return invalid(
        "{}: model.preset is \"{}\", config is \"{}\" and from is \"{}\"; just one must be set",
        source,
        c.preset,
        c.config,
        c.from);
  }
  if (!c.from.empty() && (!c.tokenizer.empty() || c.classes_from_tokenizer)) {
    return invalid(
        "{}: model.from brings its tokenizer; model.tokenizer = \"{}\" and engram_classes = \"{}\" "
        "do "
        "not go with it",
        source,
        c.tokenizer,
        c.classes_from_tokenizer ? "tokenizer" : "config");
  }
  if (c.stage != Stage::kBackbone && c.from.empty()) {
    return invalid("{}: model.stage is \"{}\", which needs 'from', the backbone's run",
                   source,
                   c.stage == Stage::kDrafter ? "drafter" : "indexer");
  }
  if (c.train.empty()) {
    return invalid("{}: data.train is [] or missing; it must name files", source);
  }
  if (c.steps == 0) {
    return invalid("{}: schedule.steps is missing", source);
  }
  if (c.schedule.decay_begin > c.schedule.decay_end) {
    return invalid("{}: schedule.decay_begin is token {}, behind decay_end, token {}",
                   source,
                   c.schedule.decay_begin,
                   c.schedule.decay_end);
  }
  if (c.schedule.peak == 0) {
    return invalid("{}: schedule.peak is 0 or missing; it must be positive", source);
  }
  if (c.out.empty()) {
    return invalid("{}: run.out is \"\" or missing; it must name a folder", source);
  }
  if (c.stage == Stage::kIndexer && c.forward.indexer.coefficient == 0) {
    return invalid("{}: model.stage is \"indexer\", but objective.indexer is 0", source);
  }
  if (c.batch_tokens % c.micro_tokens != 0) {
    return invalid("{}: data.batch_tokens is {}; it must be a multiple of micro_tokens, {}",
                   source,
                   c.batch_tokens,
                   c.micro_tokens);
  }
  return c;
}

}  // namespace cachalot::train
