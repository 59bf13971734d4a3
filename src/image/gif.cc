// GIF by giflib.
#include <gif_lib.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "base/format.h"
#include "image/decoders.h"

namespace cachalot::image {
namespace {

int read_bytes(GifFileType* gif, GifByteType* to, int wanted) {
  auto& left = *static_cast<std::span<const uint8_t>*>(gif->UserData);
  const size_t n = std::min(left.size(), static_cast<size_t>(wanted));
  std::memcpy(to, left.data(), n);
  left = left.subspan(n);
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
    reader.left_ = std::make_unique<std::span<const uint8_t>>(file);
    int code = 0;
    reader.gif_.reset(DGifOpen(reader.left_.get(), read_bytes, &code));
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
    std::vector<GifPixelType> row(static_cast<size_t>(desc.Width));
    // An interlaced frame comes in four passes of rows.
    constexpr int kBegin[] = {0, 4, 2, 1}, kStep[] = {8, 8, 4, 2};
    for (int pass = 0; pass < (desc.Interlace ? 4 : 1); ++pass) {
      const int begin = desc.Interlace ? kBegin[pass] : 0;
      const int step = desc.Interlace ? kStep[pass] : 1;
      for (int y = begin; y < desc.Height; y += step) {
        if (DGifGetLine(gif_.get(), row.data(), desc.Width) == GIF_ERROR) {
          return failed(gif_->Error);
        }
        const auto at = (static_cast<size_t>(desc.Top + y) * static_cast<size_t>(gif_->SWidth) +
                         static_cast<size_t>(desc.Left)) *
                        3;
        paint(row, *colors, out.rgb.data() + at);
      }
    }
    return out;
  }

  static void paint(const std::vector<GifPixelType>& row,
                    const ColorMapObject& colors,
                    uint8_t* rgb) {
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
  std::unique_ptr<std::span<const uint8_t>> left_;  // giflib holds its address
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
