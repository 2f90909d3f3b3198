// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// libFuzzer's target: any bytes as a file of torch.save, and as a pickle alone. They end in records or CheckpointError.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <set>
#include <string>

#include "checkpoint/imports/archives/torch_file.h"

namespace {

using deeptide::CheckpointError;
using deeptide::checkpoint::Pickle;
using deeptide::checkpoint::PickleValue;
using deeptide::checkpoint::TorchFile;

/// A file in memory under a path, for as long as it lives.
class MemoryFile {
 public:
  MemoryFile(const uint8_t* data, size_t size) : descriptor_(::memfd_create("fuzz", 0)) {
    if (descriptor_ < 0 || ::write(descriptor_, data, size) != static_cast<ssize_t>(size)) __builtin_trap();
  }
  ~MemoryFile() { ::close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  std::string path() const { return "/proc/self/fd/" + std::to_string(descriptor_); }

 private:
  int descriptor_;
};

/// Asks each value what every reader asks.
void visit(const TorchFile* file, const PickleValue& root) {
  std::set<const PickleValue*> seen{&root};
  std::deque<const PickleValue*> next{&root};
  const auto add = [&](const PickleValue* value) {
    if (value != nullptr && seen.insert(value).second) next.push_back(value);
  };
  for (; !next.empty(); next.pop_front()) {
    const PickleValue& value = *next.front();
    for (const PickleValue* item : value.items) add(item);
    for (const auto& [key, entry] : value.entries) {
      add(key);
      add(entry);
    }
    add(value.callee);
    add(value.arguments);
    add(value.state);
    value.find("state_dict");
    if (file == nullptr) continue;
    try {
      if (const auto tensor = file->tensor(value)) {
        if (tensor->numel() < 0 || tensor->span() < 0) __builtin_trap();
        tensor->is_contiguous();
      }
      file->number(value);
    } catch (const CheckpointError&) {  // of this value; others may be whole
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const Pickle pickle({reinterpret_cast<const char*>(data), size}, "input");
    visit(nullptr, pickle.root());
  } catch (const CheckpointError&) {
  }
  try {
    const MemoryFile memory(data, size);
    const TorchFile file(memory.path());
    visit(&file, file.root());
  } catch (const CheckpointError&) {
  }
  return 0;
}
