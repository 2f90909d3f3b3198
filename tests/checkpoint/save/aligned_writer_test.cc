// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A writer's blocks are as large as memory allows.
#include "checkpoint/save/aligned_writer.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

#include "address_space.h"
#include "base/sanitizers.h"
#include "checkpoint/scratch.h"

namespace deeptide::checkpoint {
namespace {

constexpr int64_t kRoom = int64_t{4} << 20;

std::string bytes_of(int64_t count) {
  std::string text(static_cast<size_t>(count), '\0');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 7 + i / 4096);
  return text;
}

void write_and_compare(const std::string& text) {
  const Scratch scratch;
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    try {
      limit_addresses(kRoom);
      AlignedWriter writer(scratch / "file", std::ssize(text));
      writer.append(text.data(), std::ssize(text));
      writer.finish();
      ::_exit(0);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      ::_exit(1);
    }
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  std::ifstream file(scratch / "file", std::ios::binary);
  const std::string found{std::istreambuf_iterator<char>(file), {}};
  EXPECT_TRUE(found == text) << found.size();
}

TEST(AlignedWriter, WritesSmallerBlocksWhereMemoryIsShort) {
#ifdef DEEPTIDE_SANITIZED
  GTEST_SKIP() << "a sanitizer maps more than any limit";
#endif
  static_assert(kRoom < kBlockBytes);
  for (const int64_t size : {3 * kBlockBytes + 4321, kBlockBytes / 4 * 3 + 4321}) write_and_compare(bytes_of(size));
}

TEST(AlignedWriter, NamesItsFileWhereThereIsNoMemory) {
#ifdef DEEPTIDE_SANITIZED
  GTEST_SKIP() << "a sanitizer maps more than any limit";
#endif
  const Scratch scratch;
  const auto write = [&] {
    AlignedWriter writer(scratch / "file", kBlockBytes);
    limit_addresses(0);
    static void* volatile taken = nullptr;
    do taken = std::malloc(size_t{64} << 10);
    while (taken != nullptr);
    try {
      writer.append("one", 3);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      ::_exit(1);
    }
  };
  EXPECT_EXIT(write(), testing::ExitedWithCode(1), "to write .*/file: Cannot allocate memory");
}

}  // namespace
}  // namespace deeptide::checkpoint
