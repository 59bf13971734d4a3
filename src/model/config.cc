#include "model/config.h"

#include <climits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "base/format.h"

namespace cachalot::model {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

// When a key must be present.
enum class Need { kAlways, kOptional, kEngram, kDraft, kCandidates, kIndex };

// One table per value type drives reading, writing and setting: the official key, its name in the
// flat inference/config.json, and the field.
template <class Owner, class T>
struct Field {
  const char* key;
  const char* flat;
  T Owner::* member;
  Need need = Need::kAlways;
};

using Integer = Field<ModelConfig, int64_t>;
using Number = Field<ModelConfig, double>;
using List = Field<ModelConfig, std::vector<int64_t>>;

constexpr Integer kIntegers[] = {
    {"vocab_size", "vocab_size", &ModelConfig::vocab_size},
    {"hidden_size", "dim", &ModelConfig::hidden_size},
    {"moe_intermediate_size", "moe_inter_dim", &ModelConfig::moe_intermediate_size},
    {"num_hidden_layers", "n_layers", &ModelConfig::num_hidden_layers},
    {"num_attention_heads", "n_heads", &ModelConfig::num_attention_heads},
    {"head_dim", "head_dim", &ModelConfig::head_dim},
    {"qk_rope_head_dim", "rope_head_dim", &ModelConfig::qk_rope_head_dim},
    {"q_lora_rank", "q_lora_rank", &ModelConfig::q_lora_rank},
    {"o_lora_rank", "o_lora_rank", &ModelConfig::o_lora_rank},
    {"o_groups", "o_groups", &ModelConfig::o_groups},
    {"max_position_embeddings",
     "max_seq_len",
     &ModelConfig::max_position_embeddings,
     Need::kOptional},
    {"n_routed_experts", "n_routed_experts", &ModelConfig::n_routed_experts},
    {"n_shared_experts", "n_shared_experts", &ModelConfig::n_shared_experts},
    {"num_experts_per_tok", "n_activated_experts", &ModelConfig::num_experts_per_tok},
    {"sliding_window", "window_size", &ModelConfig::sliding_window},
    {"index_n_heads", "index_n_heads", &ModelConfig::index_n_heads, Need::kIndex},
    {"index_head_dim", "index_head_dim", &ModelConfig::index_head_dim, Need::kIndex},
    {"index_topk", "index_topk", &ModelConfig::index_topk, Need::kIndex},
    {"candidate_source_layer_id",
     "candidate_source_layer",
     &ModelConfig::candidate_source_layer_id,
     Need::kOptional},
    {"candidate_topk_blocks",
     "candidate_topk_blocks",
     &ModelConfig::candidate_topk_blocks,
     Need::kCandidates},
    {"candidate_block_size",
     "candidate_block_size",
     &ModelConfig::candidate_block_size,
     Need::kCandidates},
    {"hc_mult", "hc_mult", &ModelConfig::hc_mult},
    {"hc_sinkhorn_iters", "hc_sinkhorn_iters", &ModelConfig::hc_sinkhorn_iters},
    {"engram_max_ngram_size",
     "engram_max_ngram_size",
     &ModelConfig::engram_max_ngram_size,
     Need::kEngram},
    {"engram_vocab_size", "engram_vocab_size", &ModelConfig::engram_vocab_size, Need::kEngram},
    {"engram_n_heads", "engram_n_heads", &ModelConfig::engram_n_heads, Need::kEngram},
    {"engram_head_dim", "engram_head_dim", &ModelConfig::engram_head_dim, Need::kEngram},
    {"engram_pad_token_id", "engram_pad_id", &ModelConfig::engram_pad_token_id, Need::kEngram},
    {"engram_compressed_vocab_size",
     "engram_compressed_vocab_size",
     &ModelConfig::engram_compressed_vocab_size,
     Need::kEngram},
    {"num_nextn_predict_layers",
     "n_mtp_layers",
     &ModelConfig::num_nextn_predict_layers,
     Need::kOptional},
    {"dspark_block_size", "dspark_block_size", &ModelConfig::dspark_block_size, Need::kDraft},
    {"dspark_noise_token_id",
     "dspark_noise_token_id",
     &ModelConfig::dspark_noise_token_id,
     Need::kDraft},
    {"dspark_markov_rank", "dspark_markov_rank", &ModelConfig::dspark_markov_rank, Need::kDraft},
    {"dspark_n_routed_experts",
     "dspark_n_routed_experts",
     &ModelConfig::dspark_n_routed_experts,
     Need::kDraft},
    {"dspark_num_experts_per_tok",
     "dspark_n_activated_experts",
     &ModelConfig::dspark_num_experts_per_tok,
     Need::kDraft},
};

constexpr Number kNumbers[] = {
    {"swiglu_limit", "swiglu_limit", &ModelConfig::swiglu_limit},
    {"rms_norm_eps", "norm_eps", &ModelConfig::rms_norm_eps},
    {"rope_theta", "rope_theta", &ModelConfig::rope_theta},
    {"compress_rope_theta", "compress_rope_theta", &ModelConfig::compress_rope_theta},
    {"routed_scaling_factor", "route_scale", &ModelConfig::routed_scaling_factor},
    {"gate_temp", "gate_temp", &ModelConfig::gate_temp, Need::kOptional},
    {"hc_eps", "hc_eps", &ModelConfig::hc_eps},
};

constexpr List kLists[] = {
    {"compress_ratios", "compress_ratios", &ModelConfig::compress_ratios},
    {"kv_source_layer_ids", "kv_source_layers", &ModelConfig::kv_source_layer_ids},
    {"index_source_layer_ids", "index_source_layers", &ModelConfig::index_source_layer_ids},
    {"engram_layer_ids", "engram_layer_ids", &ModelConfig::engram_layer_ids, Need::kOptional},
    {"engram_num_embeddings",
     "engram_num_embeddings",
     &ModelConfig::engram_num_embeddings,
     Need::kOptional},
    {"dspark_target_layer_ids",
     "dspark_target_layer_ids",
     &ModelConfig::dspark_target_layer_ids,
     Need::kDraft},
};

// Top-level keys of the nested spelling.
constexpr Integer kTokens[] = {
    {"bos_token_id", "bos_token_id", &ModelConfig::bos_token_id, Need::kOptional},
    {"eos_token_id", "eos_token_id", &ModelConfig::eos_token_id, Need::kOptional},
    {"pad_token_id", "pad_token_id", &ModelConfig::pad_token_id, Need::kOptional},
    {"image_token_id", "image_token_id", &ModelConfig::image_token_id, Need::kOptional},
};

constexpr Field<RopeScaling, double> kRopeNumbers[] = {
    {"factor", "rope_factor", &RopeScaling::factor},
    {"beta_fast", "beta_fast", &RopeScaling::beta_fast},
    {"beta_slow", "beta_slow", &RopeScaling::beta_slow},
};
constexpr Field<RopeScaling, int64_t> kRopeIntegers[] = {
    {"original_max_position_embeddings",
     "original_seq_len",
     &RopeScaling::original_max_position_embeddings},
};

constexpr Field<VisionConfig, int64_t> kVisionIntegers[] = {
    {"num_hidden_layers", "vision_n_layers", &VisionConfig::num_hidden_layers},
    {"hidden_size", "vision_dim", &VisionConfig::hidden_size},
    {"num_attention_heads", "vision_n_heads", &VisionConfig::num_attention_heads},
    {"intermediate_size", "vision_inter_dim", &VisionConfig::intermediate_size},
    {"patch_size", "vision_patch_size", &VisionConfig::patch_size},
    {"downsample_ratio", "vision_downsample_ratio", &VisionConfig::downsample_ratio},
    {"max_image_tokens", "vision_max_n_token", &VisionConfig::max_image_tokens},
    {"min_pixels", "vision_min_pixels", &VisionConfig::min_pixels},
};
constexpr Field<VisionConfig, double> kVisionNumbers[] = {
    {"rope_theta", "vision_rope_theta", &VisionConfig::rope_theta},
};

// Keys whose other values select behaviour that does not exist here. `value` is JSON; absent keys
// and null are accepted.
struct Fixed {
  const char* key;
  const char* flat;
  const char* value;
};
constexpr Fixed kFixed[] = {
    {"hidden_act", "hidden_act", "\"silu\""},
    {"scoring_func", "score_func", "\"sqrtsoftplus\""},
    {"topk_method", "topk_method", "\"noaux_tc\""},
    {"norm_topk_prob", "norm_topk_prob", "true"},
    {"attention_bias", "attention_bias", "false"},
    {"tie_word_embeddings", "tie_word_embeddings", "false"},
    {"num_key_value_heads", "n_kv_heads", "1"},
    {"n_group", "n_expert_groups", "1"},
    {"topk_group", "n_limited_groups", "1"},
    {"first_k_dense_replace", "n_dense_layers", "0"},
    {"num_hash_layers", "n_hash_layers", "0"},
};
constexpr Fixed kFixedQuantization[] = {
    {"quant_method", nullptr, "\"fp8\""},
    {"activation_scheme", nullptr, "\"dynamic\""},
    {"weight_block_size", nullptr, "[32,32]"},
    {"scale_fmt", "scale_fmt", "\"ue8m0\""},
    {"expert_dtype", "expert_dtype", "\"fp4\""},
};

// ---- Reading
// -------------------------------------------------------------------------------------

Status wrong_type(const std::string& where, const char* wanted, const json& value) {
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > 80) {
    text = text.substr(0, 80) + "...";
  }
  return invalid("{} must be {}, is {}", where, wanted, text);
}

