// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A libFuzzer target: whatever a manifest, a rank's table or a shard's header says, reading it ends in a value or in a
// CheckpointError. Built with clang's sanitizers alone; ctest runs it for some seconds.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "checkpoint/format/contents.h"
#include "checkpoint/load/extent_reader.h"

namespace deeptide::checkpoint {
namespace {

/// A file in memory, under a path that can be opened.
class MemoryFile {
 public:
  MemoryFile(const char* data, size_t bytes) : descriptor_(::memfd_create("fuzz", MFD_CLOEXEC)) {
    if (descriptor_ < 0 || ::write(descriptor_, data, bytes) != static_cast<ssize_t>(bytes)) std::abort();
  }
  ~MemoryFile() { ::close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  std::string folder() const { return "/proc/self/fd"; }
  std::string name() const { return std::to_string(descriptor_); }
  std::string path() const { return folder() + "/" + name(); }

 private:
  int descriptor_;
};

class Nowhere final : public ElementSink {
 public:
  char* memory(int64_t) override { return nullptr; }
  void put(int64_t, const char*, int64_t) override {}
};

void read_everything(const Table& table, const MemoryFile& file) {
  StreamedReads files(file.folder());
  for (const auto& [id, logical] : table) {
    for (const Extent& extent : logical.extents) {
      if (extent.region.numel() > (int64_t{1} << 20)) continue;  // a file of the size that a run has time for
      try {
        Nowhere nowhere;
        Extent here = extent;
        here.file = file.name();
        read_shared(files, logical, here, extent.region, nowhere);
      } catch (const CheckpointError&) {
      }
    }
  }
}

// A text that was accepted once is accepted when it was written again.
void check_manifest(const std::string& text) {
  const ManifestTable table = decode_manifest(text, "manifest");
  const MemoryFile file(text.data(), text.size());
  read_everything(table.tensors, file);
  if (table.manifest.version < kManifestVersion) return;
  const ManifestTable again = decode_manifest(encode(table), "again");
  if (again.tensors.size() != table.tensors.size() || again.nonce != table.nonce) std::abort();
}

void check_header(const std::string& bytes) {
  const MemoryFile file(bytes.data(), bytes.size());
  const Header header = read_header(File::open(file.path()));
  encode_header(header.entries, header.metadata);
}

}  // namespace
}  // namespace deeptide::checkpoint

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  using namespace deeptide::checkpoint;
  const std::string text(reinterpret_cast<const char*>(data), bytes);
  try {
    if (text.starts_with("{\"save\"")) {
      decode_rank_table(text, "table");
    } else if (text.starts_with("{")) {
      check_manifest(text);
    } else {
      check_header(text);
    }
  } catch (const deeptide::CheckpointError&) {  // anything else ends the run
  }
  return 0;
}
