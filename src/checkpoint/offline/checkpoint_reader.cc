// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Opens checkpoints and reads ranges of their tensors, without torch's libraries.
#include <algorithm>
#include <filesystem>
#include <iterator>
#include <memory>
#include <optional>

#include "base/libraries/nlohmann.h"
#include "checkpoint/format/checkpoint_paths.h"
#include "checkpoint/format/file_io.h"
#include "checkpoint/load/extent_reader.h"
#include "checkpoint/load/other_folders.h"
#include "checkpoint/load/streamed_reads.h"
#include "checkpoint/offline/writers/parts.h"
#include "deeptide/errors.h"

namespace deeptide {

using checkpoint::Extent;
using checkpoint::Logical;
using checkpoint::Region;

namespace {

constexpr size_t kNamedTensors = 5;

CheckpointTensor describe(const Logical& logical) {
  const int64_t numel = checkpoint::numel_of(logical.shape, logical.key);
  return {logical.id.name, logical.id.role.text(),
          logical.shape,   checkpoint::dtype_name(logical.dtype),
          numel,           numel * checkpoint::element_bytes(logical.dtype)};
}

class MemorySink final : public checkpoint::ElementSink {
 public:
  MemorySink(char* to, int64_t width) : to_(to), width_(width) {}
  char* memory(int64_t position) override { return to_ + position * width_; }
  void put(int64_t position, const char* elements, int64_t count) override {
    std::copy_n(elements, count * width_, to_ + position * width_);
  }

