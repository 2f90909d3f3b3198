// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Uses memfd, mmap, and the kernel's record of which pages are a process's own.
#include "device/memory/shared_memory.h"

#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "base/invariant.h"
#include "device/memory/idle_memory.h"
#include "device/memory/memory_limit.h"
#include "device/memory/pages.h"

namespace deeptide::device {

using at::Tensor;

int64_t page_size() {
  static const int64_t size = ::sysconf(_SC_PAGESIZE);
  return size;
}

namespace {

constexpr int64_t kWorthALook = 1 << 20;  // at the control groups' limits, which takes some 50 us
constexpr int64_t kRanksAtOnce = 64;      // that may take as much at the same moment
#ifndef MADV_POPULATE_WRITE
constexpr int MADV_POPULATE_WRITE = 23;  // Linux 5.14
#endif
#ifndef MFD_NOEXEC_SEAL
constexpr unsigned MFD_NOEXEC_SEAL = 8;  // Linux 6.3; a must where vm.memfd_noexec is 2
#endif

[[noreturn]] void refuse(const std::string& what) {
  const int error = errno;
  TORCH_CHECK(false, "deeptide: cannot ", what, ": ", std::strerror(error));
}

/// A pool answers this error by giving its idle buffers up.
[[noreturn]] void refuse_pages(int64_t bytes, const std::string& reason) {
  TORCH_CHECK_WITH(OutOfMemoryError, false, "deeptide: cannot take ", bytes, " bytes of shared memory: ", reason,
                   ". Give the job more memory, use more hosts or a smaller model.");
}

/// The kernel kills a process of a control group that is full, so it has to be asked before. Near a limit, ranks that
/// share `fd` look and take one after the other: together they would go beyond what each of them saw.
class Room {
 public:
  Room(int fd, int64_t bytes) {
    if (bytes < kWorthALook) return;
    const auto limit = tightest_memory_limit();
    if (!limit || limit->left / kRanksAtOnce >= bytes) return;
    turn_.emplace(fd);
    check(bytes);
  }

 private:
  /// Opens by itself when the process ends. Where the kernel has no such lock, looks may be out of date.
  struct Turn {
    explicit Turn(int file) : fd(::flock(file, LOCK_EX) == 0 ? file : -1) {}
    ~Turn() {
      if (fd >= 0) ::flock(fd, LOCK_UN);
    }
    Turn(const Turn&) = delete;
    std::lock_guard<std::mutex> among_threads{threads()};  // ranks as threads share the descriptor
    int fd;
  };

  static std::mutex& threads() {
    static std::mutex mutex;
    return mutex;
  }

  static void check(int64_t bytes) {
    std::optional<MemoryLimit> limit;
    const bool fits = take_before_idle([&] {
      limit = tightest_memory_limit();
      return !limit || limit->left >= bytes;
    });
    if (fits) return;
    refuse_pages(bytes, "the control group " + limit->group + " allows " + std::to_string(limit->limit) +
                            " bytes of memory, of which " + std::to_string(std::max<int64_t>(limit->left, 0)) +
                            " are left");
  }