Status read_value(const json& value, const std::string& where, int64_t& out) {
  const bool too_large = value.is_number_unsigned() && value.get<uint64_t>() > INT64_MAX;
  if (!value.is_number_integer() || too_large) {
    return wrong_type(where, "an integer", value);
  }
  out = value.get<int64_t>();
  return {};
}

Status read_value(const json& value, const std::string& where, double& out) {
  if (!value.is_number()) {
    return wrong_type(where, "a number", value);
  }
  out = value.get<double>();
  return {};
}

Status read_value(const json& value, const std::string& where, std::vector<int64_t>& out) {
  if (!value.is_array()) {
    return wrong_type(where, "a list of integers", value);
  }
  std::vector<int64_t> list;
  for (size_t i = 0; i < value.size(); ++i) {
    CACHALOT_RETURN_IF_ERROR(
        read_value(value[i], fmt::format("{}[{}]", where, i), list.emplace_back()));
  }
  out = std::move(list);
  return {};
}

// One object of the file, with the spelling of its keys.
struct Section {
  const json& object;
  bool flat;
  std::string prefix;  // for messages: "text_config."

  const json* find(const char* key, const char* flat_key) const {
    const char* name = flat ? flat_key : key;
    if (name == nullptr) {
      return nullptr;
    }
    const auto it = object.find(name);
    return it == object.end() || it->is_null() ? nullptr : &*it;
  }
  std::string where(const char* key, const char* flat_key) const {
    return prefix + (flat ? flat_key : key);
  }
};

