// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The safetensors header: what is written is read, and what is malformed is refused.
#include "checkpoint/format/safetensors.h"

#include <nlohmann/json.hpp>

#include "checkpoint/scratch.h"

namespace deeptide::checkpoint {
namespace {

constexpr auto kFloat = at::ScalarType::Float;

std::string with_length(const std::string& json) {
  std::string bytes(8, '\0');
  const uint64_t length = json.size();
  std::memcpy(bytes.data(), &length, 8);
  return bytes + json;
}

Header read_bytes(const std::string& bytes) {
  Scratch scratch;
  overwrite(scratch / "x.safetensors", bytes);
  return read_header(File::open(scratch / "x.safetensors"));
}

TEST(Safetensors, ReadsTheHeaderItWrites) {
  const Entries entries = {{"a/param", {kFloat, {2}, 0, 8}}, {"ü/buffer", {at::ScalarType::Bool, {3}, 8, 11}}};
  const std::string header = encode_header(entries, {{"format", "pt"}});
  EXPECT_EQ(header.size() % 64, 0u);
  const Header back = read_bytes(header + std::string(11, 'x'));
  EXPECT_EQ(back.data_offset, static_cast<int64_t>(header.size()));
  EXPECT_EQ(back.metadata.at("format"), "pt");
  ASSERT_EQ(back.entries.size(), 2u);
  EXPECT_EQ(back.entries.at("ü/buffer").begin, 8);
  EXPECT_EQ(back.entries.at("ü/buffer").dtype, at::ScalarType::Bool);
}

TEST(Safetensors, LaysOutTheHeaderAsTheFormatSays) {
  const std::string header = encode_header({{"k", {kFloat, {1}, 0, 4}}}, {});
  uint64_t length;
  std::memcpy(&length, header.data(), 8);
  EXPECT_EQ(length, header.size() - 8);
  EXPECT_EQ(header[8], '{');
  const auto json = nlohmann::json::parse(header.substr(8));
  EXPECT_EQ(json.at("k").dump(), R"({"data_offsets":[0,4],"dtype":"F32","shape":[1]})");
}

TEST(Safetensors, KnowsEachDtypeByItsName) {
  for (at::ScalarType dtype : {at::ScalarType::Double, at::ScalarType::BFloat16, at::ScalarType::Half,
                               at::ScalarType::Long, at::ScalarType::Byte, at::ScalarType::Float8_e4m3fn}) {
    EXPECT_EQ(dtype_of_name(dtype_name(dtype), "test"), dtype);
  }
  EXPECT_TRUE(contains(error_of([] { dtype_name(at::ScalarType::ComplexDouble); }), "ComplexDouble"));
  EXPECT_TRUE(contains(error_of([] { dtype_of_name("F33", "here"); }), "'F33' is not known"));
}

TEST(Safetensors, RefusesAMalformedHeaderAndSaysWhy) {
  const std::string entry = R"({"dtype":"F32","shape":[1],"data_offsets":)";
  const struct {
    std::string bytes;
    std::string why;
  } cases[] = {
      {"", "too few for a header"},
      {"1234567", "too few for a header"},
      {std::string("\xff\xff\xff\xff\xff\xff\xff\xff", 8) + "{}", "its header claims 18446744073709551615 bytes"},
      {std::string("\x09\0\0\0\0\0\0\0", 8) + "{}", "its header claims 9 bytes, the file has 10"},
      {with_length("{"), "its header cannot be read"},
      {with_length("[]"), "not a JSON object"},
      {with_length("{\"\xff\":1}"), "its header cannot be read"},
      {with_length(R"({"__metadata__":{"a":1}})"), "its header cannot be read"},
      {with_length(R"({"a":5})"), "its header cannot be read"},
      {with_length(R"({"a":{"dtype":"F32","data_offsets":[0,4]}})") + "1234", "its header cannot be read"},
      {with_length(R"({"a":{"dtype":"F9","shape":[1],"data_offsets":[0,4]}})") + "1234", "dtype 'F9' is not known"},
      {with_length(R"({"a":{"dtype":"F32","shape":1,"data_offsets":[0,4]}})") + "1234", "shape is not a list"},
      {with_length(R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})") + "1234", "shape is not possible"},
      {with_length(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}})"),
       "shape is not possible"},
      {with_length(R"({"a":{"dtype":"F32","shape":[9223372036854775807],"data_offsets":[0,4]}})"), "do not fit shape"},
      {with_length(R"({"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}})") + "1234", "expected an integer"},
      {with_length(R"({"a":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,4]}})"),
       "expected an integer"},
      {with_length("{\"a\":" + entry + "[0]}}"), "data_offsets is not a pair"},
      {with_length("{\"a\":" + entry + "[4,0]}}"), "do not fit shape"},
      {with_length("{\"a\":" + entry + "[0,8]}}") + "12345678", "do not fit shape"},
      {with_length("{\"a\":" + entry + "[-4,0]}}"), "do not fit shape"},
      {with_length("{\"a\":" + entry + "[0,4]},\"b\":" + entry + "[2,6]}}") + "123456", "two tensors overlap"},
      {with_length("{\"a\":" + entry + "[0,4]},\"b\":" + entry + "[8,12]}}") + "123456789012", "no tensor covers"},
      {with_length("{\"a\":" + entry + "[0,4]}}") + "123", "was it truncated?"},
      {with_length("{\"a\":" + entry + "[0,4]}}") + "12345", "it holds 5 bytes of data, its header describes 4"},
      {with_length(std::string(100'000, '[')), "its header cannot be read"},
  };
  for (const auto& [bytes, why] : cases) {
    const std::string text = error_of([&bytes] { read_bytes(bytes); });
    EXPECT_TRUE(contains(text, why) && contains(text, "x.safetensors")) << text << "\nexpected: " << why;
  }
}

}  // namespace
}  // namespace deeptide::checkpoint