  std::optional<Turn> turn_;
};

/// Returns an error number, 0 for success. Touching a page that the kernel cannot give would raise SIGBUS.
template <typename Call>
int result_of(Call call) {
  while (call() != 0) {
    if (errno != EINTR && errno != EAGAIN) return errno;
  }
  return 0;
}

int take_pages(int fd, char* data, int64_t offset, int64_t bytes) {
  int error = result_of([&] { return ::madvise(data + offset, bytes, MADV_POPULATE_WRITE); });
  if (error != EINVAL && error != ENOSYS && error != EPERM) return error;
  // An older kernel, or a sandbox. This takes pages near the calling core too.
  error = result_of([&] { return ::fallocate(fd, FALLOC_FL_KEEP_SIZE, offset, bytes); });
  if (error != EOPNOTSUPP && error != ENOSYS && error != EPERM) return error;
  for (int64_t at = offset; at < offset + bytes; at += page_size()) {
    __atomic_fetch_or(data + at, 0, __ATOMIC_RELAXED);  // without changing it
  }
  return 0;
}

/// Returns a descriptor, or -1.
int create_memory() {
  const int fd = ::memfd_create("deeptide", MFD_CLOEXEC | MFD_NOEXEC_SEAL);
  return fd >= 0 || errno != EINVAL ? fd : ::memfd_create("deeptide", MFD_CLOEXEC);
}

/// Maps `bytes` of `fd` at a multiple of a large page, so that large pages can serve if the system has them.
char* map(int fd, int64_t offset, int64_t bytes, int flags) {
  const int64_t reserved = bytes + kLargePage;
  void* base = MAP_FAILED;
  int error = 0;
  const bool found = take_before_idle([&] {  // a process may have few addresses (ulimit -v)
    base = ::mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    error = errno;
    return base != MAP_FAILED;
  });
  errno = error;
  if (!found) refuse("reserve " + std::to_string(bytes) + " bytes of addresses for shared memory");
  const auto begin = reinterpret_cast<int64_t>(base);
  const int64_t aligned = round_up(begin, kLargePage);
  char* start = reinterpret_cast<char*>(aligned);
  void* mapped = ::mmap(start, bytes, PROT_READ | PROT_WRITE, flags | MAP_FIXED | MAP_NORESERVE, fd, offset);
  if (mapped == MAP_FAILED) {
    error = errno;
    ::munmap(base, reserved);
    errno = error;
    refuse("map " + std::to_string(bytes) + " bytes of shared memory");
  }
  if (aligned > begin) ::munmap(base, aligned - begin);
  char* end = start + (bytes + page_size() - 1) / page_size() * page_size();
  char* reserved_end = static_cast<char*>(base) + reserved;
  if (reserved_end > end) ::munmap(end, reserved_end - end);
  return start;
}

Tensor tensor_at(char* data, int64_t numel, at::ScalarType dtype, std::function<void()> release) {
  return at::from_blob(
      data, {numel}, [release = std::move(release)](void*) { release(); }, at::TensorOptions().dtype(dtype));
}

// PAGEMAP_SCAN (Linux 6.7) is newer than the headers of the systems that we build on.
struct PageRegion {
  uint64_t start, end, categories;
};
struct PagemapScan {
  uint64_t size, flags, start, end, walk_end, regions, num_regions, max_pages;
  uint64_t category_inverted, category_mask, category_anyof, return_mask;
};
constexpr uint64_t kIsFile = 1 << 2, kIsPresent = 1 << 3, kIsSwapped = 1 << 4;
const unsigned long kPagemapScan = _IOWR('f', 16, PagemapScan);
constexpr uint64_t kEntryFile = 1ull << 61, kEntrySwapped = 1ull << 62, kEntryPresent = 1ull << 63;

/// Lists ranges of present or swapped pages that belong to no file; false if the kernel lacks the call.
bool scan_regions(int pagemap, uint64_t start, uint64_t end, std::vector<PageRegion>& found) {
  std::array<PageRegion, 256> regions;
  while (start < end) {
    PagemapScan scan{};
    scan.size = sizeof(scan);
    scan.start = start;
    scan.end = end;
    scan.regions = reinterpret_cast<uint64_t>(regions.data());
    scan.num_regions = regions.size();
    scan.category_inverted = kIsFile;
    scan.category_mask = kIsFile;
    scan.category_anyof = kIsPresent | kIsSwapped;
    const int count = ::ioctl(pagemap, kPagemapScan, &scan);
    if (count < 0) return false;
    found.insert(found.end(), regions.begin(), regions.begin() + count);
    if (scan.walk_end <= start) break;
    start = scan.walk_end;
  }
  return true;
}

/// Lists those ranges from the table of all pages, eight bytes each.
void read_entries(int pagemap, uint64_t start, uint64_t end, std::vector<PageRegion>& found) {
  const auto page = static_cast<uint64_t>(page_size());
  std::vector<uint64_t> entries(4096);
  for (uint64_t at = start; at < end;) {
    const uint64_t count = std::min<uint64_t>(entries.size(), (end - at + page - 1) / page);
    const auto offset = static_cast<off_t>(at / page * sizeof(uint64_t));
    const auto got = ::pread(pagemap, entries.data(), count * sizeof(uint64_t), offset);
    if (got <= 0) refuse("read /proc/self/pagemap");
    for (uint64_t i = 0; i < static_cast<uint64_t>(got) / sizeof(uint64_t); ++i, at += page) {
      const uint64_t entry = entries[i];
      if ((entry & kEntryFile) || !(entry & (kEntryPresent | kEntrySwapped))) continue;
      if (!found.empty() && found.back().end == at) {
        found.back().end = at + page;
      } else {
        found.push_back({at, at + page, 0});
      }
    }
  }
}

std::vector<PageRegion> own_pages(const char* data, int64_t bytes, bool by_entries) {
  static const int pagemap = ::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  static const pid_t opened_by = ::getpid();
  int fd = pagemap;
  if (opened_by != ::getpid()) fd = ::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);  // a forked child's own
  if (fd < 0) refuse("open /proc/self/pagemap");
  const auto start = reinterpret_cast<uint64_t>(data);
  const uint64_t end = start + static_cast<uint64_t>((bytes + page_size() - 1) / page_size() * page_size());
  std::vector<PageRegion> found;
  if (by_entries || !scan_regions(fd, start, end, found)) {
    found.clear();
    read_entries(fd, start, end, found);
  }
  if (fd != pagemap) ::close(fd);
  return found;
}

/// The shared memory that this process has created, by address.
class Created {
 public:
  static Created& instance() {
    static auto* created = new Created;  // never destroyed: memory may outlive static destruction
    return *created;
  }
  void add(const std::shared_ptr<SharedMemory>& memory) {
    std::lock_guard lock(mutex_);
    by_address_[memory->address()] = memory;
  }
  void remove(const std::string& address) {
    std::lock_guard lock(mutex_);
    by_address_.erase(address);
  }
  std::shared_ptr<SharedMemory> find(const std::string& address) {
    std::lock_guard lock(mutex_);
    const auto found = by_address_.find(address);
    return found == by_address_.end() ? nullptr : found->second.lock();
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::weak_ptr<SharedMemory>> by_address_;
};

}  // namespace

SharedMemory::SharedMemory(int fd, int64_t size) : fd_(fd), size_(size), mapped_by_(::getpid()) {
  try {
    data_ = map(fd_, 0, size_, MAP_SHARED);
  } catch (...) {
    ::close(fd_);
    throw;
  }
}

SharedMemory::~SharedMemory() {
  Created::instance().remove(address());  // before another object gets the descriptor's number
  ::munmap(data_, size_);
  ::close(fd_);
}

std::shared_ptr<SharedMemory> SharedMemory::create(int64_t bytes) {
  const int fd = create_memory();
  if (fd < 0) refuse("create shared memory");
  if (::ftruncate(fd, bytes) != 0) {
    ::close(fd);
    refuse("size shared memory to " + std::to_string(bytes) + " bytes");
  }
  auto memory = std::shared_ptr<SharedMemory>(new SharedMemory(fd, bytes));
  Created::instance().add(memory);
  return memory;
}

std::string SharedMemory::address() const {
  return "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(fd_);
}

std::shared_ptr<SharedMemory> SharedMemory::open(const std::string& address) {
  if (auto own = Created::instance().find(address); own && own->mapped_by_ == ::getpid()) return own;
  const int fd = ::open(address.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) refuse("open the shared memory of another rank at " + address);
  struct stat status {};
  if (::fstat(fd, &status) != 0) {
    ::close(fd);
    refuse("inspect the shared memory of another rank at " + address);
  }
  return std::shared_ptr<SharedMemory>(new SharedMemory(fd, status.st_size));
}

Tensor SharedMemory::view(int64_t offset, int64_t numel, at::ScalarType dtype, std::function<void()> on_release) {
  DEEPTIDE_INVARIANT(offset >= 0 && offset + numel * static_cast<int64_t>(c10::elementSize(dtype)) <= size_, numel,
                     " elements from byte ", offset, " lie outside");
  return tensor_at(data_ + offset, numel, dtype, [self = shared_from_this(), on_release = std::move(on_release)] {
    if (on_release) on_release();
  });
}

void SharedMemory::populate(int64_t offset, int64_t bytes) {
  const int64_t first = offset / page_size() * page_size();
  const int64_t last = std::min((offset + bytes + page_size() - 1) / page_size() * page_size(), size_);
  if (last <= first) return;
  const Room room(fd_, last - first);
  int error = 0;
  take_before_idle([&] { return (error = take_pages(fd_, data_, first, last - first)) == 0; });
  if (error != 0) {
    const bool forbidden = error == EFAULT;  // what the kernel says instead of SIGBUS
    refuse_pages(last - first, forbidden ? "the kernel has too little memory for it, or vm.overcommit_memory is 2 and "
                                           "its limit is reached"
                                         : std::strerror(error));
  }
}

void SharedMemory::prefer_large_pages(int64_t offset, int64_t bytes) {
  ::madvise(data_ + offset, bytes, MADV_HUGEPAGE);
}

void SharedMemory::discard(int64_t offset, int64_t bytes) {
  if (::getpid() != mapped_by_) return;
  ::fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes);
}

