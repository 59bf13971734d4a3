#include "train/corpus.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>

#include "base/file.h"
#include "base/format.h"
#include "base/rng.h"
#include "io/safetensors.h"
#include "text/chat.h"
#include "text/json_fields.h"

namespace cachalot::train {
namespace {

constexpr size_t kFileLimit = size_t{4} << 30;
// Pieces that compete for the space of open batches.
constexpr size_t kPackWindow = 1024;

std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    lines.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

bool is_blank(std::string_view line) {
  return line.find_first_not_of(" \t\r") == std::string_view::npos;
}

// The chat up to and with its last message; only what the assistant wrote there is learned.
Status render(text::Json& body,
              const text::Tokenizer& tokenizer,
              std::vector<int32_t>* tokens,
              std::vector<uint8_t>* learn) {
  CACHALOT_TRY(const text::ChatRequest whole, text::parse_chat_request(body));
  if (whole.messages.empty() || whole.messages.back().role != text::Role::kAssistant) {
    return invalid("messages must end with an assistant message");
  }
  text::ChatRequest prompt = whole;
  prompt.messages.pop_back();
  CACHALOT_TRY(const text::RenderedChat rendered, text::render_chat(whole));
  if (!rendered.images.empty()) {
    return invalid("{}: the trainer takes no images", rendered.images.front().field);
  }
  CACHALOT_TRY(*tokens, text::encode_prompt(tokenizer, rendered));
  CACHALOT_TRY(const std::vector<int32_t> before, text::encode_chat(tokenizer, prompt));
  learn->assign(tokens->size(), 1);
  const auto same = std::mismatch(before.begin(), before.end(), tokens->begin(), tokens->end());
  std::fill_n(learn->begin(), same.second - tokens->begin(), uint8_t{0});
  return {};
}

Result<std::vector<uint8_t>> read_marks(const text::Json& list, size_t count) {
  std::vector<uint8_t> marks;
  for (const text::Json& mark : list.items) {
    const std::optional<int64_t> value = mark.integer();
    if (value == 0 || value == 1) {
      marks.push_back(static_cast<uint8_t>(*value));
    }
  }
  if (!list.is_array() || marks.size() != count || list.items.size() != count) {
    return invalid("'learn' must hold {} times 0 or 1, one per token", count);
  }
  return marks;
}

// "I64 [3]", or "missing".
std::string shown(const TensorView* view) {
  return view == nullptr ? "missing"
                         : fmt::format("{} {}", dtype_name(view->dtype), to_string(view->shape));
}

// Elements [begin, end) of a view that may be misaligned.
template <class T>
std::vector<T> copied(const TensorView& view, int64_t begin, int64_t end) {
  std::vector<T> values(static_cast<size_t>(end - begin));
  if (!values.empty()) {
    const auto* bytes = static_cast<const uint8_t*>(view.data);
    std::memcpy(
        values.data(), bytes + begin * static_cast<int64_t>(sizeof(T)), values.size() * sizeof(T));
  }
  return values;
}

}  // namespace

Status Corpus::append(Document document, const DocumentTokens& control, const std::string& source) {
  for (int32_t id : document.tokens) {
    if (id < 0 || id >= control.vocab_size) {
      return invalid(
          "{}: token {} is outside of the vocabulary of {}", source, id, control.vocab_size);
    }
  }
  if (document.learn.empty()) {
    document.learn.assign(document.tokens.size(), 1);
  }
  tokens_.insert(tokens_.end(), document.tokens.begin(), document.tokens.end());
  learn_.insert(learn_.end(), document.learn.begin(), document.learn.end());
  begin_.push_back(static_cast<int64_t>(tokens_.size()));
  return {};
}

Status Corpus::add_lines(const std::string& path,
                         const text::Tokenizer& tokenizer,
                         const DocumentTokens& control,
                         ThreadPool& pool) {
  CACHALOT_TRY(const std::string content, read_file(path, kFileLimit));
  const std::vector<std::string_view> lines = lines_of(content);
  std::vector<Result<Document>> documents(lines.size(), Document{});
  pool.parallel_for_dynamic(
      static_cast<int64_t>(lines.size()), 16, [&](int64_t begin, int64_t end) {
        for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
          documents[i] = [&]() -> Result<Document> {
            Document document;
            if (is_blank(lines[i])) {
              return document;
            }
            CACHALOT_TRY(text::Json line, text::parse_json(lines[i], "the line"));
            if (!line.is_object()) {
              return text::must_be("the line", "an object", line);
            }
            const text::Json *text = line.find("text"), *ids = line.find("tokens");
            if (line.find("messages") != nullptr) {
              CACHALOT_RETURN_IF_ERROR(render(line, tokenizer, &document.tokens, &document.learn));
            } else if (text != nullptr && text->is_string()) {
              CACHALOT_TRY(document.tokens, tokenizer.encode(text->text));
              document.tokens.insert(document.tokens.begin(), control.bos);
              document.tokens.push_back(control.eos);
            } else if (ids != nullptr && ids->is_array()) {
              CACHALOT_TRY(document.tokens, text::token_ids(*ids, "tokens"));
              if (const text::Json* marks = line.find("learn")) {
                CACHALOT_TRY(document.learn, read_marks(*marks, document.tokens.size()));
              }
            } else {
              return invalid("needs 'text', 'tokens' or 'messages'");
            }
            return document;
          }();
        }
      });
  for (size_t i = 0; i < documents.size(); ++i) {
    if (is_blank(lines[i])) {
      continue;
    }
    const std::string source = fmt::format("{}:{}", path, i + 1);
    if (!documents[i].ok()) {
      return documents[i].status().with(source);
    }
    CACHALOT_RETURN_IF_ERROR(append(std::move(*documents[i]), control, source));
  }
  return {};
}

