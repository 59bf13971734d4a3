#include "text/tokenizer.h"

#include <algorithm>
#include <array>
#include <limits>
#include <unordered_map>
#include <utility>

#include "base/file.h"
#include "base/format.h"
#include "base/utf8.h"
#include "text/bpe.h"
#include "text/byte_level.h"
#include "text/control_tokens.h"
#include "text/json_tree.h"
#include "text/pretokenizer.h"

namespace cachalot::text {

using internal::Bpe;
using internal::PreTokenizer;
using internal::TokenBytes;

namespace {

constexpr size_t kMaxFileBytes = size_t{256} << 20;

// What a ByteLevel pre-tokenizer with use_regex cuts by (GPT-2's expression).
constexpr std::string_view kByteLevelExpression =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// The added tokens in the order of their bytes; a text's longest match is found by narrowing a
// range byte by byte.
class AddedTokens {
 public:
  void add(std::string content, int32_t id) { sorted_.emplace_back(std::move(content), id); }
  void seal() {
    std::sort(sorted_.begin(), sorted_.end());
    for (const auto& [content, id] : sorted_) {
      starts_[static_cast<uint8_t>(content[0])] = true;
    }
  }
  bool may_start(char c) const { return starts_[static_cast<uint8_t>(c)]; }

  // The longest added token at the start of `text`: its bytes and id, or {0, -1}.
  std::pair<size_t, int32_t> match(std::string_view text) const {
    std::pair<size_t, int32_t> longest = {0, -1};
    auto low = sorted_.begin();
    auto high = sorted_.end();
    for (size_t depth = 0; depth < text.size() && low != high; ++depth) {
      // Within the range all contents agree in the first `depth` bytes and are longer than that.
      const auto byte = static_cast<uint8_t>(text[depth]);
      const auto at = [depth](const auto& entry) {
        return static_cast<uint8_t>(entry.first[depth]);
      };
      low = std::partition_point(low, high, [&](const auto& e) { return at(e) < byte; });
      high = std::partition_point(low, high, [&](const auto& e) { return at(e) == byte; });
      if (low != high && low->first.size() == depth + 1) {
        longest = {depth + 1, low->second};
        ++low;
      }
    }
    return longest;
  }

  const std::pair<std::string, int32_t>* find(std::string_view content) const {
    const auto found = std::lower_bound(
        sorted_.begin(), sorted_.end(), content, [](const auto& entry, std::string_view value) {
          return entry.first < value;
        });
    return found != sorted_.end() && found->first == content ? &*found : nullptr;
  }

 private:
  std::vector<std::pair<std::string, int32_t>> sorted_;
  std::array<bool, 256> starts_{};
};

}  // namespace

struct Tokenizer::Data {
  TokenBytes tokens;
  std::vector<bool> control;
  AddedTokens added;
  std::vector<int32_t> verbatim;  // base tokens spelled outside the byte-level alphabet, ascending
  PreTokenizer pretokenizer;
  std::unique_ptr<Bpe> bpe;
  std::optional<int32_t> bos, eos, pad;
  int64_t longest = 1;
};

namespace {

// A value in a message, cut to a readable length; what has parts by its kind alone.
std::string shown(const Json* value) {
  constexpr size_t kLongest = 60;
  if (value == nullptr) {
    return "missing";
  }
  if (value->is_array() || value->is_object()) {
    return fmt::format("{} of {}", kind_name(value->kind), value->items.size());
  }
  std::string text = python_json(*value);
  if (text.size() > kLongest) {
    text.resize(kLongest);
    text += "...";
  }
  return text;
}

// Reads the parts of a tokenizer.json. Every message starts with the file and the field and says
// what is there.
class Loader {
 public:
  Loader(const Json& root, std::string_view source) : root_(root), source_(source) {}

  Status read_model();
  Status read_added_tokens();
  Status read_pretokenizer(PreTokenizer* out) const;
  Status check_rest() const;
  Status assign_ids();
  Result<std::unique_ptr<Bpe>> build_bpe() const;

