// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Streamed reads give what files hold, whatever was announced, and pass the page cache by where they may.
#include "checkpoint/load/streamed_reads.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>

#include "checkpoint/scratch.h"

namespace deeptide::checkpoint {
namespace {

using Through = StreamedReads::Through;

constexpr StreamedReads::Sizes kPages{.part = 3 * io::kAlignment, .least = io::kAlignment, .parts = 3};

class StreamedFiles : public testing::Test {
 protected:
  void SetUp() override {
    std::mt19937 random(7);
    for (const auto& [name, bytes] : std::map<std::string, int>{{"a", 100'000}, {"b", 65'536}, {"c", 77}}) {
      std::string& text = texts_[name];
      for (int i = 0; i < bytes; ++i) text += static_cast<char>(random());
      write_text(scratch_ / name, text);
      ASSERT_EQ(::posix_fadvise(File::open(scratch_ / name).descriptor(), 0, 0, POSIX_FADV_DONTNEED), 0);
    }
    is_direct_ = File::open_direct(scratch_ / "a").is_direct() && !File::open(scratch_ / "a").is_cached(100'000, 0);
  }

  std::string read(StreamedReads& files, const std::string& name, int64_t offset, int64_t bytes) {
    std::string found(static_cast<size_t>(bytes), '\0');
    files.read(name, offset, found.data(), bytes);
    return found;
  }

  void expect_read(StreamedReads& files, const std::string& name, int64_t offset, int64_t bytes) {
    const std::string expected = texts_.at(name).substr(static_cast<size_t>(offset), static_cast<size_t>(bytes));
    EXPECT_TRUE(read(files, name, offset, bytes) == expected) << name << " at " << offset << ", " << bytes;
  }

  const Scratch scratch_;
  std::map<std::string, std::string> texts_;
  bool is_direct_ = false;  // the filesystem takes O_DIRECT, and lets go of what it has in memory: no tmpfs
};

TEST_F(StreamedFiles, ComePastThePageCacheUnlessItHasThemOrOthersReadThem) {
  const auto direct_bytes = [&](Through through) {
    StreamedReads files(scratch_.path(), through, kPages);
    files.announce("a", 10, 99'000);
    for (int64_t at = 10; at < 99'010; at += 9'000) expect_read(files, "a", at, 9'000);
    return files.direct_bytes();
  };
  if (is_direct_) {
    EXPECT_GE(direct_bytes(Through::drive), 99'000);
  }
  EXPECT_EQ(direct_bytes(Through::page_cache), 0);
  EXPECT_EQ(direct_bytes(Through::drive), 0);  // the page cache has them now
}

TEST_F(StreamedFiles, ComeInAnyOrderOfAFile) {
  StreamedReads files(scratch_.path(), Through::drive, kPages);
  files.announce("a", 70'000, 300);  // a small one, through the page cache
  files.announce("a", 4'096, 40'000);
  files.announce("a", 50'000, 12'000);
  expect_read(files, "a", 70'000, 300);
  expect_read(files, "a", 4'096, 40'000);
  expect_read(files, "a", 50'000, 12'000);
  if (is_direct_) {
    EXPECT_GE(files.direct_bytes(), 52'000);
  }
}

TEST_F(StreamedFiles, GiveTheSameBytesWhateverWasAnnounced) {
  std::mt19937 random(1);
  const auto draw = [&](int64_t most) { return static_cast<int64_t>(random() % static_cast<uint64_t>(most + 1)); };
  for (int round = 0; round < 300; ++round) {
    StreamedReads files(scratch_.path(), Through::drive, kPages);
    std::vector<std::tuple<std::string, int64_t, int64_t>> reads;
    for (int64_t count = draw(12); count > 0; --count) {
      const std::string name(1, static_cast<char>('a' + draw(2)));
      const auto size = std::ssize(texts_.at(name));
      const int64_t offset = draw(size), bytes = draw(std::min<int64_t>(size - offset, 30'000));
      if (draw(5) > 0) files.announce(name, offset, bytes);
      if (draw(5) > 0) reads.emplace_back(name, offset, bytes);
    }
    if (draw(3) == 0) std::shuffle(reads.begin(), reads.end(), random);
    for (const auto& [name, offset, bytes] : reads) expect_read(files, name, offset, bytes);
    const File file = File::open(scratch_ / "a");
    ASSERT_EQ(::posix_fadvise(file.descriptor(), 0, 0, POSIX_FADV_DONTNEED), 0);
  }
}

TEST_F(StreamedFiles, NameWhatIsMissingToWhoReadsItOnly) {
  StreamedReads files(scratch_.path(), Through::drive, kPages);
  files.announce("a", 90'000, 50'000);
  files.announce("absent", 0, 50'000);
  files.announce("b", 0, 65'536);
  expect_read(files, "a", 90'000, 10'000);
  const std::string missing = error_of([&] { read(files, "absent", 0, 100); });
  EXPECT_TRUE(contains(missing, scratch_ / "absent") && contains(missing, "No such file")) << missing;
  const std::string shortened = error_of([&] { read(files, "a", 99'999, 2); });
  EXPECT_TRUE(contains(shortened, "read 1 bytes at offset 100000") && contains(shortened, "truncated")) << shortened;
  expect_read(files, "b", 0, 65'536);
}

TEST_F(StreamedFiles, AreReadThoughTheirReaderSkipsMostOfWhatItAnnounced) {
  StreamedReads files(scratch_.path(), Through::drive, kPages);
  files.announce("a", 0, 100'000);
  files.announce("b", 0, 65'536);
  expect_read(files, "b", 100, 65'000);
  if (is_direct_) {
    EXPECT_GE(files.direct_bytes(), 64'000);
  }
}

}  // namespace
}  // namespace deeptide::checkpoint
