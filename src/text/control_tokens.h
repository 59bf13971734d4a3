// The control tokens of the V4.1 protocol, by their spelling. Ids come from the tokenizer.
//
// U+FF5C is the full-width vertical bar, U+2581 the lower one-eighth block.
#pragma once

#include <array>
#include <string_view>

namespace cachalot::text {

inline constexpr std::string_view kBosToken = "<\uFF5Cbegin\u2581of\u2581sentence\uFF5C>";
inline constexpr std::string_view kEosToken = "<\uFF5Cend\u2581of\u2581sentence\uFF5C>";
inline constexpr std::string_view kPadToken = "<\uFF5C\u2581pad\u2581\uFF5C>";
inline constexpr std::string_view kSystemToken = "<\uFF5CSystem\uFF5C>";
inline constexpr std::string_view kFimHoleToken = "<\uFF5Cfim\u2581hole\uFF5C>";
inline constexpr std::string_view kFimBeginToken = "<\uFF5Cfim\u2581begin\uFF5C>";
inline constexpr std::string_view kFimEndToken = "<\uFF5Cfim\u2581end\uFF5C>";
inline constexpr std::string_view kUserToken = "<\uFF5CUser\uFF5C>";
inline constexpr std::string_view kAssistantToken = "<\uFF5CAssistant\uFF5C>";
inline constexpr std::string_view kEotToken = "<|EOT|>";
inline constexpr std::string_view kThinkToken = "<think>";
inline constexpr std::string_view kThinkEndToken = "</think>";
// Only this string is one token; the angle brackets and tag names around it are ordinary text.
inline constexpr std::string_view kDsmlToken = "\uFF5CDSML\uFF5C";
inline constexpr std::string_view kLatestReminderToken = "<\uFF5Clatest_reminder\uFF5C>";
inline constexpr std::string_view kActionToken = "<\uFF5Caction\uFF5C>";
inline constexpr std::string_view kQueryToken = "<\uFF5Cquery\uFF5C>";
inline constexpr std::string_view kAuthorityToken = "<\uFF5Cauthority\uFF5C>";
inline constexpr std::string_view kDomainToken = "<\uFF5Cdomain\uFF5C>";
inline constexpr std::string_view kTitleToken = "<\uFF5Ctitle\uFF5C>";
inline constexpr std::string_view kReadUrlToken = "<\uFF5Cread_url\uFF5C>";
inline constexpr std::string_view kImageToken = "<\uFF5Cdeepseek_image\uFF5C>";

// Every control token except BOS, EOS and pad, in the order of the released vocabulary's ids.
inline constexpr std::array kControlTokens = {
    kSystemToken,
    kFimHoleToken,
    kFimBeginToken,
    kFimEndToken,
    kUserToken,
    kAssistantToken,
    kEotToken,
    kThinkToken,
    kThinkEndToken,
    kDsmlToken,
    kLatestReminderToken,
    kActionToken,
    kQueryToken,
    kAuthorityToken,
    kDomainToken,
    kTitleToken,
    kReadUrlToken,
    kImageToken,
};

}  // namespace cachalot::text