Status Corpus::add_shard(const std::string& path, const DocumentTokens& control) {
  CACHALOT_TRY(const io::SafetensorsFile file, io::SafetensorsFile::open(path));
  const TensorView *tokens = file.find("tokens"), *bounds = file.find("begin");
  if (tokens == nullptr || tokens->dtype != DType::kI32 || tokens->shape.rank != 1 ||
      bounds == nullptr || bounds->dtype != DType::kI64 || bounds->shape.rank != 1 ||
      bounds->dim(0) == 0) {
    return invalid("{}: needs 'tokens' I32 [N] and 'begin' I64 [documents + 1]; they are {} and {}",
                   path,
                   shown(tokens),
                   shown(bounds));
  }
  // Views of a file may be misaligned, so both are copied out.
  const int64_t total = tokens->dim(0);
  const std::vector<int64_t> begin = copied<int64_t>(*bounds, 0, bounds->dim(0));
  if (begin.front() != 0 || begin.back() != total) {
    return invalid("{}: 'begin' goes from {} to {}; it must cover the {} tokens",
                   path,
                   begin.front(),
                   begin.back(),
                   total);
  }
  for (size_t i = 0; i + 1 < begin.size(); ++i) {
    const int64_t first = begin[i], last = begin[i + 1];
    if (first < 0 || last < first || last > total) {
      return invalid("{}: document {} is [{}, {}) of {} tokens", path, i, first, last, total);
    }
    CACHALOT_RETURN_IF_ERROR(append({.tokens = copied<int32_t>(*tokens, first, last)},
                                    control,
                                    fmt::format("{}: document {}", path, i)));
  }
  return {};
}

