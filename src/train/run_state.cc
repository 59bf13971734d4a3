#include "train/run_state.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/format.h"
#include "io/safetensors.h"
#include "model/checkpoint.h"
#include "model/checkpoint_writer.h"
#include "quant/weight_quant.h"
#include "text/token_classes.h"
#include "train/draft_calibration.h"

namespace cachalot::train {
namespace {

constexpr std::string_view kFormat = "cachalot training state 1";
constexpr const char* kMixing = "mixing";
// No run comes to so many steps, tokens or epochs, and adding to them overflows nothing.
constexpr int64_t kMostCount = int64_t{1} << 60;
constexpr std::string_view kSetting = "setting/";
constexpr std::string_view kPrefix = "state-", kSuffix = ".safetensors";

TensorView view(const std::vector<float>& values) {
  return {const_cast<float*>(values.data()), DType::kF32, {static_cast<int64_t>(values.size())}};
}

Result<std::string> field(const io::SafetensorsFile& file, const std::string& name) {
  const auto found = file.metadata().find(name);
  if (found == file.metadata().end()) {
    return error(Code::kDataLoss, "{}: the metadata lack '{}'", file.path(), name);
  }
  return found->second;
}

template <class T>
Status read_number(const io::SafetensorsFile& file, const std::string& name, T* value) {
  CACHALOT_TRY(const std::string text, field(file, name));
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), *value);
  if (failure != std::errc() || end != text.data() + text.size()) {
    return error(Code::kDataLoss, "{}: '{}' is '{}', not a number", file.path(), name, text);
  }
  return {};
}

Status read_tensor(const io::SafetensorsFile& file,
                   const std::string& name,
                   std::vector<float>* values) {
  if (values->empty()) {
    return {};
  }
  const TensorView* stored = file.find(name);
  if (stored == nullptr || stored->dtype != DType::kF32 ||
      stored->shape.elements() != static_cast<int64_t>(values->size())) {
    return error(Code::kDataLoss,
                 "{}: '{}' is {}; the run needs {} F32 values",
                 file.path(),
                 name,
                 stored == nullptr ? "missing" : "of another size",
                 values->size());
  }
  std::memcpy(values->data(), stored->data, values->size() * sizeof(float));
  return {};
}

}  // namespace

Result<RunModel> make_run_model(model::ModelConfig config,
                                std::string tokenizer_json,
                                const std::string& source) {
  CACHALOT_RETURN_IF_ERROR(model::validate(config));
  CACHALOT_TRY(text::Tokenizer tokenizer, text::Tokenizer::parse(tokenizer_json, source));
  if (tokenizer.vocab_size() > config.vocab_size) {
    return invalid("{} has {} tokens, but vocab_size is {}",
                   source,
                   tokenizer.vocab_size(),
                   config.vocab_size);
  }
  RunModel run{.config = std::move(config),
               .tokenizer_json = std::move(tokenizer_json),
               .tokenizer = std::move(tokenizer)};
  if (!run.config.engram_layer_ids.empty()) {
    CACHALOT_TRY(run.token_class,
                 text::token_class_map(
                     run.tokenizer, run.config.vocab_size, run.config.engram_compressed_vocab_size)
                     .with(source));
  }
  return run;
}

Result<RunModel> open_run_model(const std::string& folder, const std::vector<std::string>& set) {
  const std::string config_path = folder + "/config.json", tokenizer = folder + "/tokenizer.json";
  CACHALOT_TRY(const std::string text, read_file(config_path));
  CACHALOT_TRY(model::ModelConfig config, model::parse_config(text, config_path));
  for (const std::string& assignment : set) {
    CACHALOT_RETURN_IF_ERROR(model::set_config_value(config, assignment).with("model.set"));
  }
  CACHALOT_TRY(std::string json, read_file(tokenizer));
  return make_run_model(std::move(config), std::move(json), tokenizer);
}

std::optional<int64_t> step_of(const nlohmann::json& record) {
  const auto found = record.is_object() ? record.find("step") : record.end();
  return found != record.end() && found->is_number_integer() ? std::optional(found->get<int64_t>())
                                                             : std::nullopt;
}

std::string state_path(const std::string& folder, int64_t step) {
  return fmt::format("{}/{}{:08}{}", folder, kPrefix, step, kSuffix);
}