template <class Owner, class T, size_t N>
Status read_fields(const Section& section,
                   const Field<Owner, T> (&fields)[N],
                   Owner& owner,
                   const std::set<Need>& needs) {
  for (const auto& field : fields) {
    const json* value = section.find(field.key, field.flat);
    if (value != nullptr) {
      CACHALOT_RETURN_IF_ERROR(
          read_value(*value, section.where(field.key, field.flat), owner.*field.member));
    } else if (needs.contains(field.need)) {
      return invalid("{} is missing", section.where(field.key, field.flat));
    }
  }
  return {};
}

template <size_t N>
Status check_fixed(const Section& section, const Fixed (&fixed)[N]) {
  for (const Fixed& f : fixed) {
    const json* value = section.find(f.key, f.flat);
    if (value != nullptr && *value != json::parse(f.value)) {
      return wrong_type(section.where(f.key, f.flat), f.value, *value);
    }
  }
  return {};
}

Status read_text(const Section& section, ModelConfig& config) {
  CACHALOT_RETURN_IF_ERROR(check_fixed(section, kFixed));
  // First what decides which other keys are needed.
  CACHALOT_RETURN_IF_ERROR(read_fields(section, kIntegers, config, {}));
  CACHALOT_RETURN_IF_ERROR(read_fields(section, kLists, config, {}));
  std::set<Need> needs = {Need::kAlways};
  if (!config.engram_layer_ids.empty()) {
    needs.insert(Need::kEngram);
  }
  if (config.num_nextn_predict_layers != 0) {
    needs.insert(Need::kDraft);
  }
  if (config.candidate_source_layer_id >= 0) {
    needs.insert(Need::kCandidates);
  }
  if (!config.kv_source_layer_ids.empty()) {
    needs.insert(Need::kIndex);
  }
  CACHALOT_RETURN_IF_ERROR(read_fields(section, kIntegers, config, needs));
  CACHALOT_RETURN_IF_ERROR(read_fields(section, kLists, config, needs));
  return read_fields(section, kNumbers, config, needs);
}