 private:
  char* to_;
  int64_t width_;
};

// One past the last element of a block that begins at `begin`: a piece's end, or that of a hashed block in it.
int64_t block_end(const Logical& logical, int64_t begin, int64_t numel) {
  const int64_t block = checkpoint::kHashedBlockBytes / checkpoint::element_bytes(logical.dtype);
  for (const Extent& extent : logical.extents) {
    if (extent.region.sizes.size() != 1) continue;
    const int64_t first = extent.region.offsets[0];
    const int64_t last = first + extent.region.sizes[0];
    if (begin < first || begin >= last) continue;
    return std::min(last, begin + block - (begin - first) % block);
  }
  return std::min(numel, begin + block);
}

// Names that contain the wanted one, or are contained in it: what a typing error or a missing prefix leaves.
std::string resembling(const std::vector<CheckpointTensor>& tensors, const std::string& name) {
  std::string text;
  size_t count = 0;
  for (const CheckpointTensor& tensor : tensors) {
    const bool resembles = tensor.name.find(name) != std::string::npos || name.find(tensor.name) != std::string::npos;
    if (!resembles || count++ >= kNamedTensors) continue;
    text += (text.empty() ? "; it has '" : ", '") + tensor.name + "' as " + tensor.role;
  }
  return text;
}

void read_into(checkpoint::StreamedReads& files, const Logical& logical, int64_t begin, int64_t end, void* to) {
  const Region wanted = Region::range(begin, end);
  MemorySink sink(static_cast<char*>(to), checkpoint::element_bytes(logical.dtype));
  int64_t held = 0;
  for (const Extent& extent : logical.extents) {
    const int64_t shared = checkpoint::num_shared(logical.shape, extent.region, wanted);
    if (shared == 0) continue;
    held += shared;
    read_shared(files, logical, extent, wanted, sink);
  }
  if (held != end - begin) {
    throw CheckpointError("'" + logical.key + "': " + std::to_string(end - begin - held) + " elements of [" +
                          std::to_string(begin) + ", " + std::to_string(end) + ") are in no file of " + files.folder() +
                          "; use another checkpoint");
  }
}

}  // namespace

const Logical& CheckpointReader::Parts::logical(const CheckpointTensor& tensor) const {
  const auto found = logicals.find({tensor.name, tensor.role});
  if (found != logicals.end()) return *found->second;
  throw CheckpointError("the checkpoint " + contents.folder + " has no '" + tensor.name + "' as " + tensor.role +
                        resembling(tensors, tensor.name));
}

CheckpointReader::CheckpointReader(const std::string& directory, const std::string& tag)
    : parts_(checkpoint::parts_of(checkpoint::open_contents(checkpoint::find_folder(directory, tag)))) {}

const std::string& CheckpointReader::folder() const { return parts_->contents.folder; }
int CheckpointReader::world_size() const { return parts_->contents.table.manifest.world_size; }
int64_t CheckpointReader::global_steps() const { return parts_->global_steps; }
const std::string& CheckpointReader::state_json() const { return parts_->contents.table.manifest.state_json; }
const std::string& CheckpointReader::client_state_json() const {
  return parts_->contents.table.manifest.client_state_json;
}
const std::vector<CheckpointTensor>& CheckpointReader::tensors() const { return parts_->tensors; }

const CheckpointTensor& CheckpointReader::find(const std::string& name, const std::string& role) const {
  const auto has = [&](const std::string& wanted) {
    return std::find_if(tensors().begin(), tensors().end(),
                        [&](const CheckpointTensor& t) { return t.name == name && t.role == wanted; });
  };
  const std::vector<std::string> roles =
      role.empty() ? std::vector<std::string>{"master", "param", "buffer"} : std::vector<std::string>{role};
  for (const std::string& wanted : roles) {
    if (const auto found = has(wanted); found != tensors().end()) return *found;
  }
  throw CheckpointError("the checkpoint " + folder() + " has no '" + name + "'" +
                        (role.empty() ? std::string() : " as " + role) + resembling(tensors(), name));
}

void CheckpointReader::read_into(const CheckpointTensor& tensor, int64_t begin, int64_t end, void* to) const {
  const Logical& logical = parts_->logical(tensor);
  if (begin < 0 || end < begin || end > tensor.numel) {
    throw ConfigError("read '" + logical.key + "': got elements [" + std::to_string(begin) + ", " +
                      std::to_string(end) + "), expected a range within its " + std::to_string(tensor.numel));
  }
  checkpoint::StreamedReads files(folder());
  announce_range(files, logical, begin, end);
  deeptide::read_into(files, logical, begin, end, to);
}

namespace checkpoint {

std::shared_ptr<const CheckpointReader::Parts> parts_of(Contents contents) {
  auto parts = std::make_shared<CheckpointReader::Parts>();
  parts->contents = std::move(contents);
  for (const auto& [id, logical] : parts->contents.table.tensors) {
    parts->tensors.push_back(describe(logical));
    parts->logicals[{id.name, parts->tensors.back().role}] = &logical;
  }
  parts->global_steps = global_steps_of(parts->contents.table.manifest);
  return parts;
}

std::string find_folder(const std::string& directory, const std::string& tag) {
  if (!tag.empty()) return existing_folder(directory, tag);
  const std::string latest = latest_tag(directory);
  if (!latest.empty()) return existing_folder(directory, latest);
  if (exists(directory + "/" + kManifestName)) return directory;
  const bool is_foreign = is_deepspeed_folder(directory) || has_weights(directory);
  throw CheckpointError("no checkpoint in " + directory + ": it has neither a file 'latest' nor a " + kManifestName +
                        "; " +
                        (is_foreign ? "'deeptide checkpoint import' makes a checkpoint of what others saved"
                                    : "give the tag, or the folder that save_checkpoint was given"));
}

int64_t global_steps_of(const Manifest& manifest) {
  const auto state = try_read_json(manifest.state_json);
  const bool known = state.is_object() && state.contains("global_steps") && state["global_steps"].is_number_integer();
  return known ? state["global_steps"].get<int64_t>() : -1;
}

void for_each_block(const CheckpointReader& reader, const CheckpointTensor& tensor,
                    const std::function<void(int64_t, int64_t, const char*)>& visit) {
  StreamedReads files(reader.folder());
  announce_whole(files, reader.parts().logical(tensor));
  for_each_block(reader, tensor, files, visit);
}

void for_each_block(const CheckpointReader& reader, const CheckpointTensor& tensor, StreamedReads& files,
                    const std::function<void(int64_t, int64_t, const char*)>& visit) {
  const auto& logical = reader.parts().logical(tensor);
  const auto block = std::make_unique_for_overwrite<char[]>(std::min(kHashedBlockBytes, tensor.bytes));
  for (int64_t begin = 0; begin < tensor.numel;) {
    const int64_t end = block_end(logical, begin, tensor.numel);
    read_into(files, logical, begin, end, block.get());
    visit(begin, end - begin, block.get());
    begin = end;
  }
}

}  // namespace checkpoint
}  // namespace deeptide
