#include "train/parameters.h"

#include <cmath>
#include <memory>
#include <utility>

#include "base/format.h"
#include "base/rng.h"
#include "model/rope.h"
#include "quant/weight_quant.h"
#include "train/parallel.h"

namespace cachalot::train {
namespace {

using model::WeightKind;
using model::WeightRole;
using model::WeightSpec;

// The official storage of every weight, in checkpoint order.
std::vector<WeightSpec> trained_table(model::ModelConfig config) {
  config.storage = model::WeightStorage::kOfficial;
  return model::weight_table(config);
}

bool simulated(const WeightSpec& spec, const QuantSwitches& switches) {
  switch (spec.kind) {
    case WeightKind::kFp8Block:
      return switches.linears;
    case WeightKind::kFp4Row:
      return switches.experts;
    case WeightKind::kEngramTable:
      return switches.engram;
    case WeightKind::kPlain:
      break;
  }
  return switches.plain && spec.dtype == DType::kBF16;
}

// Rows that are rounded together: a multiple of the 32-row tiles.
constexpr int64_t kRoundRows = 256;

// FNV-1a: a stream per tensor name, the same on every machine.
uint64_t stream_of(std::string_view name) {
  uint64_t hash = 14695981039346656037u;
  for (char c : name) {
    hash = (hash ^ static_cast<uint8_t>(c)) * 1099511628211u;
  }
  return hash;
}

constexpr double kEmbeddingDeviation = 0.1;
constexpr double kTableDeviation = 0.02;
constexpr float kHcScale = 0.01f;
// Sinkhorn turns this diagonal into streams that keep about 0.95 of themselves.
constexpr float kCombDiagonal = 4.0f;

}  // namespace

void round_to_storage(const WeightSpec& spec, int64_t rows, int64_t columns, float* values) {
  const auto n = static_cast<size_t>(rows * columns);
  const int64_t blocks = (columns + quant::kWeightBlock - 1) / quant::kWeightBlock;
  std::vector<uint8_t> codes(n), scales(static_cast<size_t>(rows * blocks));
  switch (spec.kind) {
    case WeightKind::kFp8Block:
      quant::fp8_tile_quantize(values, rows, columns, codes.data(), scales.data());
      quant::fp8_tile_dequantize(codes.data(), scales.data(), rows, columns, values);
      return;
    case WeightKind::kEngramTable:
      quant::fp8_row_quantize(values, rows, columns, codes.data(), scales.data());
      quant::fp8_row_dequantize(codes.data(), scales.data(), rows, columns, values);
      return;
    case WeightKind::kFp4Row:
      quant::fp4_row_quantize(values, rows, columns, codes.data(), scales.data());
      quant::fp4_row_dequantize(codes.data(), scales.data(), rows, columns, values);
      return;
    case WeightKind::kPlain:
      break;
  }
  if (spec.dtype == DType::kBF16) {
    for (size_t i = 0; i < n; ++i) {
      values[i] = round_bf16(values[i]);
    }
  }
}

template <class Real>
ParameterSet<Real>::ParameterSet(const model::ModelConfig& config) {
  model::ModelConfig plain = config;
  plain.storage = model::WeightStorage::kF32;
  std::unordered_map<std::string, TensorView> views;
  for (WeightSpec& spec : trained_table(plain)) {
    Parameter<Real>& parameter = parameters_.emplace_back();
    const auto n = static_cast<size_t>(spec.shape.elements());
    parameter.value.assign(n, Real{0});
    parameter.grad.assign(n, Real{0});
    parameter.spec = std::move(spec);
    by_data_[parameter.value.data()] = &parameter;
    views[parameter.spec.name] =
        TensorView(parameter.value.data(), DType::kF32, parameter.spec.shape);
  }
  model_.config = plain;
  model_.layers = model::layer_schedule(plain);
  model_.draft = model::draft_schedule(plain);
  model_.weights =
      model::resolve_weights(plain, [&](const std::string& name) { return views.at(name); });
  model_.engram = model::engram_constants(plain);
  model_.window_frequency = model::window_frequencies(plain);
  model_.compressed_frequency = model::compressed_frequencies(plain);
  for (int64_t id = 0; !model_.engram.empty() && id < plain.vocab_size; ++id) {
    model_.token_class.push_back(static_cast<int32_t>(id % plain.engram_compressed_vocab_size));
  }
}

template <class Real>
Result<std::unique_ptr<ParameterSet<Real>>> ParameterSet<Real>::create(
    const model::ModelConfig& config, std::vector<int32_t> token_class) {
  if (config.vision.num_hidden_layers > 0) {
    return error(Code::kUnimplemented,
                 "vision_config.num_hidden_layers is {}; the trainer has no vision stage",
                 config.vision.num_hidden_layers);
  }
  CACHALOT_RETURN_IF_ERROR(model::validate(config));
  auto set = std::make_unique<ParameterSet>(config);
  CACHALOT_TRY(set->model_,
               model::make_model(set->model_.config, set->model_.weights, std::move(token_class)));
  return set;
}

template <class Real>
Parameter<Real>& ParameterSet<Real>::named(std::string_view name) {
  for (Parameter<Real>& parameter : parameters_) {
    if (parameter.spec.name == name) {
      return parameter;
    }
  }
  CACHALOT_CHECK(false);
}

template <class Real>
void ParameterSet<Real>::zero_gradients(ThreadPool* pool) {
  parallel_tasks(pool, static_cast<int64_t>(parameters_.size()), [&](int64_t i) {
    std::vector<Real>& grad = parameters_[static_cast<size_t>(i)].grad;
    std::fill(grad.begin(), grad.end(), Real{0});
  });
}

template <class Real>
void ParameterSet<Real>::apply(const QuantSwitches& switches, ThreadPool* pool) {
  struct Piece {
    Parameter<Real>* parameter;
    int64_t first;  // row
  };
  std::vector<Piece> pieces;
  for (Parameter<Real>& parameter : parameters_) {
    if (!simulated(parameter.spec, switches)) {
      parameter.stored.clear();
      continue;
    }
    parameter.stored.resize(parameter.value.size());
    for (int64_t first = 0; first < parameter.rows(); first += kRoundRows) {
      pieces.push_back({&parameter, first});
    }
  }
  parallel_tasks(pool, static_cast<int64_t>(pieces.size()), [&](int64_t index) {
    const auto [parameter, first] = pieces[static_cast<size_t>(index)];
    const int64_t columns = parameter->columns();
    const int64_t count = std::min(kRoundRows, parameter->rows() - first);
    const Real* from = parameter->value.data() + first * columns;
    std::vector<float> values(from, from + count * columns);
    round_to_storage(parameter->spec, count, columns, values.data());
    std::copy(values.begin(), values.end(), parameter->stored.data() + first * columns);
  });
}

template class ParameterSet<float>;
template class ParameterSet<double>;

void initialize(ParameterSet<float>& parameters, uint64_t seed, bool free_mixing) {
  const model::ModelConfig& config = parameters.model().config;
  const auto depth = static_cast<double>(2 * config.num_hidden_layers);
  for (Parameter<float>& parameter : parameters.all()) {
    const WeightSpec& spec = parameter.spec;
    const auto in = static_cast<double>(parameter.columns());
    double deviation = 1.0 / std::sqrt(in);
    float mean = 0;
    switch (spec.role) {
      case WeightRole::kEmbedding:
        deviation = kEmbeddingDeviation;
        break;
      case WeightRole::kEngramTable:
        deviation = kTableDeviation;
        break;
      case WeightRole::kNorm:
      case WeightRole::kEngramGate:
        deviation = 0;
        mean = 1;
        break;
      case WeightRole::kHcScale:
        deviation = 0;
        mean = kHcScale;
        break;
      case WeightRole::kRouterBias:
      case WeightRole::kSink:
      case WeightRole::kHcBase:
        deviation = 0;
        break;
      case WeightRole::kProjection:
        if (spec.to_stream) {
          deviation /= std::sqrt(depth);
        }
        break;
      default:
        break;
    }
    const Philox random(seed, stream_of(spec.name));
    for (size_t i = 0; i < parameter.value.size(); ++i) {
      parameter.value[i] =
          mean + (deviation == 0 ? 0.0f : static_cast<float>(deviation * random.normal(i)));
    }
    if (spec.role == WeightRole::kHcBase) {
      const int64_t m = config.hc_mult;
      for (int64_t j = 0; j < m; ++j) {
        parameter.value[static_cast<size_t>(2 * m + j * m + j)] =
            free_mixing ? 1.0f : kCombDiagonal;
      }
    }
  }
}

}  // namespace cachalot::train
