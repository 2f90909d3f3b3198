// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Files and folders: every failure is a CheckpointError with path, bytes, errno's text and the cure.
#include "checkpoint/format/file_io.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

namespace deeptide::checkpoint {
namespace {

// Linux moves less than 2 GiB per call, whatever the caller requests.
constexpr int64_t kMaxTransferBytes = int64_t{1} << 30;
constexpr int64_t kAheadBytes = int64_t{1} << 20;

std::atomic<Refuse> g_refuse = nullptr;

/// Fails as the test in charge wishes.
void ask(const char* action, const std::string& path) {
  if (const int error = refusal(action, path); error != 0) fail(action, path, error);
}

const char* cure(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return "; free some space or save to another folder";
    case EFBIG:
      return "; raise the file size limit (ulimit -f) or save to another filesystem";
    case EACCES:
    case EPERM:
    case EROFS:
      return "; check the folder's owner and permissions, or use another folder";
    case ENOENT:
      return "; check the path: is it on a filesystem that every rank sees?";
    default:
      return "";
  }
}

std::string span_text(const char* verb, int64_t bytes, int64_t offset) {
  return std::string(verb) + " " + std::to_string(bytes) + " bytes at offset " + std::to_string(offset) + " of";
}

int open_file(const std::string& path, int flags, const char* action) {
  int descriptor;
  do {
    descriptor = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
  } while (descriptor < 0 && errno == EINTR);
  if (descriptor < 0) fail(action, path, errno);
  return descriptor;
}

// True when done; false when the filesystem cannot exchange.
bool exchange_paths(const std::string& from, const std::string& to) {
  ask("move", from);
#ifdef RENAME_EXCHANGE
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0) return true;
  if (errno != EINVAL && errno != ENOSYS && errno != ENOTSUP) fail("move " + from + " to", to, errno);
#endif
  return false;
}

std::string replace_in_two_steps(const std::string& from, const std::string& to) {
  const std::string aside = aside_path(to);
  remove_quietly(aside);
  move_path(to, aside);
  try {
    move_path(from, to);
  } catch (const CheckpointError&) {
    move_path(aside, to);
    throw;
  }
  return aside;
}

}  // namespace

void refuse_with(Refuse refuse) { g_refuse = refuse; }
int refusal(const char* action, const std::string& path) {
  const Refuse refuse = g_refuse;
  return refuse ? refuse(action, path) : 0;
}

void fail(const std::string& action, const std::string& path, int error) {
  throw CheckpointError("cannot " + action + " " + path + ": " + std::strerror(error) + cure(error));
}

File::File(std::string path, int descriptor, bool direct)
    : path_(std::move(path)), descriptor_(descriptor), direct_(direct) {}
File::File(File&& other) noexcept
    : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)), direct_(other.direct_) {}
File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

File File::create_direct(const std::string& path) {
  ask("create", path);
  constexpr int kFlags = O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC;
  const int descriptor = ::open(path.c_str(), kFlags | O_DIRECT, 0666);
  if (descriptor >= 0) return {path, descriptor, true};
  return {path, open_file(path, kFlags, "create")};
}

File File::create(const std::string& path) {
  ask("create", path);
  return File(path, open_file(path, O_WRONLY | O_CREAT | O_TRUNC, "create"));
}

File File::open_direct(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
  if (descriptor >= 0) return {path, descriptor, true};
  return open(path);
}

File File::open(const std::string& path) { return File(path, open_file(path, O_RDONLY, "open")); }

int64_t File::size() const {
  struct stat status;
  if (::fstat(descriptor_, &status) != 0) fail("read the size of", path_, errno);
  // A folder opens like a file and has a size too.
  if (!S_ISREG(status.st_mode)) throw CheckpointError("cannot read " + path_ + ": it is not a regular file");
  return status.st_size;
}

void File::write_at(const void* data, int64_t bytes, int64_t offset) const {
  if (const int error = refusal("write", path_); error != 0 && bytes > 0) {
    fail(span_text("write", bytes, offset), path_, error);
  }
  const char* cursor = static_cast<const char*>(data);
  for (int64_t left = bytes; left > 0;) {
    const ssize_t done = ::pwrite(descriptor_, cursor, std::min(left, kMaxTransferBytes), offset);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail(span_text("write", left, offset), path_, errno);
    cursor += done;
    offset += done;
    left -= done;
  }
}

