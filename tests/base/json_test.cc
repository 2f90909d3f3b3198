// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The reader: lines, comments, trailing commas, duplicate keys, malformed text.
#include "base/json.h"

#include <gtest/gtest.h>

#include <random>

#include "deeptide/errors.h"

namespace deeptide {
namespace {

std::string error_of(const std::string& text) {
  try {
    parse_json(text, "file.json");
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(Json, KeepsTheLineOfEveryKeyAndValue) {
  const JsonValue root =
      parse_json("{\n \"a\": 1\n,\n \"b\": [2,\n3\n],\n\"c\":\n{\"d\":\n\"x\"}, \"e\": true\n}", "f");
  EXPECT_EQ(root.line, 1);
  EXPECT_EQ(root.find("a")->line, 2);
  EXPECT_EQ(root.find("a")->value.line, 2);
  EXPECT_EQ(root.find("b")->value.line, 4);
  EXPECT_EQ(root.find("b")->value.items[0].line, 4);
  EXPECT_EQ(root.find("b")->value.items[1].line, 5);
  EXPECT_EQ(root.find("c")->line, 7);
  EXPECT_EQ(root.find("c")->value.line, 8);
  EXPECT_EQ(root.find("c")->value.find("d")->line, 8);
  EXPECT_EQ(root.find("c")->value.find("d")->value.line, 9);
  EXPECT_EQ(root.find("e")->line, 9);
}

TEST(Json, KeepsTheLineOfANumberBeforeANewline) {
  for (const char* newline : {"\n", "\r\n"}) {
    const std::string text = std::string("{\"a\": 12") + newline + ",\"b\": 1e5" + newline + newline + "}";
    const JsonValue root = parse_json(text, "f");
    EXPECT_EQ(root.find("a")->value.line, 1);
    EXPECT_EQ(root.find("b")->value.line, 2);
  }
  EXPECT_EQ(parse_json("\n5", "f").line, 2);
  EXPECT_EQ(parse_json("5\n\n", "f").line, 1);
}

TEST(Json, TellsIntegersNumbersAndWordsApart) {
  const JsonValue root =
      parse_json(R"([1, 1.0, "1", true, null, 5e8, -3, 9223372036854775807, 9223372036854775808])", "f");
  const JsonKind kinds[] = {JsonKind::integer, JsonKind::number,  JsonKind::string,  JsonKind::boolean, JsonKind::null,
                            JsonKind::number,  JsonKind::integer, JsonKind::integer, JsonKind::number};
  ASSERT_EQ(root.items.size(), std::size(kinds));
  for (size_t i = 0; i < std::size(kinds); ++i) EXPECT_EQ(root.items[i].kind, kinds[i]) << i;
  EXPECT_EQ(root.items[7].integer, INT64_MAX);
  EXPECT_EQ(root.items[8].number, 0x1p63);
}

TEST(Json, PassesOverComments) {
  const JsonValue root = parse_json("# one\n{ // two\n\"a\": /* three\n four */ 1, # five\n\"b\": 2 } // six", "f");
  EXPECT_EQ(root.find("a")->value.integer, 1);
  EXPECT_EQ(root.find("a")->value.line, 4);
  EXPECT_EQ(root.find("b")->line, 5);
}

TEST(Json, LeavesMarksInsideStringsAlone) {
  const JsonValue root = parse_json(R"({"#a": "// no /* comment */ # here,]", "b\"#": "\\", "c": ",}"})", "f");
  EXPECT_EQ(root.find("#a")->value.string, "// no /* comment */ # here,]");
  EXPECT_EQ(root.find("b\"#")->value.string, "\\");
  EXPECT_EQ(root.find("c")->value.string, ",}");
}

TEST(Json, PassesOverOneTrailingComma) {
  EXPECT_EQ(parse_json("[1, 2, ]", "f").items.size(), 2u);
  EXPECT_EQ(parse_json("{\"a\": [1,], // last\n}", "f").members.size(), 1u);
  for (const char* text : {"[,]", "{,}", "[1,,]", "[1,,2]", "{\"a\":,}", "[],", ",[]", "{\"a\": 1,,}"}) {
    EXPECT_NE(error_of(text), "") << text;
  }
}

TEST(Json, RefusesDuplicateKeysWithBothLinesAndThePath) {
  EXPECT_EQ(error_of("{\"a\": {\n\"b\": [{\"c\": 1,\n\n\"c\": 2}]}}"),
            "file.json:4: a.b.c: duplicate key, first given on line 2; keep one of them");
  EXPECT_EQ(error_of("{\"a\": {\"b\": 1}, \"c\": {\"b\": 1}}"), "");
}

TEST(Json, SaysWhereAndWhatInMalformedText) {
  struct Case {
    const char* text;
    const char* where;
    const char* what;
  };
  for (const Case& c : std::initializer_list<Case>{{"{\"a\": 1\n \"b\": 2}", "file.json:2:4: ", "expected '}'"},
                                                   {"{\"a\": [1, 2}", "file.json:1:12: ", "expected ']'"},
                                                   {"{a: 1}", "file.json:1:2: ", "expected string literal"},
                                                   {"{\"a\" 1}", "file.json:1:6: ", "expected ':'"},
                                                   {"{\"a\": tru}", "file.json:1:10: ", "invalid literal"},
                                                   {"", "file.json:1:1: ", "unexpected end of input"},
                                                   {"{\n\"a\": \"x\n\"}", "file.json:2:", "control character"},
                                                   {"{} x", "file.json:1:", "expected end of input"},
                                                   {"{\n/* x", "file.json:2:1: ", "never ends"}}) {
    const std::string error = error_of(c.text);
    EXPECT_EQ(error.rfind(c.where, 0), 0u) << error << "\n" << c.text;
    EXPECT_NE(error.find("malformed JSON: "), std::string::npos) << error;
    EXPECT_NE(error.find(c.what), std::string::npos) << error << "\n" << c.text;
  }
}

TEST(Json, RefusesANulByteAndInvalidUtf8) {
  EXPECT_NE(error_of(std::string("{}\0garbage", 10)), "");
  EXPECT_NE(error_of("{\"a\": \"\xff\"}"), "");
}

TEST(Json, RefusesEndlessNesting) {
  EXPECT_NE(error_of(std::string(100'000, '[')).find("nested deeper"), std::string::npos);
  EXPECT_EQ(error_of(std::string(60, '[') + std::string(60, ']')), "");
}

TEST(Json, WritesWhatItReads) {
  for (const char* text : {R"({"a": [1, 2.5, -0.1, true, null, "x\"y"], "b": {}})", "1e-08", "500000000", "[]"}) {
    EXPECT_EQ(to_text(parse_json(text, "f")), text);
  }
}

TEST(Json, ComparesContentWithoutLinesAndWithoutTheKindOfNumber) {
  const auto same = [](const char* a, const char* b) { return same_content(parse_json(a, "f"), parse_json(b, "f")); };
  EXPECT_TRUE(same("[1, {\"a\": 2, \"b\": 3}]", "[1.0,\n{\"b\": 3, \"a\": 2}]"));
  EXPECT_FALSE(same("1", "true"));
  EXPECT_FALSE(same("\"1\"", "1"));
  EXPECT_FALSE(same("[1]", "[1, 2]"));
  EXPECT_FALSE(same("{\"a\": 1}", "{\"a\": 1, \"b\": 1}"));
}

TEST(Json, EndsOnAnyMutationWithATreeOrAnError) {
  const std::string seed = "{ # c\n\"a\": [1, 2.5e3, \"x\\n\"], /* d */ \"b\": {\"c\": null, \"d\": true,}, // e\n}";
  const std::string alphabet = "{}[],:\"\\/*# \n\r\t0123456789eE+-.truefalsnx\xc3\xa9";
  std::mt19937 random(1);
  int trees = 0, errors = 0;
  for (int round = 0; round < 20'000; ++round) {
    std::string text = seed;
    for (int change = random() % 4; change >= 0; --change) {
      const size_t at = random() % text.size();
      const char c = alphabet[random() % alphabet.size()];
      if (random() % 3 == 0) {
        text.erase(at, 1 + random() % 3);
      } else if (random() % 2) {
        text.insert(at, 1, c);
      } else {
        text[at] = c;
      }
      if (text.empty()) text = " ";
    }
    try {
      parse_json(text, "f");
      ++trees;
    } catch (const ConfigError& error) {
      EXPECT_EQ(std::string(error.what()).rfind("f:", 0), 0u);
      ++errors;
    }
  }
  EXPECT_GT(trees, 100);
  EXPECT_GT(errors, 100);
}

}  // namespace
}  // namespace deeptide