Status read_rope_scaling(const Section& section, ModelConfig& config) {
  CACHALOT_RETURN_IF_ERROR(
      read_fields(section, kRopeNumbers, config.rope_scaling, {Need::kAlways}));
  CACHALOT_RETURN_IF_ERROR(
      read_fields(section, kRopeIntegers, config.rope_scaling, {Need::kAlways}));
  config.has_rope_scaling = true;
  return {};
}

// The released flat config has no position limit: it is the reach of the scaled rotary positions.
Status derive_position_limit(const Section& section, ModelConfig& config) {
  if (section.find("max_position_embeddings", "max_seq_len") != nullptr) {
    return {};
  }
  const double reach = config.rope_scaling.factor *
                       static_cast<double>(config.rope_scaling.original_max_position_embeddings);
  if (!section.flat || !(reach >= 1 && reach < 1e9)) {
    return invalid("{} is missing", section.where("max_position_embeddings", "max_seq_len"));
  }
  config.max_position_embeddings = static_cast<int64_t>(reach);
  return {};
}

Status read_vision(const Section& section, ModelConfig& config) {
  CACHALOT_RETURN_IF_ERROR(read_fields(section, kVisionIntegers, config.vision, {Need::kAlways}));
  CACHALOT_RETURN_IF_ERROR(read_fields(section, kVisionNumbers, config.vision, {Need::kAlways}));
  if (const json* ratio = section.find("max_wh_ratio", "vision_max_wh_ratio")) {
    return wrong_type(section.where("max_wh_ratio", "vision_max_wh_ratio"), "null", *ratio);
  }
  return {};
}

Result<const json*> member_object(const json& document, const char* key) {
  const auto it = document.find(key);
  if (it == document.end() || it->is_null()) {
    return nullptr;
  }
  if (!it->is_object()) {
    return wrong_type(key, "an object", *it);
  }
  return &*it;
}

Status read_nested(const json& document, const json& text, ModelConfig& config) {
  const Section top{document, false, ""};
  const Section section{text, false, "text_config."};
  if (const json* type = top.find("model_type", nullptr);
      type != nullptr && *type != "deepseek_v41") {
    return wrong_type("model_type", "\"deepseek_v41\"", *type);
  }
  CACHALOT_RETURN_IF_ERROR(check_fixed(top, kFixed));
  CACHALOT_RETURN_IF_ERROR(read_text(section, config));
  CACHALOT_RETURN_IF_ERROR(read_fields(section, kTokens, config, {}));
  CACHALOT_RETURN_IF_ERROR(read_fields(top, kTokens, config, {}));
  CACHALOT_TRY(const json* rope, member_object(text, "rope_scaling"));
  if (rope != nullptr) {
    const Section rope_section{*rope, false, "text_config.rope_scaling."};
    for (const char* key : {"rope_type", "type"}) {
      const json* type = rope_section.find(key, nullptr);
      if (type != nullptr && *type != "yarn") {
        return wrong_type(rope_section.prefix + key, "\"yarn\"", *type);
      }
    }
    CACHALOT_RETURN_IF_ERROR(read_rope_scaling(rope_section, config));
  }
  CACHALOT_RETURN_IF_ERROR(derive_position_limit(section, config));
  CACHALOT_TRY(const json* vision, member_object(document, "vision_config"));
  if (vision != nullptr) {
    CACHALOT_RETURN_IF_ERROR(read_vision(Section{*vision, false, "vision_config."}, config));
  }
  CACHALOT_TRY(const json* quantization, member_object(document, "quantization_config"));
  if (quantization != nullptr) {
    config.storage = WeightStorage::kOfficial;
    return check_fixed(Section{*quantization, false, "quantization_config."}, kFixedQuantization);
  }
  const json* dtype = top.find("dtype", nullptr);
  if (dtype == nullptr || *dtype != "float32") {
    return invalid(
        "quantization_config is missing, and dtype is {}; unquantized weights must be \"float32\"",
        dtype == nullptr ? std::string("missing") : dtype->dump());
  }
  config.storage = WeightStorage::kF32;
  return {};
}

