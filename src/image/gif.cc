// GIF by giflib.
#include <gif_lib.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "base/format.h"
#include "image/decoders.h"

namespace cachalot::image {
namespace {

struct Input {
  std::span<const uint8_t> left;
  uint8_t last = 0;  // the byte before
};

int read_bytes(GifFileType* gif, GifByteType* to, int wanted) {
  auto& input = *static_cast<Input*>(gif->UserData);
  const size_t n = std::min(input.left.size(), static_cast<size_t>(wanted));
  if (n > 0) {
    std::memcpy(to, input.left.data(), n);
    input.last = input.left[n - 1];
    input.left = input.left.subspan(n);
  }
  return static_cast<int>(n);
}

Status failed(int code) {
  const char* text = GifErrorString(code);
  return invalid("{}", text != nullptr ? text : "damaged");
}

class Reader {
 public:
  static Result<Reader> open(std::span<const uint8_t> file) {
    Reader reader;
    reader.input_ = std::make_unique<Input>(Input{file});
    int code = 0;
    reader.gif_.reset(DGifOpen(reader.input_.get(), read_bytes, &code));
    if (reader.gif_ == nullptr) {
      return failed(code);
    }
    return reader;
  }

  // Of the canvas; a frame covers a part of it.
  Size size() const { return {gif_->SWidth, gif_->SHeight}; }

  Result<Pixels> first_frame() {
    GifRecordType type = UNDEFINED_RECORD_TYPE;
    do {
      if (DGifGetRecordType(gif_.get(), &type) == GIF_ERROR) {
        return failed(gif_->Error);
      }
      if (type == EXTENSION_RECORD_TYPE) {
        CACHALOT_RETURN_IF_ERROR(read_extension());
      }
    } while (type == EXTENSION_RECORD_TYPE);
    if (type != IMAGE_DESC_RECORD_TYPE || DGifGetImageDesc(gif_.get()) == GIF_ERROR) {
      return invalid("there is no frame");
    }
    return frame();
  }

 private:
  // Of the extensions only the transparent index of the frame counts.
  Status read_extension() {
    int code = 0;
    GifByteType* data = nullptr;  // a block: its length, its bytes
    int status = DGifGetExtension(gif_.get(), &code, &data);
    if (status == GIF_OK && code == GRAPHICS_EXT_FUNC_CODE && data != nullptr && data[0] >= 4 &&
        (data[1] & 1) != 0) {
      transparent_ = data[4];
    }
    while (status == GIF_OK && data != nullptr) {
      status = DGifGetExtensionNext(gif_.get(), &data);
    }
    return status == GIF_OK ? Status() : failed(gif_->Error);
  }

  Result<Pixels> frame() {
    const GifImageDesc& desc = gif_->Image;
    const ColorMapObject* colors = desc.ColorMap != nullptr ? desc.ColorMap : gif_->SColorMap;
    if (colors == nullptr) {
      return invalid("there is no palette");
    }
    if (desc.Left < 0 || desc.Top < 0 || desc.Width < 1 || desc.Height < 1 ||
        desc.Left + desc.Width > gif_->SWidth || desc.Top + desc.Height > gif_->SHeight) {
      return invalid("the first frame lies outside of the image");
    }
    Pixels out{size(),
               std::vector<uint8_t>(static_cast<size_t>(gif_->SWidth) *
                                    static_cast<size_t>(gif_->SHeight) * 3)};
    // What the frame does not cover. The background index of the file is ignored, as Pillow does.
    paint(std::vector<GifPixelType>(out.rgb.size() / 3, transparent_), *colors, out.rgb.data());
    const auto width = static_cast<size_t>(desc.Width);
    std::vector<GifPixelType> indices(width * static_cast<size_t>(desc.Height));
    CACHALOT_RETURN_IF_ERROR(read_indices(indices));
    auto row = indices.begin();
    // An interlaced frame comes in four passes of rows.
    constexpr int kBegin[] = {0, 4, 2, 1}, kStep[] = {8, 8, 4, 2};
    for (int pass = 0; pass < (desc.Interlace ? 4 : 1); ++pass) {
      const int begin = desc.Interlace ? kBegin[pass] : 0;
      const int step = desc.Interlace ? kStep[pass] : 1;
      for (int y = begin; y < desc.Height; y += step) {
        const auto at = (static_cast<size_t>(desc.Top + y) * static_cast<size_t>(gif_->SWidth) +
                         static_cast<size_t>(desc.Left)) *
                        3;
        paint({&*row, width}, *colors, out.rgb.data() + at);
        row += static_cast<std::ptrdiff_t>(width);
      }
    }
    return out;
  }

