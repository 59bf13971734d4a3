// Stop strings over streamed text.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace cachalot::engine {

// push() returns the text that is certain to be part of the answer: it holds back what could be the
// beginning of a stop string, and cuts at the first complete one. Empty stop strings are ignored.
class StopMatcher {
 public:
  explicit StopMatcher(std::vector<std::string> stops);

  std::string push(std::string_view text);
  // What was held back, unless a stop string ended the text.
  std::string finish();
  bool stopped() const { return stopped_; }
  // The stop string that ended the text.
  const std::string& match() const { return match_; }

 private:
  std::vector<std::string> stops_;
  std::string held_;
  std::string match_;
  bool stopped_ = false;
};

}  // namespace cachalot::engine