  struct Token {
    std::string_view spelling;
    bool added = false;
  };
  const std::vector<Token>& tokens() const { return tokens_; }

 private:
  template <class... Args>
  Status wrong(fmt::format_string<Args...> text, Args&&... args) const {
    return invalid("{}: {}", source_, fmt::format(text, std::forward<Args>(args)...));
  }
  Status check_absent(const Json& object, std::string_view path, std::string_view key) const;
  Status check_false(const Json& object, std::string_view path, std::string_view key) const;
  Result<std::string_view> type_of(const Json& object, std::string_view path) const;
  Status read_split(const Json& split, const std::string& path, PreTokenizer* out) const;
  Status read_byte_level(const Json& level, const std::string& path, PreTokenizer* out) const;
  Result<std::pair<std::string_view, std::string_view>> merge_parts(size_t index) const;

  struct Added {
    std::string_view content;
    int64_t id;
  };

  const Json& root_;
  std::string_view source_;
  std::unordered_map<std::string_view, int32_t> vocab_;
  const Json* merges_ = nullptr;
  std::vector<Added> added_;
  std::vector<Token> tokens_;  // by id
};

// The component would change what text means; this reader has no equivalent.
Status Loader::check_absent(const Json& object, std::string_view path, std::string_view key) const {
  const Json* value = object.find(key);
  const bool absent =
      value == nullptr || value->is_null() || (value->is_string() && value->text.empty());
  return absent ? Status() : wrong("{}{} is {}; only null is supported", path, key, shown(value));
}

Status Loader::check_false(const Json& object, std::string_view path, std::string_view key) const {
  const Json* value = object.find(key);
  if (value == nullptr || (value->is(Json::Kind::kBool) && !value->flag)) {
    return {};
  }
  return wrong("{}{} is {}; it must be false", path, key, shown(value));
}

Result<std::string_view> Loader::type_of(const Json& object, std::string_view path) const {
  const Json* type = object.find("type");
  if (type == nullptr || !type->is_string()) {
    return object.is_object() ? wrong("{}.type is {}; it must be a string", path, shown(type))
                              : wrong("{} is {}; it must be an object", path, shown(&object));
  }
  return std::string_view(type->text);
}

Status Loader::read_model() {
  const Json* model = root_.find("model");
  if (model == nullptr || !model->is_object()) {
    return wrong("'model' is {}; it must be an object", shown(model));
  }
  CACHALOT_TRY(const std::string_view type, type_of(*model, "model"));
  if (type != "BPE") {
    return wrong("model.type '{}' is not supported; it must be 'BPE'", type);
  }
  for (const char* key :
       {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"}) {
    CACHALOT_RETURN_IF_ERROR(check_absent(*model, "model.", key));
  }
  for (const char* key : {"byte_fallback", "ignore_merges"}) {
    CACHALOT_RETURN_IF_ERROR(check_false(*model, "model.", key));
  }
  const Json* vocab = model->find("vocab");
  if (vocab == nullptr || !vocab->is_object()) {
    return wrong("model.vocab is {}; it must be an object", shown(vocab));
  }
  vocab_.reserve(vocab->items.size());
  for (size_t i = 0; i < vocab->items.size(); ++i) {
    const std::optional<int64_t> id = vocab->items[i].integer();
    if (!id || *id < 0 || *id > std::numeric_limits<int32_t>::max()) {
      return wrong("model.vocab['{}'] is {}; it must be an id in [0, {}]",
                   vocab->keys[i],
                   shown(&vocab->items[i]),
                   std::numeric_limits<int32_t>::max());
    }
    vocab_.emplace(vocab->keys[i], static_cast<int32_t>(*id));
  }
  merges_ = model->find("merges");
  if (merges_ == nullptr || !merges_->is_array()) {
    return wrong("model.merges is {}; it must be an array", shown(merges_));
  }
  return {};
}

Status Loader::read_added_tokens() {
  const Json* list = root_.find("added_tokens");
  if (list == nullptr || list->is_null()) {
    return {};
  }
  if (!list->is_array()) {
    return wrong("'added_tokens' is {}; it must be an array", shown(list));
  }
  for (size_t i = 0; i < list->items.size(); ++i) {
    const Json& entry = list->items[i];
    const std::string path = fmt::format("added_tokens[{}].", i);
    const Json* content = entry.find("content");
    const Json* id_value = entry.find("id");
    if (content == nullptr || !content->is_string() || content->text.empty()) {
      return wrong("{}content is {}; it must be a string that is not empty", path, shown(content));
    }
    const std::optional<int64_t> id =
        id_value != nullptr ? id_value->integer() : std::optional<int64_t>();
    if (!id || *id < 0) {
      return wrong("{}id is {}; it must be an integer of at least 0", path, shown(id_value));
    }
    for (const char* key : {"single_word", "lstrip", "rstrip"}) {
      CACHALOT_RETURN_IF_ERROR(check_false(entry, path, key));
    }
    added_.push_back({content->text, *id});
  }
  return {};
}

Status Loader::assign_ids() {
  size_t count = vocab_.size();
  for (const Added& token : added_) {
    count += vocab_.count(token.content) == 0 ? 1 : 0;
  }
  tokens_.resize(count);
  const auto place = [&](std::string_view spelling, int64_t id, bool added) -> Status {
    if (id >= static_cast<int64_t>(count)) {
      return wrong("token '{}' has id {}, but {} tokens must have the ids 0..{}",
                   spelling,
                   id,
                   count,
                   static_cast<int64_t>(count) - 1);
    }
    Token& token = tokens_[static_cast<size_t>(id)];
    const bool in_vocab = !token.spelling.empty() && token.spelling == spelling && !token.added;
    if (!token.spelling.empty() && !(added && in_vocab)) {
      return wrong("the tokens '{}' and '{}' both have id {}", token.spelling, spelling, id);
    }
    token = {spelling, added};
    return {};
  };
  for (const auto& [spelling, id] : vocab_) {
    if (spelling.empty()) {
      return wrong("model.vocab has an empty token, with the id {}", id);
    }
    CACHALOT_RETURN_IF_ERROR(place(spelling, id, false));
  }
  for (const Added& token : added_) {
    const auto base = vocab_.find(token.content);
    if (base != vocab_.end() && base->second != token.id) {
      return wrong("added token '{}' has id {}, but {} in model.vocab",
                   token.content,
                   token.id,
                   base->second);
    }
    CACHALOT_RETURN_IF_ERROR(place(token.content, token.id, true));
  }
  return {};
}

Result<std::pair<std::string_view, std::string_view>> Loader::merge_parts(size_t index) const {
  const Json& merge = merges_->items[index];
  if (merge.is_array() && merge.items.size() == 2 && merge.items[0].is_string() &&
      merge.items[1].is_string()) {
    return std::pair<std::string_view, std::string_view>(merge.items[0].text, merge.items[1].text);
  }
  if (merge.is_string()) {
    const std::string_view text = merge.text;
    const size_t space = text.find(' ');
    if (space != std::string_view::npos && text.find(' ', space + 1) == std::string_view::npos) {
      return std::pair(text.substr(0, space), text.substr(space + 1));
    }
  }
  return wrong("model.merges[{}] is {}; it must be two tokens: \"a b\" or [\"a\", \"b\"]",
               index,
               shown(&merge));
}

Result<std::unique_ptr<Bpe>> Loader::build_bpe() const {
  std::array<int32_t, 256> byte_ids{};
  for (int b = 0; b < 256; ++b) {
    const char byte = static_cast<char>(b);
    const auto found = vocab_.find(internal::to_byte_level({&byte, 1}));
    if (found == vocab_.end()) {
      return wrong("model.vocab has no token for the byte 0x{:02X}", b);
    }
    byte_ids[static_cast<size_t>(b)] = found->second;
  }
  auto bpe = std::make_unique<Bpe>(byte_ids.data(), merges_->items.size());
  std::string merged;
  for (size_t i = 0; i < merges_->items.size(); ++i) {
    CACHALOT_TRY(const auto parts, merge_parts(i));
    merged.assign(parts.first).append(parts.second);
    int32_t ids[3];
    size_t n = 0;
    for (const std::string_view part : {parts.first, parts.second, std::string_view(merged)}) {
      const auto found = vocab_.find(part);
      if (found == vocab_.end()) {
        return wrong("model.merges[{}] uses '{}', which is not in model.vocab", i, part);
      }
      ids[n++] = found->second;
    }
    bpe->add_merge(ids[0], ids[1], static_cast<int32_t>(i), ids[2]);
  }
  return bpe;
}

Status Loader::read_split(const Json& split, const std::string& path, PreTokenizer* out) const {
  const Json* pattern = split.find("pattern");
  const Json* regex = pattern != nullptr ? pattern->find("Regex") : nullptr;
  if (regex == nullptr || !regex->is_string()) {
    return wrong("{}.pattern is {}; it must be {{\"Regex\": \"...\"}}", path, shown(pattern));
  }
  const Json* behavior = split.find("behavior");
  if (behavior == nullptr || !behavior->is_string() || behavior->text != "Isolated") {
    return wrong("{}.behavior is {}; it must be 'Isolated'", path, shown(behavior));
  }
  CACHALOT_RETURN_IF_ERROR(check_false(split, path + ".", "invert"));
  return out->add(regex->text, fmt::format("{}: {}.pattern.Regex", source_, path));
}

Status Loader::read_byte_level(const Json& level,
                               const std::string& path,
                               PreTokenizer* out) const {
  CACHALOT_RETURN_IF_ERROR(check_false(level, path + ".", "add_prefix_space"));
  const Json* use_regex = level.find("use_regex");
  if (use_regex != nullptr && !use_regex->is(Json::Kind::kBool)) {
    return wrong("{}.use_regex is {}; it must be a boolean", path, shown(use_regex));
  }
  if (use_regex == nullptr || use_regex->flag) {  // absent means true
    return out->add(kByteLevelExpression, path);
  }
  return {};
}

Status Loader::read_pretokenizer(PreTokenizer* out) const {
  const Json* root = root_.find("pre_tokenizer");
  if (root == nullptr || !root->is_object()) {
    return wrong("'pre_tokenizer' is {}; it must be an object", shown(root));
  }
  CACHALOT_TRY(const std::string_view root_type, type_of(*root, "pre_tokenizer"));
  if (root_type == "ByteLevel") {
    return read_byte_level(*root, "pre_tokenizer", out);
  }
  if (root_type != "Sequence") {
    return wrong("pre_tokenizer.type '{}' is not supported; 'Sequence' and 'ByteLevel' are",
                 root_type);
  }
  const Json* list = root->find("pretokenizers");
  if (list == nullptr || !list->is_array() || list->items.empty()) {
    return wrong("pre_tokenizer.pretokenizers is {}; it must be an array that is not empty",
                 shown(list));
  }
  for (size_t i = 0; i < list->items.size(); ++i) {
    const std::string path = fmt::format("pre_tokenizer.pretokenizers[{}]", i);
    const bool last = i + 1 == list->items.size();
    CACHALOT_TRY(const std::string_view type, type_of(list->items[i], path));
    if (type == "Split" && !last) {
      CACHALOT_RETURN_IF_ERROR(read_split(list->items[i], path, out));
    } else if (type == "ByteLevel" && last) {
      CACHALOT_RETURN_IF_ERROR(read_byte_level(list->items[i], path, out));
    } else {
      return wrong(
          "{}.type '{}' is not supported here; 'Split' entries and one final 'ByteLevel' are",
          path,
          type);
    }
  }
  return {};
}

Status Loader::check_rest() const {
  for (const char* key : {"truncation", "padding"}) {
    CACHALOT_RETURN_IF_ERROR(check_absent(root_, "", key));
  }
  const Json* normalizer = root_.find("normalizer");
  const Json* normalizers = normalizer != nullptr ? normalizer->find("normalizers") : nullptr;
  const bool empty_sequence =
      normalizers != nullptr && normalizers->is_array() && normalizers->items.empty();
  if (normalizer != nullptr && !normalizer->is_null() && !empty_sequence) {
    const Json* type = normalizer->find("type");
    return wrong("normalizer {} is not supported; only null is",
                 shown(type != nullptr ? type : normalizer));
  }
  // A ByteLevel post-processor only adjusts character offsets.
  const Json* post = root_.find("post_processor");
  if (post != nullptr && !post->is_null()) {
    CACHALOT_TRY(const std::string_view type, type_of(*post, "post_processor"));
    if (type != "ByteLevel") {
      return wrong("post_processor.type '{}' is not supported; 'ByteLevel' is", type);
    }
  }
  const Json* decoder = root_.find("decoder");
  if (decoder == nullptr || !decoder->is_object()) {
    return wrong("'decoder' is {}; it must be an object", shown(decoder));
  }
  CACHALOT_TRY(const std::string_view type, type_of(*decoder, "decoder"));
  if (type != "ByteLevel") {
    return wrong("decoder.type '{}' is not supported; 'ByteLevel' is", type);
  }
  return {};
}

}  // namespace

Tokenizer::Tokenizer(std::unique_ptr<Data> data) : data_(std::move(data)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Result<Tokenizer> Tokenizer::load(const std::string& path) {
  CACHALOT_TRY(const std::string json, read_file(path, kMaxFileBytes));
  return parse(json, path);
}

Result<Tokenizer> Tokenizer::parse(std::string_view json, std::string_view source) {
  CACHALOT_TRY(const Json root, parse_json(json, source));
  if (!root.is_object()) {
    return invalid("{}: the document is {}; it must be an object", source, shown(&root));
  }
  auto data = std::make_unique<Data>();
  Loader loader(root, source);
  CACHALOT_RETURN_IF_ERROR(loader.check_rest());
  CACHALOT_RETURN_IF_ERROR(loader.read_model());
  CACHALOT_RETURN_IF_ERROR(loader.read_added_tokens());
  CACHALOT_RETURN_IF_ERROR(loader.assign_ids());
  CACHALOT_RETURN_IF_ERROR(loader.read_pretokenizer(&data->pretokenizer));
  CACHALOT_TRY(data->bpe, loader.build_bpe());

  std::vector<int32_t> from_text;
  for (const Loader::Token& token : loader.tokens()) {
    const int32_t id = data->tokens.size();
    data->control.push_back(token.added);
    if (token.added) {
      data->tokens.append(token.spelling);
      data->added.add(std::string(token.spelling), id);
    } else if (const auto bytes = internal::from_byte_level(token.spelling)) {
      data->tokens.append(*bytes);
      from_text.push_back(id);
    } else {
      // It stands for its own spelling, as in the reference decoder. Nothing encodes to it.
      data->tokens.append(token.spelling);
      data->verbatim.push_back(id);
    }
  }
  data->added.seal();
  data->bpe->index_tokens(&data->tokens, from_text);
  const auto control = [&](std::string_view token) -> std::optional<int32_t> {
    const auto* found = data->added.find(token);
    return found != nullptr ? std::optional(found->second) : std::nullopt;
  };
  data->bos = control(kBosToken);
  data->eos = control(kEosToken);
  data->pad = control(kPadToken);
  for (int32_t id = 0; id < data->tokens.size(); ++id) {
    data->longest = std::max(data->longest, std::ssize(data->tokens[id]));
  }
  return Tokenizer(std::move(data));
}

Status Tokenizer::append_encoded(std::string_view text, std::vector<int32_t>* ids) const {
  const PreTokenizer::PieceSink encode_piece = [&](std::string_view piece) {
    data_->bpe->encode(piece, ids);
  };
  // The expressions need well-formed text. Runs of other bytes are pieces of their own.
  while (!text.empty()) {
    size_t good = 0;
    while (good < text.size()) {
      const int length = utf8_sequence_length(text.substr(good));
      if (length == 0) {
        break;
      }
      good += static_cast<size_t>(length);
    }
    CACHALOT_RETURN_IF_ERROR(data_->pretokenizer.split(text.substr(0, good), encode_piece));
    text.remove_prefix(good);
    size_t bad = 0;
    while (bad < text.size() && utf8_sequence_length(text.substr(bad)) == 0) {
      ++bad;
    }
    data_->bpe->encode(text.substr(0, bad), ids);
    text.remove_prefix(bad);
  }
  return {};
}

Result<std::vector<int32_t>> Tokenizer::encode(std::string_view text) const {
  std::vector<int32_t> ids;
  CACHALOT_RETURN_IF_ERROR(append_encoded(text, &ids));
  return ids;
}

Result<std::vector<int32_t>> Tokenizer::encode_with_specials(std::string_view text) const {
  std::vector<int32_t> ids;
  size_t plain = 0;
  for (size_t i = 0; i < text.size();) {
    if (!data_->added.may_start(text[i])) {
      ++i;
      continue;
    }
    const auto [length, id] = data_->added.match(text.substr(i));
    if (length == 0) {
      ++i;
      continue;
    }
    CACHALOT_RETURN_IF_ERROR(append_encoded(text.substr(plain, i - plain), &ids));
    ids.push_back(id);
    i += length;
    plain = i;
  }
  CACHALOT_RETURN_IF_ERROR(append_encoded(text.substr(plain), &ids));
  return ids;
}

int32_t Tokenizer::vocab_size() const {
  return data_->tokens.size();
}

std::string_view Tokenizer::token_bytes(int32_t id) const {
  return id >= 0 && id < vocab_size() ? data_->tokens[id] : std::string_view();
}

int64_t Tokenizer::longest_token() const {
  return data_->longest;
}

std::string Tokenizer::token_string(int32_t id) const {
  const std::string_view bytes = token_bytes(id);
  if (is_control(id)) {
    return std::string(bytes);
  }
  const std::vector<int32_t>& verbatim = data_->verbatim;
  const bool as_is = std::binary_search(verbatim.begin(), verbatim.end(), id);
  return as_is ? std::string(bytes) : internal::to_byte_level(bytes);
}

std::optional<int32_t> Tokenizer::id_of(std::string_view token) const {
  if (const auto* found = data_->added.find(token)) {
    return found->second;
  }
  if (const std::optional<std::string> bytes = internal::from_byte_level(token)) {
    const int32_t id = data_->bpe->find_token(*bytes);
    return id >= 0 ? std::optional(id) : std::nullopt;
  }
  for (const int32_t id : data_->verbatim) {
    if (data_->tokens[id] == token) {
      return id;
    }
  }
  return std::nullopt;
}

bool Tokenizer::is_control(int32_t id) const {
  return id >= 0 && id < vocab_size() && data_->control[static_cast<size_t>(id)];
}

Result<int32_t> Tokenizer::control_id(std::string_view token) const {
  const auto* found = data_->added.find(token);
  if (found == nullptr) {
    return error(Code::kNotFound, "the tokenizer has no control token '{}'", token);
  }
  return found->second;
}

std::optional<int32_t> Tokenizer::bos_id() const {
  return data_->bos;
}
std::optional<int32_t> Tokenizer::eos_id() const {
  return data_->eos;
}
std::optional<int32_t> Tokenizer::pad_id() const {
  return data_->pad;
}

}  // namespace cachalot::text