std::vector<int64_t> saved_steps(const std::string& folder) {
  std::vector<int64_t> steps;
  std::error_code failure;
  for (const auto& entry : std::filesystem::directory_iterator(folder, failure)) {
    const std::string name = entry.path().filename().string();
    int64_t step = 0;
    if (name.starts_with(kPrefix) && name.ends_with(kSuffix)) {
      const char* end = name.data() + name.size() - kSuffix.size();
      const auto result = std::from_chars(name.data() + kPrefix.size(), end, step);
      if (result.ec == std::errc() && result.ptr == end) {
        steps.push_back(step);
      }
    }
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

Status save_state(const std::string& path,
                  const ParameterSet<float>& parameters,
                  const std::vector<OptimizerState>& states,
                  const RunPosition& position) {
  std::vector<io::SafetensorsFile::Tensor> tensors;
  for (size_t i = 0; i < parameters.all().size(); ++i) {
    const Parameter<float>& parameter = parameters.all()[i];
    tensors.push_back({"value/" + parameter.spec.name, view(parameter.value)});
    if (!states[i].first.empty()) {
      tensors.push_back({"first/" + parameter.spec.name, view(states[i].first)});
    }
    if (!states[i].second.empty()) {
      tensors.push_back({"second/" + parameter.spec.name, view(states[i].second)});
    }
  }
  std::map<std::string, std::string> metadata = {
      {"format", std::string(kFormat)},
      {"step", fmt::format("{}", position.step)},
      {"tokens", fmt::format("{}", position.tokens)},
      {"epoch", fmt::format("{}", position.epoch)},
      {"batch", fmt::format("{}", position.batch)},
      // The shortest text that reads back as the same double.
      {"mean_loss", fmt::format("{}", position.mean_loss)},
      {kMixing, std::string(kMixingNames[static_cast<size_t>(position.mixing)])}};
  for (const auto& [key, value] : position.settings) {
    metadata[std::string(kSetting) + key] = value;
  }
  return io::write_safetensors(path, tensors, metadata);
}

Result<RunPosition> load_state(const std::string& path,
                               ParameterSet<float>& parameters,
                               std::vector<OptimizerState>* states) {
  CACHALOT_TRY(const io::SafetensorsFile file, io::SafetensorsFile::open(path));
  CACHALOT_TRY(const std::string format, field(file, "format"));
  if (format != kFormat) {
    return error(Code::kDataLoss, "{}: format is '{}', not '{}'", path, format, kFormat);
  }
  RunPosition position;
  CACHALOT_RETURN_IF_ERROR(read_number(file, "step", &position.step));
  CACHALOT_RETURN_IF_ERROR(read_number(file, "tokens", &position.tokens));
  CACHALOT_RETURN_IF_ERROR(read_number(file, "epoch", &position.epoch));
  CACHALOT_RETURN_IF_ERROR(read_number(file, "batch", &position.batch));
  CACHALOT_RETURN_IF_ERROR(read_number(file, "mean_loss", &position.mean_loss));
  for (const auto& [name, value] : {std::pair{"step", position.step},
                                    {"tokens", position.tokens},
                                    {"epoch", position.epoch},
                                    {"batch", position.batch}}) {
    if (value < 0 || value > kMostCount) {
      return error(Code::kDataLoss, "{}: '{}' is {}", path, name, value);
    }
  }
  if (!std::isfinite(position.mean_loss)) {
    return error(Code::kDataLoss, "{}: 'mean_loss' is {}", path, position.mean_loss);
  }
  // States written before there was a choice lack it.
  if (file.metadata().contains(kMixing)) {
    CACHALOT_TRY(const std::string name, field(file, kMixing));
    const auto* found = std::find(kMixingNames.begin(), kMixingNames.end(), name);
    if (found == kMixingNames.end()) {
      return error(Code::kDataLoss, "{}: '{}' is '{}'", path, kMixing, name);
    }
    position.mixing = static_cast<Mixing>(found - kMixingNames.begin());
  }
  // Nor have old states settings, which are then not compared.
  for (const auto& [key, value] : file.metadata()) {
    if (key.starts_with(kSetting)) {
      position.settings[key.substr(kSetting.size())] = value;
    }
  }
  for (size_t i = 0; i < parameters.all().size(); ++i) {
    Parameter<float>& parameter = parameters.all()[i];
    CACHALOT_RETURN_IF_ERROR(read_tensor(file, "value/" + parameter.spec.name, &parameter.value));
    if (states != nullptr) {
      OptimizerState& state = (*states)[i];
      CACHALOT_RETURN_IF_ERROR(read_tensor(file, "first/" + parameter.spec.name, &state.first));
      CACHALOT_RETURN_IF_ERROR(read_tensor(file, "second/" + parameter.spec.name, &state.second));
    }
  }
  return position;
}

Status load_checkpoint(const std::string& directory, ParameterSet<float>& parameters) {
  CACHALOT_TRY(const model::Checkpoint checkpoint, model::Checkpoint::open(directory));
  for (const model::WeightSpec& spec : checkpoint.table()) {
    Parameter<float>& parameter = parameters.named(spec.name);
    const int64_t rows = parameter.rows(), columns = parameter.columns();
    float* values = parameter.value.data();
    if (spec.kind == model::WeightKind::kPlain) {
      const TensorView stored = checkpoint.tensor(spec.name);
      for (int64_t i = 0; i < rows * columns; ++i) {
        values[i] = stored.dtype == DType::kF32 ? stored.as<float>()[i]
                                                : static_cast<float>(stored.as<bf16>()[i]);
      }
      continue;
    }
    const ops::Weight weight = checkpoint.weight(spec);
    const auto* codes = static_cast<const uint8_t*>(weight.values.data);
    const auto* scales = static_cast<const uint8_t*>(weight.scales.data);
    switch (spec.kind) {
      case model::WeightKind::kFp8Block:
        quant::fp8_tile_dequantize(codes, scales, rows, columns, values);
        break;
      case model::WeightKind::kEngramTable:
        quant::fp8_row_dequantize(codes, scales, rows, columns, values);
        break;
      case model::WeightKind::kFp4Row:
        quant::fp4_row_dequantize(codes, scales, rows, columns, values);
        break;
      case model::WeightKind::kPlain:
        break;
    }
  }
  return {};
}

Status export_run(const std::string& folder,
                  int64_t step,
                  const std::string& out,
                  ThreadPool& pool) {
  CACHALOT_TRY(const RunModel run, open_run_model(folder));
  CACHALOT_TRY(const auto parameters, ParameterSet<float>::create(run.config, run.token_class));
  const std::string path = state_path(folder, step);
  CACHALOT_TRY(const RunPosition position, load_state(path, *parameters, nullptr));
  if (position.mixing != Mixing::kManifold) {
    return invalid("{}: trained with model.mixing = \"{}\", which no checkpoint can express",
                   path,
                   kMixingNames[static_cast<size_t>(position.mixing)]);
  }
  // Official codes have no place for these, so they would become numbers.
  for (const Parameter<float>& parameter : parameters->all()) {
    const auto bad = std::find_if(parameter.value.begin(), parameter.value.end(), [](float value) {
      return !std::isfinite(value);
    });
    if (bad != parameter.value.end()) {
      return error(Code::kDataLoss,
                   "{}: 'value/{}' has {} at {}",
                   path,
                   parameter.spec.name,
                   *bad,
                   bad - parameter.value.begin());
    }
  }
  const model::WeightSource source = [&](const model::WeightSpec& spec) -> model::WeightValues {
    const float* values = parameters->named(spec.name).value.data();
    return [values](int64_t begin, std::span<float> to) {
      std::copy_n(values + begin, to.size(), to.begin());
    };
  };
  CACHALOT_RETURN_IF_ERROR(
      model::write_checkpoint(run.config, out, run.tokenizer_json, source, pool));
  // The calibration belongs to the state that it was fitted with; an older export may have left
  // another one.
  const std::string target = out + "/" + model::kDraftCalibrationFile;
  CACHALOT_RETURN_IF_ERROR(remove_file(target));
  const std::string calibration = folder + "/" + model::kDraftCalibrationFile;
  if (!file_exists(calibration)) {
    return {};
  }
  CACHALOT_TRY(const std::string text, read_file(calibration));
  if (step_of(nlohmann::json::parse(text, nullptr, false)) != step) {
    return {};
  }
  return replace_file(target, text);
}

}  // namespace cachalot::train
