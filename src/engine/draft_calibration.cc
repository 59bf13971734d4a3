#include "engine/draft_calibration.h"

#include <filesystem>

#include "base/file.h"
#include "base/format.h"
#include "model/checkpoint.h"
#include "text/json_fields.h"

namespace cachalot::engine {

Result<std::vector<double>> read_draft_calibration(const std::string& directory, int64_t block) {
  const std::string path = directory + "/" + model::kDraftCalibrationFile;
  std::error_code code;
  if (!std::filesystem::exists(path, code)) {
    return std::vector<double>(static_cast<size_t>(block), 1.0);
  }
  CACHALOT_TRY(const std::string json, read_file(path));
  const std::string source = fmt::format("'{}'", path);
  CACHALOT_TRY(const text::Json document, text::parse_json(json, source));
  if (!document.is_object()) {
    return text::must_be(source, "an object", document);
  }
  CACHALOT_TRY(const text::Json* array, text::array_field(document, source, "temperatures"));
  const int64_t count = array == nullptr ? 0 : static_cast<int64_t>(array->items.size());
  if (count != block) {
    return invalid("{}: temperatures has {} values, dspark_block_size is {}", source, count, block);
  }
  std::vector<double> temperatures;
  for (const text::Json& item : array->items) {
    const double value = item.number().value_or(0);
    // Beyond these bounds it is no calibration: every confidence would be 0.5, or 0 or 1.
    if (!(value >= 0.01 && value <= 100)) {
      return invalid("{}: temperatures[{}] is {}, must be a number in [0.01, 100]",
                     source,
                     temperatures.size(),
                     text::python_json(item));
    }
    temperatures.push_back(value);
  }
  return temperatures;
}

}  // namespace cachalot::engine