PrivateView::PrivateView(const std::shared_ptr<SharedMemory>& memory, int64_t offset, int64_t bytes)
    : memory_(memory), bytes_(bytes) {
  if (bytes_ > 0) data_ = map(memory->descriptor(), offset, bytes, MAP_PRIVATE);
}

PrivateView::~PrivateView() {
  if (bytes_ > 0) ::munmap(data_, bytes_);
}

Tensor PrivateView::tensor(int64_t offset, int64_t numel, at::ScalarType dtype) {
  DEEPTIDE_INVARIANT(offset >= 0 && offset + numel * static_cast<int64_t>(c10::elementSize(dtype)) <= bytes_, numel,
                     " elements from byte ", offset, " lie outside");
  return tensor_at(data_ + offset, numel, dtype, [self = shared_from_this()] {});
}

bool PrivateView::any_written(const std::function<bool(int64_t, int64_t)>& visit, bool by_entries) const {
  if (bytes_ == 0) return false;
  const auto start = reinterpret_cast<uint64_t>(data_);
  for (const PageRegion& region : own_pages(data_, bytes_, by_entries)) {
    const auto begin = static_cast<int64_t>(region.start - start);
    const auto end = std::min(static_cast<int64_t>(region.end - start), bytes_);
    if (visit(begin, end)) return true;
  }
  return false;
}

void PrivateView::forget() {
  // Fails for locked memory (mlockall): the view would keep showing values that others have long replaced.
  if (bytes_ > 0 && ::madvise(data_, bytes_, MADV_DONTNEED) != 0) refuse("release written pages of shared memory");
}

void PrivateView::check(const std::shared_ptr<SharedMemory>& memory) {
  memory->populate(0, page_size());
  const auto view = std::make_shared<PrivateView>(memory, 0, page_size());
  const auto written = [&] { return view->any_written([](int64_t, int64_t) { return true; }); };
  volatile char* first = view->data_;
  bool works = *first == 0 && !written();
  *first = 1;
  works = works && written() && *memory->data() == 0;
  view->forget();
  TORCH_CHECK(works && *first == 0 && !written(),
              "deeptide: this system does not report which pages of shared memory a process has written");
}

}  // namespace deeptide::device
