// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Turns relaxed JSON into strict JSON: comments and trailing commas become blanks, so every offset stays.
#include "base/json_relaxed.h"

namespace deeptide {
namespace {

class Blanker {
 public:
  explicit Blanker(std::string_view text) : out_(text) {}

  std::string run(size_t* unclosed) {
    *unclosed = std::string::npos;
    while (at_ < out_.size()) {
      const char c = out_[at_];
      if (c == '"') {
        significant(c);
        skip_string();
      } else if (c == '#' || starts("//")) {
        blank_until(out_.find('\n', at_), 0);
      } else if (starts("/*")) {
        const size_t end = out_.find("*/", at_ + 2);
        if (end == std::string::npos) *unclosed = at_;
        blank_until(end, 2);
      } else {
        if (c != ' ' && c != '\t' && c != '\r' && c != '\n') significant(c);
        ++at_;
      }
    }
    return std::move(out_);
  }

 private:
  bool starts(std::string_view mark) const { return std::string_view(out_).substr(at_, mark.size()) == mark; }

  // A comma is blanked only between a value and a closing bracket: `[,]` and `[1,,]` stay errors.
  void significant(char c) {
    if ((c == '}' || c == ']') && comma_follows_value_) out_[comma_] = ' ';
    comma_follows_value_ = c == ',' && last_ != '\0' && last_ != ',' && last_ != '{' && last_ != '[' && last_ != ':';
    comma_ = at_;
    last_ = c;
  }

  void skip_string() {
    for (++at_; at_ < out_.size(); ++at_) {
      if (out_[at_] == '\\') {
        ++at_;
      } else if (out_[at_] == '"' || out_[at_] == '\n') {
        break;
      }
    }
    if (at_ < out_.size()) ++at_;
  }

  void blank_until(size_t end, size_t tail) {
    end = end == std::string::npos ? out_.size() : end + tail;
    for (; at_ < end; ++at_) {
      if (out_[at_] != '\n') out_[at_] = ' ';
    }
  }

  std::string out_;
  size_t at_ = 0;
  size_t comma_ = 0;
  bool comma_follows_value_ = false;
  char last_ = '\0';
};

}  // namespace

std::string blank_comments(std::string_view text, size_t* unclosed) { return Blanker(text).run(unclosed); }

}  // namespace deeptide
