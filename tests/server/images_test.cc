// Images in requests of every dialect, over a scripted engine.
#include "base/file.h"
#include "image/data_url.h"
#include "tests/server/support.h"

namespace cachalot::server {
namespace {

std::string url_of(const std::string& name) {
  const std::string file = *read_file(CACHALOT_SOURCE_DIR "/tests/image/golden/" + name);
  return image::make_data_url({reinterpret_cast<const uint8_t*>(file.data()), file.size()});
}

// The base64 alone.
std::string data_of(const std::string& name) {
  const std::string url = url_of(name);
  return url.substr(url.find(',') + 1);
}

json text_part(const char* text) {
  return {{"type", "text"}, {"text", text}};
}

json chat_image(const std::string& url) {
  return {{"type", "image_url"}, {"image_url", {{"url", url}, {"detail", "high"}}}};
}

json chat_body(json parts) {
  return {{"messages", json::array({{{"role", "user"}, {"content", std::move(parts)}}})},
          {"thinking", {{"type", "disabled"}}}};
}

json anthropic_image(const std::string& name) {
  return {{"type", "image"},
          {"source", {{"type", "base64"}, {"media_type", "image/png"}, {"data", data_of(name)}}}};
}

class ImagesTest : public ServerTest {
 protected:
  ImagesTest() {
    token_ = *tokenizer().control_id(text::kImageToken);
    model_.images = {
        {.geometry = {.patch = 4, .cell = 2, .min_pixels = 300, .max_slots = 40}, .token = token_}};
    engine_->say("A whale.");
  }

  // The slots of the last prompt in the order of its images: where they begin, and how many.
  std::vector<std::pair<int64_t, int64_t>> expect_slots() {
    const std::vector<int32_t> prompt = engine_->prompt();
    std::vector<std::pair<int64_t, int64_t>> out;
    int64_t slots = 0;
    for (const engine::PromptImage& image : engine_->images()) {
      for (int64_t i = 0; i < image.picture->slots; ++i) {
        EXPECT_EQ(prompt[static_cast<size_t>(image.position + i)], token_);
      }
      slots += image.picture->slots;
      out.emplace_back(image.position, image.picture->slots);
    }
    EXPECT_EQ(std::count(prompt.begin(), prompt.end(), token_), slots);
    return out;
  }

