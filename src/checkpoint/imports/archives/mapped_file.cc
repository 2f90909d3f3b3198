// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Maps files.
#include "checkpoint/imports/archives/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#include "base/resources.h"
#include "checkpoint/format/file_io.h"

namespace deeptide::checkpoint {

MappedFile::MappedFile(const std::string& path) : bytes_(File::open(path).size()) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) fail("open", path, errno);
  void* base = MAP_FAILED;
  int error = 0;
  take_or_give_back([&] {
    constexpr int kFlags = MAP_PRIVATE | MAP_NORESERVE;
    base = ::mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE, kFlags, descriptor, 0);
    error = errno;
    return base != MAP_FAILED;
  });
  ::close(descriptor);
  if (base == MAP_FAILED) fail("map", path, error);
  base_ = static_cast<char*>(base);
}

MappedFile::~MappedFile() { ::munmap(base_, static_cast<size_t>(bytes_)); }

}  // namespace deeptide::checkpoint