  // All pixels of the frame in the order of the file. giflib's own decoder makes some color of a
  // code that the data have not defined, so that a damaged image is shown as another one; here it
  // is an error. What stands behind the last pixel is not looked at.
  Status read_indices(std::span<GifPixelType> to) {
    constexpr int kCodes = 4096, kNone = -1;
    const int clear = 1 << input_->last;  // behind the descriptor stands the size of the codes
    std::vector<int> prefix(kCodes);
    std::vector<GifPixelType> suffix(kCodes), string;  // the string of a code from its end
    int next = clear + 2, last = kNone;
    for (size_t done = 0; done < to.size();) {
      int code = 0;
      if (DGifGetLZCodes(gif_.get(), &code) == GIF_ERROR) {
        return failed(gif_->Error);
      }
      if (code == kNone) {
        return invalid("the frame ends after {} of {} pixels", done, to.size());
      }
      if (code == clear) {
        next = clear + 2;
        last = kNone;
        continue;
      }
      if (code > (last == kNone ? clear : next)) {
        return invalid("the code {} at pixel {} is not defined", code, done);
      }
      string.clear();
      int at = code;
      if (code == next) {  // the last string and its own first index, which follows
        string.push_back(0);
        at = last;
      }
      for (; at > clear; at = prefix[static_cast<size_t>(at)]) {
        string.push_back(suffix[static_cast<size_t>(at)]);
      }
      const auto first = static_cast<GifPixelType>(at);
      string.push_back(first);
      if (code == next) {
        string.front() = first;
      }
      if (last != kNone && next < kCodes) {
        prefix[static_cast<size_t>(next)] = last;
        suffix[static_cast<size_t>(next)] = first;
        ++next;
      }
      last = code;
      const size_t n = std::min(string.size(), to.size() - done);
      std::copy_n(string.rbegin(), n, to.begin() + static_cast<std::ptrdiff_t>(done));
      done += n;
    }
    return {};
  }

  static void paint(std::span<const GifPixelType> row, const ColorMapObject& colors, uint8_t* rgb) {
    for (const GifPixelType index : row) {
      // An index behind the palette is black.
      const GifColorType color =
          index < colors.ColorCount ? colors.Colors[index] : GifColorType{0, 0, 0};
      *rgb++ = color.Red;
      *rgb++ = color.Green;
      *rgb++ = color.Blue;
    }
  }

  using Handle =
      std::unique_ptr<GifFileType, decltype([](GifFileType* gif) { DGifCloseFile(gif, nullptr); })>;
  std::unique_ptr<Input> input_;  // giflib holds its address
  Handle gif_;
  GifPixelType transparent_ = 0;  // 0 also where the frame has none
};

}  // namespace

const Decoder kGif = {[](std::span<const uint8_t> file) -> Result<Size> {
                        CACHALOT_TRY(const Reader reader, Reader::open(file));
                        return reader.size();
                      },
                      [](std::span<const uint8_t> file, Size) -> Result<Pixels> {
                        CACHALOT_TRY(Reader reader, Reader::open(file));
                        return reader.first_frame();
                      }};

}  // namespace cachalot::image
