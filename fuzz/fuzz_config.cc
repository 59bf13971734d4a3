// Any text as a config: what is accepted must be usable and survive being written and read again.
// A text "key=value" sets that value in a small preset instead.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "model/config.h"
#include "model/schedule.h"

namespace {

using cachalot::model::ModelConfig;

void use(const ModelConfig& config) {
  const auto layers = cachalot::model::layer_schedule(config);
  CACHALOT_CHECK(static_cast<int64_t>(layers.size()) == config.num_hidden_layers, layers.size());
  for (const cachalot::model::LayerSpec& layer : layers) {
    const bool has_source = layer.kv_source >= 0 && layer.index_source >= layer.kv_source;
    CACHALOT_CHECK(layer.ratio == 0 || has_source, layer.index);
  }
  const auto again =
      cachalot::model::parse_config(cachalot::model::config_to_json(config), "again");
  CACHALOT_CHECK(again.ok() && *again == config);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (!text.starts_with('{')) {
    ModelConfig config = *cachalot::model::preset_config("t1");
    if (cachalot::model::set_config_value(config, text).ok() &&
        cachalot::model::validate(config).ok()) {
      use(config);
    }
    return 0;
  }
  const auto config = cachalot::model::parse_config(text, "fuzz");
  if (config.ok()) {
    use(*config);
  } else {
    CACHALOT_CHECK(config.error().message().starts_with("fuzz: "));
  }
  return 0;
}
