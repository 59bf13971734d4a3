#include "train/run_config.h"

#include <toml++/toml.h>

#include <set>

#include "base/format.h"

namespace cachalot::train {
namespace {

// Reads keys of one table and remembers them, so that what is left is unknown.
class Section {
 public:
  Section(toml::table& root, std::string name, std::string source, Status& status)
      : name_(std::move(name)), source_(std::move(source)), status_(status) {
    if (toml::node* node = root.get(name_)) {
      table_ = node->as_table();
      if (table_ == nullptr) {
        fail("", "must be a table");
      }
    }
  }

  void read(const char* key, std::string& value) {
    if (const toml::node* node = take(key)) {
      if (const auto text = node->value_exact<std::string>()) {
        value = *text;
      } else {
        fail(key, "must be a string");
      }
    }
  }
  void read(const char* key, bool& value) {
    if (const toml::node* node = take(key)) {
      if (const auto flag = node->value_exact<bool>()) {
        value = *flag;
      } else {
        fail(key, "must be true or false");
      }
    }
  }
  void read(const char* key, int64_t& value, int64_t least, int64_t most) {
    if (const toml::node* node = take(key)) {
      const auto number = node->value_exact<int64_t>();
      if (!number || *number < least || *number > most) {
        fail(key, fmt::format("must be an integer in [{}, {}]", least, most));
      } else {
        value = *number;
      }
    }
  }
  void read(const char* key, double& value, double least, double most) {
    if (const toml::node* node = take(key)) {
      const auto number = node->value<double>();
      if (!node->is_number() || !number || !(*number >= least && *number <= most)) {
        fail(key, fmt::format("must be a number in [{}, {}]", least, most));
      } else {
        value = *number;
      }
    }
  }
  void read(const char* key, std::vector<std::string>& values) {
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
        fail(key, "must be a list of strings");
      }
    }
  }
  // Paths, or tables {path = ..., repeat = ...}.
  void read(const char* key, std::vector<DataSource>& values) {
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
      fail(key, "must be a list of paths or of {path = \"...\", repeat = N}");
    }
  }
  // One of the names; the index of it.
  size_t choose(const char* key, const std::vector<std::string_view>& names, size_t value) {
    std::string text(names[value]);
    read(key, text);
    size_t i = 0;
    std::string list;
    for (const std::string_view name : names) {
      if (text == name) {
        return i;
      }
      list += fmt::format("{}\"{}\"", list.empty() ? "" : ", ", name);
      ++i;
    }
    fail(key, fmt::format("is \"{}\"; it must be one of {}", text, list));
    return value;
  }

  // Reports keys that nobody read.
  void finish() {
    if (table_ == nullptr) {
      return;
    }
    for (const auto& [key, node] : *table_) {
      if (!known_.contains(std::string(key.str()))) {
        fail(std::string(key.str()).c_str(), "is not a known key");
      }
    }
  }

 private:
  const toml::node* take(const char* key) {
    known_.insert(key);
    return table_ == nullptr ? nullptr : table_->get(key);
  }
  void fail(const char* key, const std::string& what) {
    if (status_.ok()) {
      status_ = invalid("{}: {}{}{} {}", source_, name_, *key == 0 ? "" : ".", key, what);
    }
  }

  std::string name_, source_;
  toml::table* table_ = nullptr;
  Status& status_;
  std::set<std::string> known_;
};

constexpr int64_t kMost = int64_t{1} << 40;

void read_model(Section s, RunConfig& c) {
  s.read("preset", c.preset);
  s.read("config", c.config);
  s.read("set", c.set);
  s.read("tokenizer", c.tokenizer);
  s.read("from", c.from);
  c.stage = static_cast<Stage>(s.choose("stage", {"backbone", "drafter", "indexer"}, 0));
  c.classes_from_tokenizer = s.choose("engram_classes", {"config", "tokenizer"}, 0) == 1;
  c.forward.mixing =
      static_cast<Mixing>(s.choose("mixing", {kMixingNames.begin(), kMixingNames.end()}, 0));
  auto seed = static_cast<int64_t>(c.seed);
  s.read("seed", seed, 0, kMost);
  c.seed = static_cast<uint64_t>(seed);
  s.finish();
}

void read_data(Section s, RunConfig& c) {
  s.read("train", c.train);
  s.read("heldout", c.heldout);
  s.read("sequence", c.sequence, 2, 1 << 20);
  s.read("batch_tokens", c.batch_tokens, 2, 1 << 28);
  s.read("micro_tokens", c.micro_tokens, 2, 1 << 20);
  s.finish();
}

void read_schedule(Section s, RunConfig& c) {
  s.read("steps", c.steps, 1, kMost);
  s.read("peak", c.schedule.peak, 0, 1);
  s.read("last", c.schedule.last, 0, 1);
  s.read("warmup_steps", c.schedule.warmup_steps, 0, kMost);
  // Shares of the run, turned into tokens.
  double begin = 1, end = 1;
  s.read("decay_begin", begin, 0, 1);
  s.read("decay_end", end, 0, 1);
  const double tokens = static_cast<double>(c.steps) * static_cast<double>(c.batch_tokens);
  c.schedule.decay_begin = begin * tokens;
  c.schedule.decay_end = end * tokens;
  c.schedule.decay = s.choose("decay", {"cosine", "linear"}, 0) == 0 ? Schedule::Decay::kCosine
                                                                     : Schedule::Decay::kLinear;
  s.finish();
}

