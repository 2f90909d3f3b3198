// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads of a folder's files that were announced: they are under way before they are asked for.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/format/file_io.h"
#include "io/aligned.h"
#include "io/queue.h"

namespace deeptide::checkpoint {

/// Reading this many unwanted bytes takes less time than another request.
inline constexpr int64_t kMaxGapBytes = int64_t{64} << 10;

/// Fetches what was announced in its order, some parts ahead, past the page cache where the filesystem can and the
/// cache does not have it already: that takes a twentieth of the processor's time. Reads need not be announced, nor be
/// what was. Used by one thread, within one call: no forked child has it.
class StreamedReads {
 public:
  enum class Through : uint8_t {
    drive,
    page_cache,  // other processes of this host read the same bytes: the drive gives them once
  };
  /// Units: bytes.
  struct Sizes {
    int64_t part = int64_t{4} << 20;   // fetched at once
    int64_t least = int64_t{1} << 18;  // a smaller one goes through the page cache
    size_t parts = 4;                  // under way at a time
  };

  explicit StreamedReads(std::string folder, Through through = Through::drive);
  StreamedReads(std::string folder, Through through, Sizes sizes);
  /// Waits for what is under way.
  ~StreamedReads();
  StreamedReads(const StreamedReads&) = delete;

  /// Says what is read after all that was announced before. A hint: nothing fails here.
  void announce(const std::string& file, int64_t offset, int64_t bytes);
  /// Errors: as File::open and File::read_at.
  void read(const std::string& file, int64_t offset, void* data, int64_t bytes);
  const std::string& folder() const { return folder_; }
  std::string path(const std::string& file) const { return folder_ + "/" + file; }
  /// How many bytes came past the page cache.
  int64_t direct_bytes() const { return direct_bytes_; }

 private:
  struct Opened {
    File file;
    File direct;  // the same, past the page cache; else not is_direct()
  };
  struct Part {
    int file = 0;
    int64_t begin = 0, end = 0;
  };
  struct Fetch {
    Part part;
    std::shared_ptr<const Opened> opened;  // null: not this way
    io::AlignedMemory memory;
    int64_t first = 0, bytes = 0;  // of the file, in memory
    io::Queue::Ticket ticket = 0;  // 0: not under way
  };

  static bool meet(const Part& a, const Part& b);
  int number_of(const std::string& file);
  std::shared_ptr<const Opened> open(int file);
  void follow(const Part& wanted);
  void refill();
  void start(Fetch& fetch);
  void start_direct(Fetch& fetch);
  void land(Fetch& fetch);
  void drop_first();

  std::string folder_;
  Through through_;
  Sizes sizes_;
  std::vector<std::string> names_;
  std::map<std::string, int> numbers_;
  std::map<int, std::weak_ptr<const Opened>> opened_;
  std::shared_ptr<const Opened> reading_;  // what was read last
  std::vector<Part> coming_;               // from next_ on
  size_t next_ = 0;
  std::deque<Fetch> fetches_;  // in the order of the announcements
  std::vector<io::AlignedMemory> idle_;
  std::unique_ptr<io::Queue> queue_;  // null: nothing was fetched yet
  int64_t direct_bytes_ = 0;
};

}  // namespace deeptide::checkpoint