Status read_flat(const json& document, ModelConfig& config) {
  const Section section{document, true, ""};
  CACHALOT_RETURN_IF_ERROR(read_text(section, config));
  CACHALOT_RETURN_IF_ERROR(read_fields(section, kTokens, config, {}));
  if (section.find("original_max_position_embeddings", "original_seq_len") != nullptr) {
    CACHALOT_RETURN_IF_ERROR(read_rope_scaling(section, config));
  }
  CACHALOT_RETURN_IF_ERROR(derive_position_limit(section, config));
  if (section.find("num_hidden_layers", "vision_n_layers") != nullptr) {
    CACHALOT_RETURN_IF_ERROR(read_vision(section, config));
  }
  CACHALOT_RETURN_IF_ERROR(check_fixed(section, kFixedQuantization));
  // Here `dtype` is that of the quantized weights.
  const json* dtype = section.find("dtype", "dtype");
  if (dtype != nullptr && *dtype != "fp8") {
    return wrong_type("dtype", "\"fp8\"", *dtype);
  }
  config.storage = WeightStorage::kOfficial;
  return {};
}

// The text as one object. Duplicate keys are an error: which of them wins differs between readers.
Result<json> parse_object(std::string_view text) {
  constexpr int kDeepest = 32;
  std::vector<std::set<std::string>> open;
  std::string fault;
  const auto on_event = [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth > kDeepest) {
      fault = "the nesting is too deep";
    }
    if (event == json::parse_event_t::object_start) {
      open.emplace_back();
    } else if (event == json::parse_event_t::object_end) {
      open.pop_back();
    } else if (event == json::parse_event_t::key &&
               !open.back().insert(parsed.get<std::string>()).second) {
      fault = fmt::format("the key {} appears twice", parsed.dump());
    }
    return fault.empty();
  };
  try {
    json document = json::parse(text, on_event);
    if (!fault.empty()) {
      return Status(Code::kInvalidArgument, fault);
    }
    if (!document.is_object()) {
      return invalid("the text is not a JSON object");
    }
    return document;
  } catch (const json::exception& cause) {
    return invalid("not JSON: {}", cause.what());
  }
}

Result<ModelConfig> read_config(std::string_view text) {
  CACHALOT_TRY(const json document, parse_object(text));
  ModelConfig config;
  CACHALOT_TRY(const json* nested, member_object(document, "text_config"));
  if (nested != nullptr) {
    CACHALOT_RETURN_IF_ERROR(read_nested(document, *nested, config));
  } else if (document.contains("dim")) {
    CACHALOT_RETURN_IF_ERROR(read_flat(document, config));
  } else {
    return invalid("there is neither text_config nor dim: not a DeepSeek-V4.1 config");
  }
  if (config.engram_num_embeddings.empty()) {
    CACHALOT_RETURN_IF_ERROR(derive_engram_rows(config));
  }
  CACHALOT_RETURN_IF_ERROR(validate(config));
  return config;
}

// ---- Writing and setting
// -------------------------------------------------------------------------

template <class Owner, class T, size_t N>
void write_fields(ordered_json& object, const Field<Owner, T> (&fields)[N], const Owner& owner) {
  for (const auto& field : fields) {
    object[field.key] = owner.*field.member;
  }
}