Status Corpus::add(const std::string& path,
                   const text::Tokenizer& tokenizer,
                   const DocumentTokens& control,
                   ThreadPool& pool) {
  std::error_code failure;
  if (std::filesystem::is_directory(path, failure)) {
    std::vector<std::string> files;
    for (auto entry = std::filesystem::recursive_directory_iterator(path, failure);
         !failure && entry != std::filesystem::recursive_directory_iterator();
         entry.increment(failure)) {
      if (entry->is_regular_file(failure)) {
        files.push_back(entry->path().string());
      }
    }
    if (failure) {
      return error(Code::kUnavailable, "cannot list '{}': {}", path, failure.message());
    }
    std::sort(files.begin(), files.end());
    for (const std::string& file : files) {
      CACHALOT_RETURN_IF_ERROR(add(file, tokenizer, control, pool));
    }
    return {};
  }
  if (path.ends_with(".jsonl")) {
    return add_lines(path, tokenizer, control, pool);
  }
  if (path.ends_with(".safetensors")) {
    return add_shard(path, control);
  }
  CACHALOT_TRY(const std::string content, read_file(path, kFileLimit));
  Document document;
  CACHALOT_TRY(document.tokens, tokenizer.encode(content).with(path));
  document.tokens.insert(document.tokens.begin(), control.bos);
  document.tokens.push_back(control.eos);
  return append(std::move(document), control, path);
}

std::string Corpus::summary() const {
  uint64_t digest = 0xcbf29ce484222325;  // FNV-1a over whole elements
  const auto add = [&](const auto& values) {
    for (const auto value : values) {
      digest = (digest ^ static_cast<uint64_t>(value)) * 0x100000001b3;
    }
  };
  add(tokens_);
  add(learn_);
  add(begin_);
  return fmt::format("{} documents, {} tokens, digest {:016x}", documents(), tokens(), digest);
}

Sample Corpus::sample(int64_t document, int64_t begin, int64_t length) const {
  const auto at = static_cast<size_t>(begin_[static_cast<size_t>(document)] + begin);
  const auto n = static_cast<size_t>(length);
  return {std::span(tokens_).subspan(at, n), std::span(learn_).subspan(at, n)};
}

std::vector<std::vector<Piece>> plan_epoch(
    const Corpus& corpus, uint64_t seed, int64_t epoch, int64_t sequence, int64_t rows) {
  std::vector<Piece> pieces;
  const int64_t longest = std::min(sequence, rows);
  for (int64_t d = 0; d < corpus.documents(); ++d) {
    for (int64_t begin = 0; begin + 1 < corpus.length(d); begin += longest) {
      const int64_t length = std::min(longest, corpus.length(d) - begin);
      if (length > 1) {
        pieces.push_back({d, begin, length});
      }
    }
  }
  const auto shuffle = [&](auto& items, uint64_t stream) {
    const Philox random(seed, stream);
    for (size_t i = items.size(); i > 1; --i) {
      const auto j = static_cast<size_t>(random.uniform(i) * static_cast<double>(i));
      std::swap(items[i - 1], items[j]);
    }
  };
  const auto base = static_cast<uint64_t>(epoch) * 2;
  shuffle(pieces, base);
  // Best-fit: the longest pieces of a window first, each into the fullest batch that has room.
  std::vector<std::vector<Piece>> batches;
  std::multimap<int64_t, size_t> room;  // of open batches
  for (size_t first = 0; first < pieces.size(); first += kPackWindow) {
    const auto begin = pieces.begin() + static_cast<std::ptrdiff_t>(first);
    const auto end =
        pieces.begin() + static_cast<std::ptrdiff_t>(std::min(pieces.size(), first + kPackWindow));
    std::stable_sort(
        begin, end, [](const Piece& a, const Piece& b) { return a.length > b.length; });
    for (auto piece = begin; piece != end; ++piece) {
      auto open = room.lower_bound(piece->length);
      size_t index = batches.size();
      int64_t left = rows;
      if (open == room.end()) {
        batches.emplace_back();
      } else {
        left = open->first;
        index = open->second;
        room.erase(open);
      }
      batches[index].push_back(*piece);
      if (left - piece->length > 1) {
        room.emplace(left - piece->length, index);
      }
    }
  }
  shuffle(batches, base + 1);
  return batches;
}

Batch make_batch(const Corpus& corpus, std::span<const Piece> pieces) {
  std::vector<Sample> samples;
  for (const Piece& piece : pieces) {
    samples.push_back(corpus.sample(piece.document, piece.begin, piece.length));
  }
  return make_batch(samples);
}

}  // namespace cachalot::train
