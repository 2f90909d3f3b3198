// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Looks the sources of recorded copies up among the files that this process maps.
#include "engine/bind/file_values.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include "base/libraries/format.h"
#include "base/sha256.h"
#include "deferred/memory.h"

namespace deeptide::engine {

using at::Tensor;
using sharding::Parameter;
using sharding::Unit;

namespace {

/// Pages of files, as the kernel lists them.
class FilePages {
 public:
  /// Names the file and the place in it where `address` lies; empty: in no file.
  std::string place_of(const void* address) {
    if (ranges_.empty()) read();  // an engine whose model has values needs none
    const auto at = reinterpret_cast<uint64_t>(address);
    for (const Range& range : ranges_) {
      if (at >= range.begin && at < range.end) return format_text("{} {}", range.name, range.offset + at - range.begin);
    }
    return "";
  }

 private:
  struct Range {
    uint64_t begin, end, offset;
    std::string name;
  };

  void read() {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) add(line);
  }

  /// "begin-end rights offset device inode path": without an inode there is no file.
  void add(const std::string& line) {
    Range range{};
    char dash = 0;
    std::string rights, device;
    uint64_t inode = 0;
    std::istringstream fields(line);
    fields >> std::hex >> range.begin >> dash >> range.end >> rights >> range.offset >> device >> std::dec >> inode;
    std::getline(fields >> std::ws, range.name);
    if (!fields || inode == 0) return;
    range.name = range.name.substr(range.name.rfind('/') + 1);  // folders may differ between hosts
    ranges_.push_back(std::move(range));
  }

  std::vector<Range> ranges_;
};

bool is_sharded(const Unit& unit) { return unit.memory() == sharding::UnitMemory::sharded; }

/// Names the places that a unit's values come from; empty: they are not of files.
std::string sources_text(const Unit& unit, FilePages& pages) {
  if (!is_sharded(unit)) return "";
  std::string text;
  bool has_places = false;
  for (const Parameter& p : unit.parameters()) {
    const Tensor& tensor = p.tensors.front();
    text += p.name + " ";
    if (!deferred::is_deferred(tensor)) continue;
    has_places = true;
    const Tensor source = deferred::source_of(tensor);
    const std::string place = source.defined() && source.is_contiguous() ? pages.place_of(source.const_data_ptr()) : "";
    if (place.empty()) return "";
    text += format_text("{} {} {} {}\n", place, source.nbytes(), c10::toString(source.scalar_type()),
                        c10::toString(tensor.scalar_type()));
  }
  return has_places ? text : "";
}

uint64_t digest_of_text(const std::string& text) {
  if (text.empty()) return 0;
  uint64_t digest = 0;
  const auto hash = sha256(text);
  std::memcpy(&digest, hash.data(), sizeof digest);
  return digest;
}

}  // namespace

std::vector<bool> find_units_of_files(Channels& channels, const std::vector<std::unique_ptr<Unit>>& units) {
  if (std::none_of(units.begin(), units.end(), [](const auto& unit) { return is_sharded(*unit); })) {
    return std::vector<bool>(units.size(), false);
  }
  std::vector<uint64_t> own;
  FilePages pages;
  for (const auto& unit : units) own.push_back(digest_of_text(sources_text(*unit, pages)));
  const auto all =
      channels.rounds().exchange_all(std::span<const uint64_t>(own), {"start", "comparing the files of weights"});
  std::vector<bool> found;
  for (size_t u = 0; u < units.size(); ++u) {
    bool alike = own[u] != 0;
    for (size_t i = u; i < all.size(); i += units.size()) alike = alike && all[i] == own[u];
    found.push_back(alike);
  }
  return found;
}

void read_own_slice(const Unit& unit, comm::Group& holders, Tensor whole) {
  const int64_t begin = unit.shard_begin(), end = begin + unit.layout().shard;
  whole.narrow(0, begin, end - begin).zero_();
  std::vector<Tensor> small, places;
  for (const Parameter& p : unit.parameters()) {
    const Tensor& tensor = p.tensors.front();
    if (!deferred::is_deferred(tensor)) {
      small.push_back(tensor.detach().to(unit.layout().dtype).reshape({-1}));
      places.push_back(whole.narrow(0, p.offset, p.numel));
      continue;
    }
    const int64_t first = std::max(begin, p.offset), last = std::min(end, p.offset + p.numel);
    if (first >= last) continue;
    const Tensor part = deferred::source_of(tensor).view({-1}).narrow(0, first - p.offset, last - first);
    whole.narrow(0, first, last - first).copy_(part.to(tensor.scalar_type()));  // rounded as the copy would have
  }
  if (small.empty()) return;
  Tensor values = at::cat(small).to(whole.device());
  auto pending = holders.broadcast(values, 0);
  holders.wait(pending, {"start", "broadcasting small parameters of unit '" + unit.layout().name + "' from rank 0"});
  int64_t next = 0;
  for (const Tensor& place : places) {
    place.copy_(values.narrow(0, next, place.numel()));
    next += place.numel();
  }
}

}  // namespace deeptide::engine
