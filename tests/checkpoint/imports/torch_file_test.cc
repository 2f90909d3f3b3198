// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Files of torch.save: tensors lie where the zip has their storages, and nowhere else.
#include "checkpoint/imports/archives/torch_file.h"

#include <gtest/gtest.h>

#include "checkpoint/imports/torch_zip.h"
#include "checkpoint/scratch.h"
#include "deeptide/weights.h"
#include "errors.h"

namespace deeptide::checkpoint {
namespace {

using namespace std::string_literals;

std::string text(const std::string& word) {
  return "X" + std::string(1, static_cast<char>(word.size())) + "\0\0\0"s + word;
}

/// A tensor of storage "0": shape and strides as opcodes.
std::string tensor_of(const std::string& shape, const std::string& strides, char offset = 0,
                      const std::string& storage = "FloatStorage") {
  return "ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") + "ctorch\n" + storage + "\n" + text("0") +
         text("cpu") + "K\6tQK"s + offset + shape + strides +
         "\x89"
         "ccollections\nOrderedDict\n)RtR";
}

std::string pickled(const std::string& value) { return "\x80\x02"s + "}" + text("w") + value + "s."; }

ZipEntries entries_of(const std::string& value, size_t bytes = 24) {
  std::string data(bytes, '\0');
  for (size_t i = 0; i + 4 <= bytes; i += 4) {
    const auto number = static_cast<float>(i / 4);
    std::memcpy(data.data() + i, &number, 4);
  }
  return {{"a/data.pkl", pickled(value)}, {"a/byteorder", "little"}, {"a/data/0", data}};
}

class TorchFileTest : public testing::Test {
 protected:
  std::string write(const std::string& bytes) {
    write_bytes(path_, bytes);
    return path_;
  }
  void read(const std::string& bytes) {
    write(bytes);
    const TorchFile file(path_);
    file.tensor(*file.root().find("w"));
  }
  std::string refused(const std::string& bytes) {
    return error_of([&] { read(bytes); });
  }

  Scratch scratch_;
  std::string path_ = scratch_ / "weights.bin";
};

TEST_F(TorchFileTest, HasTensorsAsTheyWereSaved) {
  for (const bool long_numbers : {false, true}) {
    write(zip_of(entries_of(tensor_of("K\2K\2\x86", "K\1K\2\x86", 1)), long_numbers));
    const WeightFile file(path_);
    ASSERT_EQ(file.names(), std::vector<std::string>{"w"});
    EXPECT_TRUE(at::equal(file.tensor("w"), at::tensor({1.F, 3.F, 2.F, 4.F}).view({2, 2})));
  }
}

TEST_F(TorchFileTest, HasParametersAndTensorsWithAttributes) {
  const std::string inner = tensor_of("K\6\x85", "K\1\x85");
  const std::string function = "ctorch._utils\n_rebuild_tensor_v2\n";
  const std::string arguments = inner.substr(function.size(), inner.size() - function.size() - 1);  // without REDUCE
  for (const std::string& value :
       {"ctorch._utils\n_rebuild_parameter\n(" + inner + "\x88N" + "tR",
        "ctorch._tensor\n_rebuild_from_type_v2\n(" + function + "ctorch\nTensor\n" + arguments + "}tR"}) {
    write(zip_of(entries_of(value)));
    EXPECT_TRUE(at::equal(WeightFile(path_).tensor("w"), at::arange(6, at::kFloat)));
  }
}

TEST_F(TorchFileTest, LeavesNoStorage) {
  EXPECT_NO_THROW(read(zip_of(entries_of(tensor_of("K\2K\3\x86", "K\3K\1\x86")))));
  for (const std::string& value :
       {tensor_of("K\7\x85", "K\1\x85"), tensor_of("K\6\x85", "K\1\x85", 1), tensor_of("K\2\x85", "K\6\x85"),
        tensor_of("K\2\x85", "J\xff\xff\xff\xff\x85"), tensor_of("J\xff\xff\xff\xff\x85", "K\1\x85"),
        tensor_of("\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f\x85", "K\0\x85"s),
        tensor_of("\x8a\x08\0\0\0\0\0\0\0\x40K\4\x86"s, "K\0K\0\x86"s)}) {
    EXPECT_NE(refused(zip_of(entries_of(value))).find("leaves its storage '0'"), std::string::npos);
  }
  EXPECT_NE(refused(zip_of(entries_of(tensor_of("K\2\x85", "K\1K\1\x86")))).find("shape is none"), std::string::npos);
  EXPECT_NE(refused(zip_of(entries_of(tensor_of("K\2\x85", "K\1\x85", 0, "QInt8Storage")))).find("QInt8Storage"),
            std::string::npos);
}

TEST_F(TorchFileTest, IsRefusedWhenItIsNone) {
  const ZipEntries entries = entries_of(tensor_of("K\6\x85", "K\1\x85"));
  const std::string whole = zip_of(entries);
  EXPECT_NO_THROW(read(whole));
  EXPECT_NE(refused("").find("not of torch's zip format"), std::string::npos);
  EXPECT_NE(refused("\x80\x02l.").find("load it with torch and save it again"), std::string::npos);
  EXPECT_NE(refused(whole.substr(0, whole.size() - 1)).find("truncated"), std::string::npos);
  EXPECT_NE(refused(zip_of(entries, false, 8)).find("is compressed"), std::string::npos);
  EXPECT_NE(refused(zip_of({entries[1]})).find("torch.save did not write it"), std::string::npos);
  EXPECT_NE(refused(zip_of({entries[0], entries[0]})).find("two entries"), std::string::npos);
  EXPECT_NE(refused(zip_of({entries[0], {"b/data.pkl", ""}})).find("several entries"), std::string::npos);
  EXPECT_NE(refused(zip_of({entries[0], entries[1]})).find("no entry 'a/data/0'"), std::string::npos);
  EXPECT_NE(refused(zip_of({entries[0], {"a/byteorder", "big"}})).find("big-endian"), std::string::npos);
}

TEST_F(TorchFileTest, IsReadOrRefusedWithAnyByteChanged) {
  const std::string whole = zip_of(entries_of(tensor_of("K\2K\3\x86", "K\3K\1\x86")), true);
  for (size_t i = 0; i < whole.size(); ++i) {
    for (const int change : {1, 0x80, 0xff}) {
      std::string bytes = whole;
      bytes[i] = static_cast<char>(bytes[i] ^ change);
      overwrite(path_, bytes);
      error_of([&] {
        const WeightFile file(path_);
        for (const std::string& name : file.names()) file.tensor(name).sum();
        throw CheckpointError("read");
      });
    }
  }
}

TEST_F(TorchFileTest, MayBeAFolderOfSeveral) {
  const auto index = [&](const std::string& file) {
    write_bytes(scratch_ / "pytorch_model.bin.index.json", R"({"weight_map": {"w": ")" + file + "\"}}");
  };
  write_bytes(scratch_ / "pytorch_model-00001-of-00002.bin", zip_of(entries_of(tensor_of("K\6\x85", "K\1\x85"))));
  index("pytorch_model-00001-of-00002.bin");
  EXPECT_TRUE(at::equal(WeightFile(scratch_.path()).tensor("w"), at::arange(6, at::kFloat)));
  index("../x.bin");
  EXPECT_NE(error_of([&] { WeightFile{scratch_.path()}; }).find("is no file of its folder"), std::string::npos);
}

}  // namespace
}  // namespace deeptide::checkpoint
