// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Pickles become records; hostile ones become records or errors, and nothing else happens.
#include "checkpoint/imports/archives/pickle.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

#include "deeptide/errors.h"
#include "errors.h"

namespace deeptide::checkpoint {
namespace {

using ValueKind = PickleValue::Kind;
using namespace std::string_literals;

Pickle read(const std::string& bytes) { return Pickle("\x80\x02"s + bytes, "test.pkl"); }

std::string refused(const std::string& bytes) {
  return error_of([&] { read(bytes); });
}

TEST(Pickle, HasNumbersOfEveryWidth) {
  const Pickle pickle =
      read("(K\x07M\x01\x02J\xfe\xff\xff\xff\x8a\x01\xff\x8a\x00\x8a\x02\x00\x80G?\xf8\0\0\0\0\0\0\x88N(tl."s);
  const auto& items = pickle.root().items;
  ASSERT_EQ(items.size(), 10u);
  const int64_t expected[] = {7, 0x201, -2, -1, 0, -32768};
  for (size_t i = 0; i < 6; ++i) EXPECT_EQ(items[i]->integer, expected[i]) << i;
  EXPECT_EQ(items[6]->real, 1.5);
  EXPECT_TRUE(items[7]->flag);
  EXPECT_TRUE(items[8]->is(ValueKind::none));
  EXPECT_TRUE(items[9]->is(ValueKind::tuple));
}

TEST(Pickle, HasIntegersBeyond64Bits) {
  const Pickle pickle = read("\x8a\x09\0\0\0\0\0\0\0\0\x01."s);
  EXPECT_TRUE(pickle.root().is(ValueKind::big));
  EXPECT_EQ(pickle.root().text, "0x010000000000000000");
  EXPECT_EQ(read("\x8a\x09\0\0\0\0\0\0\0\0\xff."s).root().text, "-0x010000000000000000");
}

TEST(Pickle, KeepsTheLastOfEqualKeys) {
  const Pickle pickle = read("}(X\x01\0\0\0aK\x01X\x01\0\0\0aK\x02u."s);
  ASSERT_NE(pickle.root().find("a"), nullptr);
  EXPECT_EQ(pickle.root().find("a")->integer, 2);
  EXPECT_EQ(pickle.root().find("b"), nullptr);
}

TEST(Pickle, NotesWhatWouldBeCalledAndCallsNothing) {
  const std::string marker = testing::TempDir() + "deeptide_pickle_ran";
  const std::string command = "touch " + marker;
  const Pickle pickle =
      read("cposix\nsystem\nX"s + std::string(1, static_cast<char>(command.size())) + "\0\0\0"s + command + "\x85R.");
  EXPECT_TRUE(pickle.root().is_made_by("posix.system"));
  EXPECT_EQ(pickle.root().arguments->items.front()->text, command);
  EXPECT_FALSE(pickle.root().is_mapping());
  EXPECT_EQ(pickle.root().find("a"), nullptr);
  EXPECT_NE(::access(marker.c_str(), F_OK), 0);
}

TEST(Pickle, OfAnyClassIsARecord) {
  // An object of a class with a state, made in protocol 4.
  const Pickle pickle = Pickle(
      "\x80\x04\x8c\x08"
      "builtins\x8c\x04"
      "eval\x93)\x81}\x8c\x01xK\x05sb."s,
      "test.pkl");
  EXPECT_TRUE(pickle.root().is_made_by("builtins.eval"));
  EXPECT_EQ(pickle.root().state->find("x")->integer, 5);
}

TEST(Pickle, HoldsItselfWithoutHarm) {
  const Pickle list = read("]q\0h\0a."s);
  EXPECT_EQ(list.root().items.front(), &list.root());
  const Pickle dict = read("}q\0X\x01\0\0\0ah\0s."s);
  EXPECT_EQ(dict.root().find("a"), &dict.root());
}

TEST(Pickle, NestsDeepWithoutRecursion) {
  std::string deep;
  for (int i = 0; i < 1'000'000; ++i) deep += ']';
  deep += std::string(999'999, 'a') + ".";
  EXPECT_EQ(read(deep).root().items.size(), 1u);
}

TEST(Pickle, ThatIsWrongIsRefusedByByte) {
  EXPECT_NE(error_of([] { Pickle("\x80\x06N.", "test.pkl"); }).find("test.pkl"), std::string::npos);
  EXPECT_NE(refused("").find("truncated"), std::string::npos);
  EXPECT_NE(refused("K").find("truncated"), std::string::npos);
  EXPECT_NE(refused("X\xff\xff\xff\xff"
                    "a."s)
                .find("truncated"),
            std::string::npos);
  EXPECT_NE(refused("\x8d\xff\xff\xff\xff\xff\xff\xff\xff"
                    "a."s)
                .find("truncated"),
            std::string::npos);
  EXPECT_NE(refused("\x8b\xff\xff\xff\xff"
                    "a."s)
                .find("truncated"),
            std::string::npos);
  EXPECT_NE(refused("\x95\xff\xff\xff\xff\xff\xff\xff\xffN."s).find("a frame is longer"), std::string::npos);
  EXPECT_NE(refused("cposix").find("a line has no end"), std::string::npos);
  EXPECT_NE(refused("NR.").find("finds no value"), std::string::npos);
  EXPECT_NE(refused("N)R.").find("no name of a module"), std::string::npos);
  EXPECT_NE(refused("cposix\nsystem\nNR.").find("'posix.system' are no tuple"), std::string::npos);
  EXPECT_NE(refused("h\5.").find("memo 5 is not there"), std::string::npos);
  EXPECT_NE(refused("q\0."s).find("finds no value"), std::string::npos);
  EXPECT_NE(refused("t.").find("finds no mark"), std::string::npos);
  EXPECT_NE(refused("}(K\1u.").find("a key has no value"), std::string::npos);
  EXPECT_NE(refused("NNb.").find("no object"), std::string::npos);
  EXPECT_NE(refused("NK\1a.").find("takes none"), std::string::npos);
  EXPECT_NE(refused("N(.").find("ends with 1 values"), std::string::npos);
  EXPECT_NE(refused("NN.").find("ends with 2 values"), std::string::npos);
  EXPECT_NE(refused("(S'a'\n.").find("opcode 83 is none"), std::string::npos);
  EXPECT_NE(refused("\x82\1.").find("opcode 130 is none"), std::string::npos);
}

TEST(Pickle, OfTooManyValuesIsRefused) {
  const std::string many = "(" + std::string(Pickle::kMaxValues + 1, 'N') + "l.";
  EXPECT_NE(refused(many).find("more values"), std::string::npos);
}

TEST(Pickle, SurvivesAnyByteAnywhere) {
  const std::string whole = "}q\0(X\x01\0\0\0a]q\1(K\1K\2eX\x01\0\0\0bccollections\nOrderedDict\n)Rq\2u."s;
  std::mt19937 random(3);
  for (int round = 0; round < 20'000; ++round) {
    std::string bytes = whole;
    for (int change = 0; change < 3; ++change) bytes[random() % bytes.size()] = static_cast<char>(random());
    error_of([&] {
      read(bytes.substr(0, random() % (bytes.size() + 1)));
      throw CheckpointError("read");
    });
  }
}

}  // namespace
}  // namespace deeptide::checkpoint
