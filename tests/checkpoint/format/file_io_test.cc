// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Files: whole writes, renames and syncs, and what their failures say.
#include "checkpoint/format/file_io.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>

#include <filesystem>
#include <tuple>

#include "checkpoint/scratch.h"

namespace deeptide::checkpoint {
namespace {

namespace fs = std::filesystem;

void make(const std::string& folder, const std::string& text) {
  make_folders(folder);
  write_text(folder + "/manifest.json", text);
}

TEST(FileIo, ReplacesAFolderWithAndWithoutAnExchange) {
  for (bool exchange : {true, false}) {
    Scratch scratch;
    make(scratch / "tag", "old");
    make(scratch / "tag.tmp", "new");
    const std::string replaced = replace_folder(scratch / "tag.tmp", scratch / "tag", exchange);
    EXPECT_EQ(read_text(scratch / "tag/manifest.json"), "new");
    EXPECT_EQ(read_text(replaced + "/manifest.json"), "old");
    EXPECT_EQ(replaced, exchange ? scratch / "tag.tmp" : aside_path(scratch / "tag"));
    EXPECT_EQ(list_folder(scratch.path()).size(), 2u);
  }
}

TEST(FileIo, KeepsTheOldFolderWhenTheNewOneCannotTakeItsPlace) {
  for (bool exchange : {true, false}) {
    Scratch scratch;
    make(scratch / "tag", "old");
    EXPECT_THROW(std::ignore = replace_folder(scratch / "tag.tmp", scratch / "tag", exchange), CheckpointError);
    EXPECT_EQ(read_text(scratch / "tag/manifest.json"), "old");
  }
}

TEST(FileIo, ReadsAFolderThatACrashLeftAside) {
  Scratch scratch;
  const at::Tensor data = at::arange(5, at::kFloat);
  save(scratch.path(), "tag", {whole("w", "param", data)});
  fs::rename(scratch / "tag", aside_path(scratch / "tag"));
  const at::Tensor back = at::zeros({5}, at::kFloat);
  Reader(scratch.path(), "tag").read({whole("w", "param", back)});
  EXPECT_TRUE(same_bits(back, data));
  save(scratch.path(), "tag", {whole("w", "param", data.add(1))});
  EXPECT_TRUE(exists(scratch / "tag"));
  EXPECT_FALSE(exists(aside_path(scratch / "tag")));
}

TEST(FileIo, SaysPathAndReasonOfAMissingFileAndOfAShortRead) {
  Scratch scratch;
  const std::string missing = error_of([&] { read_text(scratch / "absent"); });
  EXPECT_TRUE(contains(missing, scratch / "absent") && contains(missing, "No such file")) << missing;
  write_text(scratch / "short", "abc");
  char buffer[8];
  const std::string shortened = error_of([&] { File::open(scratch / "short").read_at(buffer, 8, 0); });
  EXPECT_TRUE(contains(shortened, "read 5 bytes at offset 3") && contains(shortened, "truncated")) << shortened;
  const std::string folder = error_of([&] { read_text(scratch.path()); });
  EXPECT_TRUE(contains(folder, "not a regular file")) << folder;
}

}  // namespace
}  // namespace deeptide::checkpoint
