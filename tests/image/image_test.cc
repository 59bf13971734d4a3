#include <gtest/gtest.h>
#include <openssl/evp.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>

#include "base/file.h"
#include "image/data_url.h"
#include "image/decode.h"
#include "image/picture.h"
#include "image/resize.h"

namespace cachalot::image {
namespace {

using nlohmann::json;

constexpr Geometry kReleased = {.patch = 14, .cell = 3, .min_pixels = 295936, .max_slots = 1024};

// What tools/image_golden.py wrote.
const std::string kGolden = CACHALOT_SOURCE_DIR "/tests/image/golden/";

std::vector<uint8_t> golden_file(const std::string& name) {
  const Result<std::string> bytes = read_file(kGolden + name);
  EXPECT_TRUE(bytes.ok()) << name;
  return {bytes->begin(), bytes->end()};
}

json expected(const char* key) {
  json list = json::parse(*read_file(kGolden + "expected.json")).at(key);
  EXPECT_FALSE(list.empty()) << key;
  return list;
}

std::string sha256(const std::vector<uint8_t>& bytes) {
  uint8_t digest[32];
  EVP_Digest(bytes.data(), bytes.size(), digest, nullptr, EVP_sha256(), nullptr);
  std::string text;
  for (const uint8_t byte : digest) {
    constexpr char kDigits[] = "0123456789abcdef";
    text += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return text;
}

Geometry geometry_of(const json& list) {
  return {.patch = list[0], .cell = list[1], .min_pixels = list[2], .max_slots = list[3]};
}

Size size_of(const json& list) {
  return {list[0], list[1]};
}

// The pattern of tools/image_golden.py.
Pixels pattern(Size size) {
  Pixels out{size, std::vector<uint8_t>(static_cast<size_t>(size.width * size.height * 3))};
  uint32_t state = 12345;
  for (size_t i = 0; i < out.rgb.size(); ++i) {
    state = (state * 1103515245u + 12345u) & 0x7FFFFFFF;
    out.rgb[i] = static_cast<uint8_t>(i % 8 != 0 ? state >> 16 : (state & 0x10000) != 0 ? 255 : 0);
  }
  return out;
}

TEST(Decode, FilesOfEveryFormatAreAsPillowReadsThem) {
  for (const json& entry : expected("decode")) {
    const std::string name = entry["file"];
    const Result<Pixels> pixels = decode(golden_file(name));
    ASSERT_TRUE(pixels.ok()) << name << ": " << pixels.error().message();
    EXPECT_EQ(pixels->size, size_of(entry["size"])) << name;
    EXPECT_EQ(sha256(pixels->rgb), entry["sha256"].get<std::string>()) << name;
    EXPECT_EQ(*read_size(golden_file(name)), pixels->size) << name;
  }
}

TEST(Decode, DamagedFilesAreRefused) {
  for (const json& entry : expected("decode")) {
    const std::string name = entry["file"];
    std::vector<uint8_t> file = golden_file(name);
    for (const size_t left : {file.size() / 2, size_t{20}, size_t{8}, size_t{3}}) {
      file.resize(left);
      const Result<Pixels> pixels = decode(file);
      ASSERT_FALSE(pixels.ok()) << name << " of " << left << " bytes";
      EXPECT_EQ(pixels.error().code(), Code::kInvalidArgument) << name;
    }
  }
  EXPECT_EQ(decode({}).error().message(), "not a JPEG, PNG, WebP or GIF image");
}

std::string error_of(const std::vector<uint8_t>& file) {
  const Result<Pixels> pixels = decode(file);
  return pixels.ok() ? "none" : pixels.error().message();
}

// The places of a marker in a JPEG file.
std::vector<std::ptrdiff_t> find_marker(const std::vector<uint8_t>& file, uint8_t marker) {
  std::vector<std::ptrdiff_t> places;
  for (size_t i = 0; i + 1 < file.size(); ++i) {
    if (file[i] == 0xFF && file[i + 1] == marker) {
      places.push_back(static_cast<std::ptrdiff_t>(i));
    }
  }
  return places;
}

constexpr uint8_t kEndOfImage = 0xD9, kTables = 0xDB, kHuffmanTable = 0xC4, kScan = 0xDA;

void append(std::vector<uint8_t>& file, std::initializer_list<int> bytes) {
  for (const int byte : bytes) {
    file.push_back(static_cast<uint8_t>(byte));
  }
}

// Behind the header of its only scan.
std::ptrdiff_t begin_of_data(const std::vector<uint8_t>& file) {
  const std::ptrdiff_t scan = find_marker(file, kScan).at(0);
  return scan + 2 + file[static_cast<size_t>(scan) + 3];
}

// A code that the data have not defined stands for no pixels: another image would be shown. Pillow
// refuses the same files.
TEST(Gif, UndefinedCodesAreRefused) {
  const std::vector<uint8_t> whole = golden_file("plain.gif");
  for (const auto& [at, value] :
       {std::pair<size_t, uint8_t>{74, 224}, {78, 116}, {80, 102}, {81, 249}}) {
    std::vector<uint8_t> file = whole;
    file[at] = value;
    EXPECT_NE(error_of(file).find("is not defined"), std::string::npos) << at << error_of(file);
  }
  std::vector<uint8_t> file = whole;
  file[6] = file[66] = 24;  // a wider canvas and frame than there are pixels for
  EXPECT_EQ(error_of(file), "GIF: the frame ends after 391 of 408 pixels");
  // The image is whole without what stands behind its last pixel.
  file = whole;
  file.resize(whole.size() - 2);
  ASSERT_EQ(error_of(file), "none");
  EXPECT_EQ(decode(file)->rgb, decode(whole)->rgb);
}

TEST(Jpeg, DataThatIsMissingBeforeTheEndMarkerIsRefused) {
  const std::string missing = "JPEG: Corrupt JPEG data: premature end of data segment";
  const std::vector<uint8_t> whole = golden_file("420.jpg");
  for (const std::ptrdiff_t kept : {0, 100, 300}) {
    std::vector<uint8_t> file = whole;
    file.resize(static_cast<size_t>(begin_of_data(file) + kept));
    append(file, {0xFF, kEndOfImage});
    EXPECT_EQ(error_of(file), missing) << kept;
    // Also behind a warning that is none of damage, of which libjpeg tells the first alone.
    const auto stray = file.begin() + find_marker(file, kTables).at(0);
    file.insert(stray, {0x12, 0x34});
    EXPECT_EQ(error_of(file), missing) << kept;
  }
}

TEST(Jpeg, AnErrorBehindAWarningIsNoWarning) {
  std::vector<uint8_t> whole = golden_file("progressive.jpg");
  // The tables of the second scan stand behind the data of the first.
  const std::ptrdiff_t first = find_marker(whole, kScan).at(0);
  const std::vector<std::ptrdiff_t> tables = find_marker(whole, kHuffmanTable);
  const auto second = std::ranges::upper_bound(tables, first);
  ASSERT_NE(second, tables.end());
  whole.insert(whole.begin() + *second, {0x12, 0x34});
  EXPECT_EQ(error_of(whole), "none");
  for (const size_t percent : {40u, 50u, 60u, 70u, 80u, 90u}) {
    std::vector<uint8_t> file = whole;
    file.resize(whole.size() * percent / 100);
    EXPECT_EQ(error_of(file), "JPEG: Premature end of JPEG file") << percent;
  }
}

TEST(Jpeg, AScanThatComesAgainIsRefused) {
  std::vector<uint8_t> file = golden_file("progressive.jpg");
  const std::vector<uint8_t> last(file.begin() + find_marker(file, kScan).back(), file.end() - 2);
  file.insert(file.end() - 2, last.begin(), last.end());
  EXPECT_TRUE(error_of(file).starts_with("JPEG: Inconsistent progression sequence"))
      << error_of(file);
}

TEST(Jpeg, ManyScansAreRefused) {
  // The first scan of a file, then one for each coefficient of the luma that says: no block has
  // any.
  std::vector<uint8_t> start = golden_file("progressive.jpg");
  const std::ptrdiff_t first = find_marker(start, kScan).at(0);
  const std::vector<std::ptrdiff_t> tables = find_marker(start, kHuffmanTable);
  start.resize(static_cast<size_t>(*std::ranges::upper_bound(tables, first)));
  // A table whose one code, a bit, is the end of a block.
  append(start,
         {0xFF, kHuffmanTable, 0, 20, 0x10, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0});
  const auto with_scans = [&](int scans) {
    std::vector<uint8_t> file = start;
    for (int k = 1; k < scans; ++k) {
      append(file, {0xFF, kScan, 0, 8, 1, 1, 0, k, k, 0});
      append(file, {0, 0, 0, 3});  // 6 x 5 blocks
    }
    append(file, {0xFF, kEndOfImage});
    return file;
  };
  EXPECT_EQ(error_of(with_scans(36)), "none");
  EXPECT_EQ(error_of(with_scans(37)), "JPEG: the image has more than 36 scans");
  EXPECT_EQ(error_of(with_scans(64)), "JPEG: the image has more than 36 scans");
}

TEST(Decode, ImagesBeyondTheLimitsAreRefusedByTheirHeader) {
  std::vector<uint8_t> file = golden_file("rgb.png");
  const auto set = [&](size_t at, uint32_t value) {
    for (size_t i = 0; i < 4; ++i) {
      file[at + i] = static_cast<uint8_t>(value >> (24 - 8 * i));
    }
  };
  set(16, 10'000);
  set(20, 5'001);
  // A header's own checksum is checked before its size.
  uint32_t crc = 0xFFFFFFFF;
  for (size_t i = 12; i < 29; ++i) {
    crc ^= file[i];
    for (int bit = 0; bit < 8; ++bit) {
      crc = crc >> 1 ^ (0xEDB88320 & (0 - (crc & 1)));
    }
  }
  set(29, ~crc);
  EXPECT_EQ(decode(file).error().message(),
            "PNG: the image has 10000 x 5001 pixels, at most 50 million are taken");
  file = golden_file("rgb.png");
  file.resize(kMaxFileBytes + 1);
  EXPECT_EQ(decode(file).error().message(),
            "the image file has 20000001 bytes, at most 20000000 are taken");
}

TEST(Resize, HasPillowsBits) {
  for (const json& entry : expected("resize")) {
    const Pixels out = resize(pattern(size_of(entry["from"])), size_of(entry["to"]));
    EXPECT_EQ(out.size, size_of(entry["to"]));
    EXPECT_EQ(sha256(out.rgb), entry["sha256"].get<std::string>()) << entry;
  }
}

TEST(Fit, SizesOfTheReleasedModel) {
  struct Row {
    Size image, box;
    int64_t columns, rows, slots;
    Size content;
  };
  constexpr Row kRows[] = {
      {{1, 1}, {546, 546}, 13, 13, 184, {546, 546}},
      {{100, 100}, {546, 546}, 13, 13, 184, {546, 546}},
      {{544, 544}, {546, 546}, 13, 13, 184, {546, 546}},
      {{640, 480}, {644, 490}, 16, 12, 206, {644, 483}},
      {{1000, 700}, {1008, 700}, 24, 17, 427, {1000, 700}},
      {{1302, 1302}, {1302, 1302}, 31, 31, 994, {1302, 1302}},
      {{1344, 1344}, {1302, 1302}, 31, 31, 994, {1302, 1302}},
      {{1920, 1080}, {1708, 966}, 41, 23, 968, {1708, 961}},
      {{1080, 1920}, {966, 1708}, 23, 41, 986, {961, 1708}},
      {{4000, 3000}, {1512, 1134}, 36, 27, 1001, {1512, 1134}},
      {{10000, 100}, {10010, 112}, 239, 3, 722, {10010, 100}},
      {{50, 60000}, {42, 21462}, 1, 511, 1024, {18, 21462}},
      {{60000, 50}, {42882, 42}, 1021, 1, 1024, {42882, 36}},
  };
  for (const Row& row : kRows) {
    const Result<Fit> found = fit(kReleased, row.image);
    ASSERT_TRUE(found.ok());
    EXPECT_EQ(found->box, row.box) << row.image.width << " x " << row.image.height;
    EXPECT_EQ(found->content, row.content) << row.image.width << " x " << row.image.height;
    EXPECT_EQ(found->slots, row.slots);
    EXPECT_EQ(found->slots, row.rows * (row.columns + 1) + 2);
  }
  EXPECT_EQ(fit(kReleased, {1, 60000}).error().message(),
            "an image of 1 x 60000 pixels is too long and narrow for this model");
}

TEST(Fit, OneCellIsEnough) {
  for (int64_t slots = 4; slots < 7; ++slots) {
    const Geometry geometry = {.patch = 4, .cell = 2, .min_pixels = 0, .max_slots = slots};
    for (const Size image : {Size{8, 8}, Size{900, 700}, Size{700, 900}, Size{50, 40}}) {
      const Result<Fit> found = fit(geometry, image);
      ASSERT_TRUE(found.ok()) << slots << " " << image.width << " x " << image.height;
      EXPECT_LE(found->slots, slots);
      EXPECT_GE(found->slots, 4);
    }
  }
}

TEST(Fit, SizesOfAnotherImplementation) {
  int refused = 0;
  for (const json& entry : expected("plan")) {
    const Result<Fit> found = fit(geometry_of(entry["geometry"]), size_of(entry["image"]));
    ASSERT_EQ(found.ok(), !entry["box"].is_null()) << entry;
    if (!found.ok()) {
      ++refused;
      continue;
    }
    EXPECT_EQ(found->box, size_of(entry["box"])) << entry;
    EXPECT_EQ(found->content, size_of(entry["content"])) << entry;
    EXPECT_EQ(found->slots, entry["slots"]) << entry;
    EXPECT_GE(found->left, 0);
    EXPECT_LE(found->left + found->content.width, found->box.width);
    EXPECT_GE(found->top, 0);
    EXPECT_LE(found->top + found->content.height, found->box.height);
  }
  EXPECT_GT(refused, 0);
}

TEST(Picture, IsTheImageInItsBox) {
  for (const json& entry : expected("fit")) {
    const Geometry geometry = geometry_of(entry["geometry"]);
    const std::vector<uint8_t> file = golden_file(entry["file"]);
    const Result<Picture> picture = make_picture(file, geometry);
    ASSERT_TRUE(picture.ok()) << picture.error().message();
    EXPECT_EQ(sha256(picture->rgb), entry["sha256"].get<std::string>()) << entry;
    EXPECT_EQ(picture->slots, entry["slots"]) << entry;
    EXPECT_EQ(fit(geometry, *read_size(file))->slots, picture->slots);
    EXPECT_EQ(static_cast<int64_t>(picture->rgb.size()),
              picture->rows * picture->columns * geometry.patch * geometry.patch * 3);
  }
}

TEST(Picture, PatchesAreRowsOfChannelsRowsAndColumns) {
  // 3 x 2 patches of 2 x 2 pixels; a sample is its place.
  Picture picture{.patch = 2, .rows = 2, .columns = 3};
  for (uint8_t i = 0; i < 72; ++i) {
    picture.rgb.push_back(i);
  }
  const std::vector<float> patches = picture.patches();
  ASSERT_EQ(patches.size(), 72u);
  const auto value = [](int sample) { return (static_cast<float>(sample) / 255.0f - 0.5f) / 0.5f; };
  // Patch (1, 2): rows 2 and 3, columns 4 and 5, of 6 pixels each; its second channel.
  const float* patch = patches.data() + (1 * 3 + 2) * 12 + 4;
  EXPECT_EQ(patch[0], value((2 * 6 + 4) * 3 + 1));
  EXPECT_EQ(patch[1], value((2 * 6 + 5) * 3 + 1));
  EXPECT_EQ(patch[2], value((3 * 6 + 4) * 3 + 1));
  EXPECT_EQ(patch[3], value((3 * 6 + 5) * 3 + 1));
  EXPECT_EQ(patches[0], -1.0f);
}

TEST(Picture, TheDigestNamesWhatTheTowerSees) {
  const auto digest = [](const char* name, const Geometry& geometry) {
    return make_picture(golden_file(name), geometry)->digest;
  };
  const Digest plain = digest("rgb.png", kReleased);
  EXPECT_EQ(digest("rgb.png", kReleased), plain);
  EXPECT_EQ(digest("lossless.webp", kReleased), plain);  // the same pixels in another file
  EXPECT_NE(digest("gray.png", kReleased), plain);
  // The same pixels in other cells.
  Geometry geometry = kReleased;
  geometry.cell = 2;
  const Picture cells = *make_picture(golden_file("rgb.png"), geometry);
  EXPECT_TRUE(cells.rgb == make_picture(golden_file("rgb.png"), kReleased)->rgb);
  EXPECT_NE(cells.digest, plain);
}

TEST(DataUrl, OfAnyBytesIsReadBack) {
  std::vector<uint8_t> bytes;
  for (int i = 0; i < 300; ++i) {
    EXPECT_EQ(*read_data_url(make_data_url(bytes)), bytes) << i;
    bytes.push_back(static_cast<uint8_t>(i * 37));
  }
}

TEST(DataUrl, TheLimitIsOfTheFile) {
  const std::vector<uint8_t> most(kMaxFileBytes);
  const std::string url = make_data_url(most);
  // As mail wraps it.
  std::string wrapped;
  for (size_t i = 0; i < url.size(); i += 76) {
    wrapped.append(url, i, 76).append("\r\n");
  }
  for (const std::string_view text : {std::string_view(url), std::string_view(wrapped)}) {
    const Result<std::vector<uint8_t>> bytes = read_data_url(text);
    ASSERT_TRUE(bytes.ok()) << bytes.error().message();
    EXPECT_TRUE(*bytes == most);
  }
  const Result<std::vector<uint8_t>> more =
      read_data_url(make_data_url(std::vector<uint8_t>(kMaxFileBytes + 1)));
  ASSERT_FALSE(more.ok());
  EXPECT_EQ(more.error().message(), "the image file has more than 20000000 bytes");
}

TEST(DataUrl, GivesTheBytes) {
  const auto text = [](std::string_view url) {
    const Result<std::vector<uint8_t>> bytes = read_data_url(url);
    return bytes.ok() ? std::string(bytes->begin(), bytes->end()) : bytes.error().message();
  };
  EXPECT_EQ(text("data:image/png;base64,aGVsbG8gdGhlcmU="), "hello there");
  EXPECT_EQ(text("data:;base64,aGVsbG8gdGhlcmU"), "hello there");
  EXPECT_EQ(text("data:image/png;base64,aGVs\r\nbG8g\ndGhlcmU=\n"), "hello there");
  EXPECT_EQ(text("data:image/png;base64,"), "");
  EXPECT_EQ(text("data:a;base64,+/-_"), "\xfb\xff\xbf");
  EXPECT_EQ(text("data:a;base64,aGVsbG8gd"), "the base64 data is cut off");
  EXPECT_EQ(text("data:a;base64,aG s"), "byte 2 of the base64 data is none of its digits");
  EXPECT_EQ(text("data:a;base64,aG=s"), "byte 2 of the base64 data is none of its digits");
  for (const char* url : {"data:image/png,hello", "file:///etc/passwd", "", "data:;base64"}) {
    EXPECT_EQ(text(url), "the image must be a URL of the form data:image/png;base64,DATA") << url;
  }
  EXPECT_EQ(text("https://example.com/a.png"),
            "cachalot fetches nothing from the network; send the image as a data: URL in base64");
}

}  // namespace
}  // namespace cachalot::image
