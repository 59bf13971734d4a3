// JPEG by libjpeg-turbo: the accurate transform and smooth upsampling, its defaults, as Pillow has
// them.
#include <cstddef>
#include <cstdio>
// jpeglib.h needs the two above.
#include <jerror.h>
#include <jpeglib.h>

#include <array>
#include <csetjmp>

#include "base/format.h"
#include "image/decoders.h"

namespace cachalot::image {
namespace {

// A scan of a few bytes goes over the whole image, so the size of a file does not bound the time.
// libjpeg's script for a progressive file has 10 scans, with four inks 18, and encoders that search
// for the smallest file write no more; this is twice that.
constexpr int kMostScans = 36;

// libjpeg goes on after these with samples that it made up, or with a scan that changes nothing.
// Its other warnings are passed over, as Pillow does: cameras write stray bytes between markers.
bool is_damage(int warning) {
  return warning == JWRN_JPEG_EOF || warning == JWRN_HIT_MARKER ||
         warning == JWRN_BOGUS_PROGRESSION;
}

// Ink to light. Files with four inks hold them inverted, as Adobe began it.
void cmyk_to_rgb(std::span<const uint8_t> cmyk, uint8_t* rgb) {
  const auto product = [](int a, int b) {  // a b / 255, rounded
    const int t = a * b + 128;
    return ((t >> 8) + t) >> 8;
  };
  for (size_t i = 0; i * 4 < cmyk.size(); ++i) {
    const int light = cmyk[4 * i + 3];
    for (size_t c = 0; c < 3; ++c) {
      rgb[3 * i + c] = static_cast<uint8_t>(light - product(255 - cmyk[4 * i + c], light));
    }
  }
}

// libjpeg reports an error by a jump out of its function; nothing with a destructor may live
// between here and there, so what a jump must not lose is a member.
class Reader {
 public:
  explicit Reader(std::span<const uint8_t> file) : file_(file) {
    jpeg_.err = jpeg_std_error(&errors_);
    errors_.error_exit = on_error;
    errors_.emit_message = on_message;
    jpeg_.client_data = this;
    progress_.progress_monitor = on_progress;
  }
  ~Reader() { jpeg_destroy_decompress(&jpeg_); }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  Result<Size> size() {
    if (!read_header()) {
      return invalid("{}", message_.data());
    }
    return Size{jpeg_.image_width, jpeg_.image_height};
  }

  Result<Pixels> pixels(Size size) {
    if (!read_header()) {
      return invalid("{}", message_.data());
    }
    const bool inks = jpeg_.jpeg_color_space == JCS_CMYK || jpeg_.jpeg_color_space == JCS_YCCK;
    jpeg_.out_color_space = inks ? JCS_CMYK : JCS_RGB;
    out_ = {size, std::vector<uint8_t>(static_cast<size_t>(size.width * size.height * 3))};
    inks_.resize(inks ? static_cast<size_t>(size.width * 4) : 0);
    if (!read_rows()) {
      return invalid("{}", message_.data());
    }
    return std::move(out_);
  }

 private:
  bool read_header() {
    if (setjmp(jump_) != 0) {
      return false;
    }
    jpeg_create_decompress(&jpeg_);
    jpeg_.progress = &progress_;
    jpeg_mem_src(&jpeg_, file_.data(), file_.size());
    jpeg_read_header(&jpeg_, TRUE);
    return true;
  }

  bool read_rows() {
    if (setjmp(jump_) != 0) {
      return false;
    }
    jpeg_start_decompress(&jpeg_);
    while (jpeg_.output_scanline < jpeg_.output_height) {
      uint8_t* const rgb = out_.rgb.data() + size_t{jpeg_.output_scanline} * jpeg_.output_width * 3;
      JSAMPROW row = inks_.empty() ? rgb : inks_.data();
      jpeg_read_scanlines(&jpeg_, &row, 1);
      if (!inks_.empty()) {
        cmyk_to_rgb(inks_, rgb);
      }
    }
    jpeg_finish_decompress(&jpeg_);
    return true;
  }

  static void on_error(j_common_ptr jpeg) {
    Reader& reader = *static_cast<Reader*>(jpeg->client_data);
    jpeg->err->format_message(jpeg, reader.message_.data());
    std::longjmp(reader.jump_, 1);
  }
  // Negative levels are warnings.
  static void on_message(j_common_ptr jpeg, int level) {
    if (level < 0 && is_damage(jpeg->err->msg_code)) {
      on_error(jpeg);
    }
  }
  // Called for every row of blocks, also while the scans of a file are read in.
  static void on_progress(j_common_ptr jpeg) {
    Reader& reader = *static_cast<Reader*>(jpeg->client_data);
    if (reader.jpeg_.input_scan_number > kMostScans) {
      *fmt::format_to_n(reader.message_.data(),
                        reader.message_.size() - 1,
                        "the image has more than {} scans",
                        kMostScans)
           .out = '\0';
      std::longjmp(reader.jump_, 1);
    }
  }

  std::span<const uint8_t> file_;
  jpeg_decompress_struct jpeg_{};
  jpeg_error_mgr errors_{};
  jpeg_progress_mgr progress_{};
  std::jmp_buf jump_{};
  std::array<char, JMSG_LENGTH_MAX> message_{};
  Pixels out_;
  std::vector<uint8_t> inks_;  // of a row, if the file has four
};

}  // namespace

const Decoder kJpeg = {
    [](std::span<const uint8_t> file) { return Reader(file).size(); },
    [](std::span<const uint8_t> file, Size size) { return Reader(file).pixels(size); }};

}  // namespace cachalot::image