  int32_t token_ = 0;
};

TEST_F(ImagesTest, ChatPutsTheSlotsWhereTheImageStands) {
  const json parts = {text_part("a"),
                      chat_image(url_of("rgb.png")),
                      text_part("b"),
                      {{"type", "image_url"}, {"image_url", url_of("420.jpg")}},
                      {{"type", "file"}, {"file", {{"file_data", data_of("plain.gif")}}}},
                      {{"type", "file"}, {"file_data", url_of("lossy.webp")}}};
  const json answer = ask("/v1/chat/completions", chat_body(parts));
  const auto slots = expect_slots();
  ASSERT_EQ(slots.size(), 4u);
  EXPECT_EQ(engine_->images()[0].picture->digest,
            image::make_picture(
                [] {
                  const std::string file =
                      *read_file(CACHALOT_SOURCE_DIR "/tests/image/golden/rgb.png");
                  return std::vector<uint8_t>(file.begin(), file.end());
                }(),
                model_.images->geometry)
                ->digest);
  EXPECT_EQ(answer["usage"]["prompt_tokens"], engine_->prompt().size());
  // The same chat with one token for each image.
  const json tokens = ask("/tokenize", chat_body(parts));
  EXPECT_EQ(tokens["count"], engine_->prompt().size());
  EXPECT_EQ(tokens["token_ids"], json(engine_->prompt()));
}

TEST_F(ImagesTest, ToolResultsMayHoldImages) {
  json body = chat_body(json::array({text_part("look")}));
  body["tools"] = {{{"type", "function"}, {"function", {{"name", "f"}}}}};
  body["messages"].push_back({{"role", "assistant"},
                              {"tool_calls",
                               {{{"id", "c1"},
                                 {"type", "function"},
                                 {"function", {{"name", "f"}, {"arguments", "{}"}}}}}}});
  body["messages"].push_back({{"role", "tool"},
                              {"tool_call_id", "c1"},
                              {"content", {text_part("x"), chat_image(url_of("rgb.png"))}}});
  ask("/v1/chat/completions", body);
  EXPECT_EQ(expect_slots().size(), 1u);
}

TEST_F(ImagesTest, AnthropicBlocksAndTheirCount) {
  const json body = {
      {"model", "claude-sonnet-4-5"},
      {"max_tokens", 20},
      {"thinking", {{"type", "disabled"}}},
      {"messages",
       {{{"role", "user"}, {"content", {anthropic_image("rgb.png"), text_part("what?")}}},
        {{"role", "assistant"},
         {"content",
          {{{"type", "tool_use"}, {"id", "t1"}, {"name", "f"}, {"input", json::object()}}}}},
        {{"role", "user"},
         {"content",
          {{{"type", "tool_result"},
            {"tool_use_id", "t1"},
            {"content", {anthropic_image("420.jpg")}}}}}}}}};
  const json answer = ask("/v1/messages", body);
  EXPECT_EQ(expect_slots().size(), 2u);
  EXPECT_EQ(answer["usage"]["input_tokens"], engine_->prompt().size());
  EXPECT_EQ(ask("/v1/messages/count_tokens", body)["input_tokens"], engine_->prompt().size());
}

TEST_F(ImagesTest, ResponsesInputAndOutputOfTools) {
  const json image = {
      {"type", "input_image"}, {"image_url", url_of("rgb.png")}, {"detail", "auto"}};
  const json body = {
      {"reasoning", {{"effort", "none"}}},
      {"input",
       {{{"role", "user"}, {"content", {image, {{"type", "input_text"}, {"text", "what?"}}}}},
        {{"type", "function_call"}, {"call_id", "c1"}, {"name", "f"}, {"arguments", "{}"}},
        {{"type", "function_call_output"}, {"call_id", "c1"}, {"output", {image}}}}}};
  const json answer = ask("/v1/responses", body);
  const auto slots = expect_slots();
  ASSERT_EQ(slots.size(), 2u);
  EXPECT_EQ(slots[0].second, slots[1].second);
  EXPECT_EQ(answer["usage"]["input_tokens"], engine_->prompt().size());
}

TEST_F(ImagesTest, ErrorsNameTheField) {
  struct Case {
    json part;
    const char* param;
    const char* message;
  };
  const std::string cut = url_of("rgb.png").substr(0, 200);
  const Case cases[] = {
      {chat_image("https://example.com/a.png"),
       "messages[0].content[1].image_url.url",
       "fetches nothing from the network"},
      {chat_image("data:image/png;base64,AAAA"),
       "messages[0].content[1].image_url.url",
       "not a JPEG, PNG, WebP or GIF image"},
      {chat_image("data:image/png;base64,A"),
       "messages[0].content[1].image_url.url",
       "base64 data is cut off"},
      {chat_image(cut), "messages[0].content[1].image_url.url", "PNG: "},
      {chat_image(""), "messages[0].content[1]", "must give an image"},
      {{{"type", "file"}, {"file", {{"file_id", "file-1"}}}},
       "messages[0].content[1].file.file_id",
       "no files are stored here"},
      {{{"type", "file"}, {"file", {{"file_data", "JVBERi0xLjQK"}}}},
       "messages[0].content[1].file.file_data",
       "not a JPEG"},
  };
  for (const Case& c : cases) {
    const json error =
        ask("/v1/chat/completions", chat_body({text_part("a"), c.part}), 400)["error"];
    EXPECT_EQ(error["param"], c.param);
    EXPECT_NE(error["message"].get<std::string>().find(c.message), std::string::npos) << error;
    ask("/tokenize", chat_body({text_part("a"), c.part}), &c == &cases[3] ? 200 : 400);
  }
  const json anthropic = {
      {"model", "claude-sonnet-4-5"},
      {"max_tokens", 20},
      {"messages",
       {{{"role", "user"},
         {"content",
          {{{"type", "image"},
            {"source", {{"type", "url"}, {"url", "http://example.com/a.png"}}}}}}}}}};
  EXPECT_NE(ask("/v1/messages", anthropic, 400)["error"]["message"].get<std::string>().find(
                "messages[0].content[0].source.url: cachalot fetches nothing"),
            std::string::npos);
  const json responses = {
      {"input",
       {{{"role", "user"},
         {"content", {{{"type", "input_image"}, {"image_url", "data:a;base64,AAAA"}}}}}}}};
  EXPECT_EQ(ask("/v1/responses", responses, 400)["error"]["param"],
            "input[0].content[0].image_url");
  EXPECT_TRUE(engine_->prompt().empty()) << "the engine saw it";
}

// A file whose header is right and whose pixels are damaged: whatever else is wrong is found before
// it is decoded.
TEST_F(ImagesTest, ImagesAreDecodedLast) {
  std::string file = *read_file(CACHALOT_SOURCE_DIR "/tests/image/golden/rgb.png");
  file.resize(file.size() / 2);
  const std::string url =
      image::make_data_url({reinterpret_cast<const uint8_t*>(file.data()), file.size()});
  const json body = chat_body({chat_image(url), text_part("?")});
  EXPECT_EQ(ask("/chat/completions", body, 400)["error"]["param"],
            "messages[0].content[0].image_url.url");
  const std::tuple<const char*, json, const char*> cases[] = {
      {"ignore_eos", true, "response_format"},
      {"messages",
       chat_body({chat_image(url), text_part(std::string(60000, 'x').c_str())})["messages"],
       "messages"}};
  for (const auto& [field, value, named] : cases) {
    json wrong = body;
    wrong["response_format"] = {{"type", "json_object"}};
    wrong[field] = value;
    const std::string message = ask("/chat/completions", wrong, 400)["error"]["message"];
    EXPECT_NE(message.find(named), std::string::npos) << message;
    EXPECT_EQ(message.find("image_url"), std::string::npos) << message;
  }
}

TEST_F(ImagesTest, APromptOfTooManySlotsIsTooLong) {
  json parts = json::array();
  for (int i = 0; i < 300; ++i) {
    parts.push_back(chat_image(url_of("rgb.png")));
  }
  const json error = ask("/v1/chat/completions", chat_body(parts), 400)["error"];
  EXPECT_EQ(error["code"], "context_length_exceeded");
  EXPECT_TRUE(engine_->prompt().empty());
}

// Files that are small and images that are not: refused by their headers.
TEST_F(ImagesTest, ThePixelsOfAPromptAreBounded) {
  const std::string gif("GIF89a\x10\x27\x88\x13\0\0\0;", 14);  // 10000 x 5000
  const std::string url =
      image::make_data_url({reinterpret_cast<const uint8_t*>(gif.data()), gif.size()});
  json parts = json::array();
  for (int i = 0; i < 11; ++i) {
    parts.push_back(chat_image(url));
  }
  const json error = ask("/v1/chat/completions", chat_body(parts), 400)["error"];
  EXPECT_EQ(error["param"], "messages[0].content[10].image_url.url");
  EXPECT_NE(error["message"].get<std::string>().find("at most 500 million"), std::string::npos);
}

TEST_F(ImagesTest, TheListOfModelsSaysThatImagesAreTaken) {
  const json models = json::parse(send("GET", "/v1/models")->wait().body);
  EXPECT_EQ(models["data"][0]["input_modalities"], json::array({"text", "image"}));
}

TEST_F(ImagesTest, AModelWithoutVisionRefuses) {
  model_.images = std::nullopt;
  const json body = chat_body({text_part("a"), chat_image(url_of("rgb.png"))});
  const json error = ask("/v1/chat/completions", body, 400)["error"];
  EXPECT_EQ(error["code"], "unsupported");
  EXPECT_EQ(error["message"], "messages[0].content[1].image_url.url: this model takes no images");
  ask("/tokenize", body, 400);
  EXPECT_TRUE(engine_->prompt().empty());
}

// The spelling of the image token in a client's text is text.
TEST_F(ImagesTest, ASpelledImageTokenIsNone) {
  const std::string spelled(text::kImageToken);
  ask("/v1/chat/completions",
      chat_body({text_part(spelled.c_str()), chat_image(url_of("rgb.png"))}));
  EXPECT_EQ(expect_slots().size(), 1u);
}

}  // namespace
}  // namespace cachalot::server
