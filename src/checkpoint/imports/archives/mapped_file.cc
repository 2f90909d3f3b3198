// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Maps files.
#include "checkpoint/imports/archives/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#include "checkpoint/format/file_io.h"

namespace deeptide::checkpoint {

MappedFile::MappedFile(const std::string& path) : bytes_(File::open(path).size()) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) fail("open", path, errno);
  void* base =
      ::mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, descriptor, 0);
  const int error = errno;
  ::close(descriptor);
  if (base == MAP_FAILED) fail("map", path, error);
  base_ = static_cast<char*>(base);
}

MappedFile::~MappedFile() { ::munmap(base_, static_cast<size_t>(bytes_)); }

}  // namespace deeptide::checkpoint
