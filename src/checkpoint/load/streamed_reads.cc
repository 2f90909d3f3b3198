// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Fetches announced parts of files, and copies from them.
#include "checkpoint/load/streamed_reads.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace deeptide::checkpoint {
namespace {

constexpr size_t kLookahead = 64;  // parts that a reader may skip

}  // namespace

StreamedReads::StreamedReads(std::string folder, Through through) : StreamedReads(std::move(folder), through, {}) {}

StreamedReads::StreamedReads(std::string folder, Through through, Sizes sizes)
    : folder_(std::move(folder)), through_(through), sizes_(sizes) {}

StreamedReads::~StreamedReads() { queue_.reset(); }

bool StreamedReads::meet(const Part& a, const Part& b) {
  return a.file == b.file && a.begin < b.end && b.begin < a.end;
}

int StreamedReads::number_of(const std::string& file) {
  const auto [found, added] = numbers_.try_emplace(file, static_cast<int>(names_.size()));
  if (added) names_.push_back(file);
  return found->second;
}

void StreamedReads::announce(const std::string& file, int64_t offset, int64_t bytes) {
  const int number = number_of(file);
  const int64_t end = offset + bytes;
  if (next_ < coming_.size() && coming_.back().file == number) {
    Part& last = coming_.back();
    const int64_t most = last.begin + sizes_.part;
    if (offset >= last.begin && offset <= last.end + kMaxGapBytes && offset < most) {
      last.end = std::max(last.end, std::min(end, most));
      offset = std::max(offset, last.end);
    }
  }
  for (; offset < end; offset += sizes_.part) coming_.push_back({number, offset, std::min(end, offset + sizes_.part)});
}

std::shared_ptr<const StreamedReads::Opened> StreamedReads::open(int file) {
  std::weak_ptr<const Opened>& known = opened_[file];
  if (auto opened = known.lock()) return opened;
  const std::string whole = path(names_[static_cast<size_t>(file)]);
  auto opened = std::make_shared<const Opened>(Opened{File::open(whole), File::open_direct(whole)});
  known = opened;
  return opened;
}

void StreamedReads::read(const std::string& file, int64_t offset, void* data, int64_t bytes) {
  const Part wanted{number_of(file), offset, offset + bytes};
  reading_ = open(wanted.file);
  follow(wanted);
  refill();
  const auto to = [&](int64_t at) { return static_cast<char*>(data) + (at - offset); };
  int64_t at = offset;
  while (!fetches_.empty() && meet(fetches_.front().part, wanted)) {
    Fetch& first = fetches_.front();
    land(first);
    const int64_t begin = std::max(at, first.first), end = std::min(wanted.end, first.first + first.bytes);
    if (begin < end) {
      reading_->file.read_at(to(at), begin - at, at);
      std::memcpy(to(begin), first.memory.get() + (begin - first.first), static_cast<size_t>(end - begin));
      at = end;
    }
    if (first.part.end > wanted.end) break;  // who reads on wants the rest of it
    drop_first();
    refill();
  }
  reading_->file.read_at(to(at), wanted.end - at, at);
}

/// Drops what was announced before the first part that is wanted now.
void StreamedReads::follow(const Part& wanted) {
  const auto meets = [&](const Part& part) { return meet(part, wanted); };
  const auto found = std::find_if(fetches_.begin(), fetches_.end(), [&](const Fetch& f) { return meets(f.part); });
  if (found != fetches_.end()) {
    for (auto before = found - fetches_.begin(); before > 0; --before) drop_first();
    return;
  }
  const auto begin = coming_.begin() + static_cast<int64_t>(next_);
  const auto last = begin + static_cast<int64_t>(std::min(kLookahead, coming_.size() - next_));
  const auto later = std::find_if(begin, last, meets);
  if (later == last) return;
  while (!fetches_.empty()) drop_first();
  next_ = static_cast<size_t>(later - coming_.begin());
}

void StreamedReads::refill() {
  while (fetches_.size() < sizes_.parts && next_ < coming_.size()) {
    fetches_.emplace_back();
    fetches_.back().part = coming_[next_++];
    start(fetches_.back());
  }
}

void StreamedReads::start(Fetch& fetch) {
  const int64_t bytes = fetch.part.end - fetch.part.begin;
  try {
    fetch.opened = open(fetch.part.file);
    const File& file = fetch.opened->file;
    const bool direct = through_ == Through::drive && bytes >= sizes_.least && fetch.opened->direct.is_direct() &&
                        !file.is_cached(bytes, fetch.part.begin);
    if (direct) return start_direct(fetch);
    file.will_read(bytes, fetch.part.begin);
  } catch (const CheckpointError&) {
    fetch.opened.reset();  // whoever reads it is told
  }
}

/// Begins and ends where O_DIRECT can, within the file.
void StreamedReads::start_direct(Fetch& fetch) {
  const int64_t first = io::align_down(fetch.part.begin);
  const int64_t last = std::min(io::align_up(fetch.part.end), io::align_down(fetch.opened->file.size()));
  if (last <= first) return;
  if (idle_.empty()) idle_.push_back(io::try_aligned(sizes_.part + io::kAlignment));
  fetch.memory = std::move(idle_.back());
  idle_.pop_back();
  if (!fetch.memory) return;  // it is read through the page cache, which needs none
  if (!queue_) queue_ = io::make_queue(static_cast<int>(sizes_.parts));
  fetch.first = first;
  fetch.bytes = last - first;
  fetch.ticket = queue_->start({fetch.opened->direct.descriptor(), first, fetch.memory.get(), fetch.bytes, true});
}

/// Waits for what is under way. If it fails, its bytes are read again, which says why.
void StreamedReads::land(Fetch& fetch) {
  if (fetch.ticket == 0) return;
  if (queue_->wait(std::exchange(fetch.ticket, 0)) != 0) fetch.bytes = 0;
  direct_bytes_ += fetch.bytes;
}

void StreamedReads::drop_first() {
  Fetch& first = fetches_.front();
  land(first);
  if (first.memory) idle_.push_back(std::move(first.memory));
  fetches_.pop_front();
}

}  // namespace deeptide::checkpoint