void File::read_at(void* data, int64_t bytes, int64_t offset) const {
  char* cursor = static_cast<char*>(data);
  for (int64_t left = bytes; left > 0;) {
    const ssize_t done = ::pread(descriptor_, cursor, std::min(left, kMaxTransferBytes), offset);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail(span_text("read", left, offset), path_, errno);
    if (done == 0) {
      throw CheckpointError("cannot " + span_text("read", left, offset) + " " + path_ +
                            ": the file ends there; it is truncated, use another checkpoint");
    }
    cursor += done;
    offset += done;
    left -= done;
  }
}

bool File::is_cached(int64_t bytes, int64_t offset) const {
  const int64_t page = ::sysconf(_SC_PAGESIZE), begin = offset / page * page;
  const auto length = static_cast<size_t>(offset + bytes - begin);
  void* const mapped = ::mmap(nullptr, length, PROT_READ, MAP_SHARED, descriptor_, begin);
  if (mapped == MAP_FAILED) return true;
  std::vector<unsigned char> pages((length + static_cast<size_t>(page) - 1) / static_cast<size_t>(page));
  const bool told = ::mincore(mapped, length, pages.data()) == 0;
  ::munmap(mapped, length);
  const auto cached = std::count_if(pages.begin(), pages.end(), [](unsigned char each) { return (each & 1) != 0; });
  return !told || 2 * cached >= std::ssize(pages);
}

void File::will_read(int64_t bytes, int64_t offset) const {
  // The kernel fetches no more of one request than its device takes at once.
  for (const int64_t end = offset + bytes; offset < end; offset += kAheadBytes) {
    ::posix_fadvise(descriptor_, offset, std::min(kAheadBytes, end - offset), POSIX_FADV_WILLNEED);
  }
}

void File::will_sync(int64_t bytes, int64_t offset) const {
  ::sync_file_range(descriptor_, offset, bytes, SYNC_FILE_RANGE_WRITE);
}

void File::cut(int64_t bytes) const {
  int done;
  do {
    done = ::ftruncate(descriptor_, bytes);
  } while (done != 0 && errno == EINTR);
  if (done != 0) fail("cut to " + std::to_string(bytes) + " bytes", path_, errno);
}

void File::sync() const {
  ask("flush", path_);
  if (::fsync(descriptor_) != 0) fail("flush", path_, errno);
}

std::string read_text(const std::string& path) {
  const File file = File::open(path);
  std::string text(static_cast<size_t>(file.size()), '\0');
  file.read_at(text.data(), static_cast<int64_t>(text.size()), 0);
  return text;
}

void write_text(const std::string& path, const std::string& text) {
  const File file = File::create(path);
  file.write_at(text.data(), static_cast<int64_t>(text.size()), 0);
  file.sync();
}

bool exists(const std::string& path) {
  struct stat status;
  return ::lstat(path.c_str(), &status) == 0;
}

bool is_folder(const std::string& path) {
  struct stat status;
  return ::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

void make_folders(const std::string& path) {
  ask("create the folder", path);
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) fail("create the folder", path, error.value());
}

void sync_folder(const std::string& path) {
  const int descriptor = open_file(path, O_RDONLY | O_DIRECTORY, "open the folder");
  const int error = ::fsync(descriptor) == 0 ? 0 : errno;
  ::close(descriptor);
  // Some network filesystems have no fsync for folders and need none.
  if (error != 0 && error != EINVAL && error != ENOTSUP) fail("flush the folder", path, error);
}

std::vector<std::string> list_folder(const std::string& path) try {
  std::vector<std::string> names;
  for (const auto& item : std::filesystem::directory_iterator(path)) names.push_back(item.path().filename().string());
  return names;
} catch (const std::filesystem::filesystem_error& error) {
  fail("list the folder", path, error.code().value());
}

void move_path(const std::string& from, const std::string& to) {
  ask("move", from);
  if (::rename(from.c_str(), to.c_str()) != 0) fail("move " + from + " to", to, errno);
}

bool move_quietly(const std::string& from, const std::string& to) noexcept {
  return ::rename(from.c_str(), to.c_str()) == 0;
}

void remove_quietly(const std::string& path) noexcept {
  std::error_code ignored;
  std::filesystem::remove_all(path, ignored);
}

std::string aside_path(const std::string& path) { return path + ".replaced"; }

std::string replace_folder(const std::string& from, const std::string& to, bool exchange) {
  std::string replaced;
  if (!exists(to)) {
    move_path(from, to);
    if (exists(aside_path(to))) replaced = aside_path(to);  // a crash left it there between the two steps
  } else if (exchange && exchange_paths(from, to)) {
    replaced = from;
  } else {
    replaced = replace_in_two_steps(from, to);
  }
  sync_folder(std::filesystem::path(to).parent_path().string());
  return replaced;
}

}  // namespace deeptide::checkpoint