void read_optimizer(Section s, RunConfig& c) {
  OptimizerOptions& o = c.optimizer;
  s.read("momentum", o.muon.momentum, 0, 1);
  double decay = o.muon.weight_decay;
  s.read("weight_decay", decay, 0, 1);
  o.muon.weight_decay = o.adam_weight_decay = decay;
  double rms = o.muon.update_rms;
  s.read("update_rms", rms, 0, 1);
  o.muon.update_rms = o.sinkhorn.update_rms = rms;
  s.read("sinkhorn_average", o.sinkhorn.average, 0, 1);
  s.read("sinkhorn_threshold", o.sinkhorn.threshold, 0, 1);
  s.read("adam_first", o.adam.first, 0, 1);
  s.read("adam_second", o.adam.second, 0, 1);
  s.read("engram_rate", o.engram_rate, 0, 1000);
  s.read("matrix_rate", o.matrix_rate, 0, 1000);
  s.read("table_rate", o.table_rate, 0, 1000);
  o.adam_for_matrices = s.choose("matrices", {"muon", "adamw"}, 0) == 1;
  o.adam_for_tables = s.choose("tables", {"sinkhorn", "adamw"}, 0) == 1;
  s.read("clip", c.clip, 0, 1e9);
  s.read("bias_speed", c.bias_speed, 0, 1);
  s.finish();
}

void read_objective(Section s, RunConfig& c) {
  ForwardOptions& f = c.forward;
  s.read("balance", f.balance_coefficient, 0, 1);
  s.read("indexer", f.indexer.coefficient, 0, 1);
  s.read("indexer_queries", f.indexer.queries, 1, 1 << 20);
  f.indexer.selected_only = s.choose("indexer_entries", {"visible", "selected"}, 0) == 1;
  f.indexer.own_layer = s.choose("indexer_teacher", {"served", "own"}, 0) == 1;
  s.read("candidates", f.candidates);
  s.finish();
}

void read_drafter(Section s, RunConfig& c) {
  DraftObjective& d = c.forward.draft;
  s.read("anchors", d.anchors, 1, 1 << 20);
  s.read("decay", d.decay, 0, 1e9);
  s.read("cross_entropy", d.cross_entropy, 0, 1e3);
  s.read("distance", d.distance, 0, 1e3);
  s.read("confidence", d.confidence, 0, 1e3);
  s.finish();
}

void read_quant(Section s, RunConfig& c) {
  QuantSwitches& q = c.forward.quant;
  s.read("window", q.window);
  s.read("main", q.main);
  s.read("index", q.index);
  s.read("experts", q.experts);
  s.read("engram", q.engram);
  s.read("linears", q.linears);
  s.read("plain", q.plain);
  s.finish();
}

void read_run(Section s, RunConfig& c) {
  s.read("out", c.out);
  s.read("threads", c.threads, 0, 1024);
  s.read("recompute", c.forward.recompute);
  s.read("checkpoint_every", c.checkpoint_every, 1, kMost);
  s.read("keep_checkpoints", c.keep_checkpoints, 1, 1000);
  s.read("evaluate_every", c.evaluate_every, 0, kMost);
  s.read("evaluate_tokens", c.evaluate_tokens, 1, kMost);
  s.read("divergence", c.divergence, 0, 1e9);
  s.finish();
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

}  // namespace

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
  const auto section = [&](const char* name) { return Section(root, name, source, status); };
  read_model(section("model"), c);
  read_data(section("data"), c);
  read_schedule(section("schedule"), c);
  read_optimizer(section("optimizer"), c);
  read_objective(section("objective"), c);
  read_drafter(section("drafter"), c);
  read_quant(section("quant"), c);
  read_run(section("run"), c);
  for (const auto& [key, node] : root) {
    const std::set<std::string_view> known = {
        "model", "data", "schedule", "optimizer", "objective", "drafter", "quant", "run"};
    if (status.ok() && !known.contains(key.str())) {
      status = invalid("{}: [{}] is not a known section", source, key.str());
    }
  }
  CACHALOT_RETURN_IF_ERROR(status);
  if (int{!c.preset.empty()} + int{!c.config.empty()} + int{!c.from.empty()} != 1) {
    return invalid("{}: [model] needs either 'preset', 'config' or 'from'", source);
  }
  if (!c.from.empty() && (!c.tokenizer.empty() || c.classes_from_tokenizer)) {
    return invalid(
        "{}: model.from brings its tokenizer; 'tokenizer' and 'engram_classes' do not go with it",
        source);
  }
  if (c.stage != Stage::kBackbone && c.from.empty()) {
    return invalid("{}: model.stage is \"{}\", which needs 'from', the backbone's run",
                   source,
                   c.stage == Stage::kDrafter ? "drafter" : "indexer");
  }
  if (c.train.empty()) {
    return invalid("{}: data.train names no files", source);
  }
  if (c.steps == 0) {
    return invalid("{}: schedule.steps is missing", source);
  }
  if (c.schedule.peak == 0) {
    return invalid("{}: schedule.peak is missing", source);
  }
  if (c.out.empty()) {
    return invalid("{}: run.out is missing", source);
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