// Sets the field called `key`, if it is in `fields`.
template <class Owner, class T, size_t N>
std::optional<Status> set_field(const Field<Owner, T> (&fields)[N],
                                std::string_view key,
                                const json& value,
                                Owner& owner) {
  for (const auto& field : fields) {
    if (key == field.key) {
      return read_value(value, field.key, owner.*field.member);
    }
  }
  return std::nullopt;
}

std::optional<Status> set_nested(std::string_view section,
                                 std::string_view key,
                                 const json& value,
                                 ModelConfig& config) {
  if (section == "vision_config") {
    std::optional<Status> done = set_field(kVisionIntegers, key, value, config.vision);
    return done ? done : set_field(kVisionNumbers, key, value, config.vision);
  }
  if (section == "rope_scaling") {
    std::optional<Status> done = set_field(kRopeIntegers, key, value, config.rope_scaling);
    done = done ? done : set_field(kRopeNumbers, key, value, config.rope_scaling);
    config.has_rope_scaling = config.has_rope_scaling || done;
    return done;
  }
  return std::nullopt;
}

}  // namespace

Result<ModelConfig> parse_config(std::string_view json, const std::string& source) {
  return read_config(json).with(source);
}

std::string config_to_json(const ModelConfig& config) {
  ordered_json document;
  document["architectures"] = {"DeepseekV41ForCausalLM"};
  document["model_type"] = "deepseek_v41";
  document["dtype"] = config.storage == WeightStorage::kF32 ? "float32" : "bfloat16";
  write_fields(document, kTokens, config);
  if (config.storage == WeightStorage::kOfficial) {
    ordered_json& quantization = document["quantization_config"];
    for (const Fixed& f : kFixedQuantization) {
      quantization[f.key] = ordered_json::parse(f.value);
    }
  }
  ordered_json& text = document["text_config"];
  text["model_type"] = "deepseek_v41_text";
  for (const Fixed& f : kFixed) {
    text[f.key] = ordered_json::parse(f.value);
  }
  write_fields(text, kIntegers, config);
  write_fields(text, kNumbers, config);
  write_fields(text, kLists, config);
  if (config.has_rope_scaling) {
    ordered_json& rope = text["rope_scaling"];
    rope["rope_type"] = "yarn";
    write_fields(rope, kRopeNumbers, config.rope_scaling);
    write_fields(rope, kRopeIntegers, config.rope_scaling);
  }
  if (config.vision != VisionConfig{}) {
    ordered_json& vision = document["vision_config"];
    vision["model_type"] = "deepseek_v41_vision";
    write_fields(vision, kVisionIntegers, config.vision);
    write_fields(vision, kVisionNumbers, config.vision);
    vision["max_wh_ratio"] = nullptr;
  }
  return document.dump(2) + "\n";
}

Status set_config_value(ModelConfig& config, std::string_view assignment) {
  const size_t equals = assignment.find('=');
  if (equals == std::string_view::npos || equals == 0) {
    return invalid("'{}' is not of the form key=value", assignment);
  }
  const std::string_view key = assignment.substr(0, equals);
  const std::string_view text = assignment.substr(equals + 1);
  const json value = json::parse(text, nullptr, false);
  if (value.is_discarded()) {
    return invalid("{}: '{}' is neither a number nor a list", key, text);
  }
  std::optional<Status> done;
  if (const size_t dot = key.find('.'); dot != std::string_view::npos) {
    done = set_nested(key.substr(0, dot), key.substr(dot + 1), value, config);
  } else {
    done = set_field(kIntegers, key, value, config);
    done = done ? done : set_field(kNumbers, key, value, config);
    done = done ? done : set_field(kLists, key, value, config);
    done = done ? done : set_field(kTokens, key, value, config);
  }
  if (!done) {
    return invalid("'{}' is not a key of the config", key);
  }
  CACHALOT_RETURN_IF_ERROR(*done);
  if (key.starts_with("engram_") && key != "engram_num_embeddings") {
    // Out of bounds now does not mean out of bounds after the next setting; validate() decides.
    ModelConfig derived = config;
    if (derive_engram_rows(derived).ok()) {
      config.engram_num_embeddings = derived.engram_num_embeddings;
    }
  }
  return {};
}

}  // namespace cachalot::model
