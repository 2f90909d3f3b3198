// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Opens unnamed files and reserves their space.
#include "tiers/swap_file.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <system_error>

#include "base/invariant.h"
#include "io/aligned.h"
#include "io/queue.h"

namespace deeptide::tiers {

namespace {

[[noreturn]] void fail(const std::string& what, const std::string& folder, int error) {
  throw std::runtime_error("offloading to files: " + what + " in '" + folder + "': " + std::strerror(error) +
                           (error == ENOSPC || error == EDQUOT || error == EFBIG
                                ? ". Set nvme_path to a folder of a file system with enough space"
                                : ". Set nvme_path to another folder"));
}

/// Some file systems cannot reserve space other than by writing. Returns an error number, 0 for success.
int write_zeros(int fd, int64_t at, int64_t bytes) {
  constexpr int64_t kChunk = 4 << 20;
  const io::AlignedMemory zeros = io::try_aligned(kChunk);
  if (!zeros) return ENOMEM;
  std::memset(zeros.get(), 0, kChunk);
  while (bytes > 0) {
    const ssize_t done = ::pwrite(fd, zeros.get(), static_cast<size_t>(std::min(bytes, kChunk)), at);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return done < 0 ? errno : ENOSPC;
    at += done;
    bytes -= done;
  }
  return 0;
}

/// Not posix_fallocate: glibc's substitute writes single bytes, which files opened for O_DIRECT refuse.
int reserve_space(int fd, int64_t at, int64_t bytes) {
  while (::fallocate(fd, 0, at, bytes) != 0) {
    if (errno == EOPNOTSUPP || errno == ENOSYS) return write_zeros(fd, at, bytes);
    if (errno != EINTR) return errno;
  }
  return 0;
}

/// Opens a file that has no name. Some file systems cannot make one: there its name is removed at once.
int open_unnamed(const std::string& folder, int flags) {
  const int fd = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
  if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR)) return fd;
  std::string path = folder + "/deeptide-swap-XXXXXX";
  const int named = ::mkostemp(path.data(), O_CLOEXEC | flags);
  if (named >= 0) ::unlink(path.c_str());
  return named;
}

}  // namespace

DiskPlace DiskRegion::block(int64_t index) const {
  const auto count = static_cast<int64_t>(stripes_.size());
  const Stripe& stripe = stripes_[static_cast<size_t>(index % count)];
  const int64_t bytes = index + 1 == num_blocks_ ? last_bytes_ : kSwapBlockBytes;
  return {stripe.fd, stripe.begin + index / count * kSwapBlockBytes, bytes, stripe.folder};
}

SwapFile::SwapFile(std::vector<std::string> folders) : folders_(std::move(folders)), ends_(folders_.size(), 0) {
  DEEPTIDE_INVARIANT(!folders_.empty(), "offloading to files needs a folder");
  for (const std::string& folder : folders_) {
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    if (error) fail("cannot make the folder", folder, error.value());
    int fd = open_unnamed(folder, O_DIRECT);
    if (fd < 0 && errno == EINVAL) {  // a file system without O_DIRECT
      direct_ = false;
      fd = open_unnamed(folder, 0);
    }
    if (fd < 0) fail("cannot make a file", folder, errno);
    files_.push_back(fd);
  }
}

SwapFile::~SwapFile() {
  for (const int fd : files_) ::close(fd);
}

DiskRegion SwapFile::reserve(int64_t bytes) {
  DiskRegion region;
  region.num_blocks_ = (bytes + kSwapBlockBytes - 1) / kSwapBlockBytes;
  if (region.num_blocks_ == 0) return region;
  region.last_bytes_ = io::align_up(bytes - (region.num_blocks_ - 1) * kSwapBlockBytes);
  const size_t count = files_.size();
  std::vector<int64_t> needed(count, 0);  // by stripe of the region
  for (int64_t i = 0; i < region.num_blocks_; ++i) {
    needed[static_cast<size_t>(i) % count] += i + 1 == region.num_blocks_ ? region.last_bytes_ : kSwapBlockBytes;
  }
  for (size_t stripe = 0; stripe < count; ++stripe) {
    const size_t file = (next_stripe_ + stripe) % count;
    if (needed[stripe] > 0) {
      const int error = reserve_space(files_[file], ends_[file], needed[stripe]);
      if (error != 0) fail("cannot reserve " + std::to_string(needed[stripe]) + " bytes", folders_[file], error);
    }
    region.stripes_.push_back({files_[file], ends_[file], &folders_[file]});
    ends_[file] += needed[stripe];
  }
  next_stripe_ = (next_stripe_ + static_cast<size_t>(region.num_blocks_)) % count;
  return region;
}

int64_t SwapFile::reserved_bytes() const { return std::accumulate(ends_.begin(), ends_.end(), int64_t{0}); }

}  // namespace deeptide::tiers
