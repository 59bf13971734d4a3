// PNG by libpng.
#include <png.h>

#include <csetjmp>
#include <cstring>
#include <string>

#include "base/format.h"
#include "image/decode.h"
#include "image/decoders.h"

namespace cachalot::image {
namespace {

// Ancillary chunks (texts, profiles) are not looked at; this bounds what libpng keeps of them.
constexpr png_alloc_size_t kMaxChunk = 1 << 20;
constexpr png_uint_32 kMaxChunks = 128;

// libpng reports an error by a jump out of its function; nothing with a destructor may live between
// here and there, so what a jump must not lose is a member.
class Reader {
 public:
  explicit Reader(std::span<const uint8_t> file) : left_(file) {
    png_ = png_create_read_struct(PNG_LIBPNG_VER_STRING, this, on_error, on_warning);
    if (png_ != nullptr) {
      info_ = png_create_info_struct(png_);
      png_set_read_fn(png_, this, on_read);
      png_set_user_limits(
          png_, static_cast<png_uint_32>(kMaxPixels), static_cast<png_uint_32>(kMaxPixels));
      png_set_chunk_malloc_max(png_, kMaxChunk);
      png_set_chunk_cache_max(png_, kMaxChunks);
    }
  }
  ~Reader() { png_destroy_read_struct(&png_, &info_, nullptr); }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  Result<Size> size() {
    if (!read_header()) {
      return invalid("{}", message_);
    }
    return Size{png_get_image_width(png_, info_), png_get_image_height(png_, info_)};
  }

  Result<Pixels> pixels(Size size) {
    if (!read_header()) {
      return invalid("{}", message_);
    }
    out_ = {size, std::vector<uint8_t>(static_cast<size_t>(size.width * size.height * 3))};
    if (!read_rows()) {
      return invalid("{}", message_);
    }
    return std::move(out_);
  }

 private:
  bool read_header() {
    if (png_ == nullptr || info_ == nullptr) {
      message_ = "no memory";
      return false;
    }
    if (setjmp(png_jmpbuf(png_)) != 0) {
      return false;
    }
    png_read_info(png_, info_);
    return true;
  }

  bool read_rows() {
    const auto stride = static_cast<size_t>(out_.size.width * 3);
    if (setjmp(png_jmpbuf(png_)) != 0) {
      return false;
    }
    png_set_palette_to_rgb(png_);
    png_set_expand_gray_1_2_4_to_8(png_);
    png_set_strip_16(png_);
    png_set_strip_alpha(png_);
    png_set_gray_to_rgb(png_);
    const int passes = png_set_interlace_handling(png_);
    png_read_update_info(png_, info_);
    if (png_get_rowbytes(png_, info_) != stride) {
      png_error(png_, "a row has another size than its pixels");
    }
    for (int pass = 0; pass < passes; ++pass) {
      for (int64_t row = 0; row < out_.size.height; ++row) {
        png_read_row(png_, out_.rgb.data() + static_cast<size_t>(row) * stride, nullptr);
      }
    }
    return true;
  }

  static void on_error(png_structp png, png_const_charp text) {
    static_cast<Reader*>(png_get_error_ptr(png))->message_ = text;
    png_longjmp(png, 1);
  }
  static void on_warning(png_structp, png_const_charp) {}
  static void on_read(png_structp png, png_bytep to, size_t bytes) {
    std::span<const uint8_t>& left = static_cast<Reader*>(png_get_io_ptr(png))->left_;
    if (bytes > left.size()) {
      png_error(png, "the file ends too early");
    }
    std::memcpy(to, left.data(), bytes);
    left = left.subspan(bytes);
  }

  std::span<const uint8_t> left_;
  png_structp png_ = nullptr;
  png_infop info_ = nullptr;
  Pixels out_;
  std::string message_;
};

}  // namespace

const Decoder kPng = {
    [](std::span<const uint8_t> file) { return Reader(file).size(); },
    [](std::span<const uint8_t> file, Size size) { return Reader(file).pixels(size); }};

}  // namespace cachalot::image
