// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Maps safetensors files and finds their tensors. The index's names lead to files of its own folder only.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>

#include "checkpoint/json_field.h"
#include "checkpoint/safetensors.h"
#include "deeptide/weights.h"

namespace deeptide {

using checkpoint::malformed;

namespace {

constexpr const char* kWeights = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

/// A file in private pages: a copy of what is written, the file's own of the rest. A forked child may use it as its
/// own.
class Mapped {
 public:
  explicit Mapped(const std::string& path) : header_(read(path)) {
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) checkpoint::fail("open", path, errno);
    void* base = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, descriptor, 0);
    const int error = errno;
    ::close(descriptor);
    if (base == MAP_FAILED) checkpoint::fail("map", path, error);
    base_ = static_cast<char*>(base);
  }
  ~Mapped() { ::munmap(base_, bytes_); }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;

  const checkpoint::Entries& entries() const { return header_.entries; }
  char* data_of(const checkpoint::Entry& entry) const { return base_ + header_.data_offset + entry.begin; }

 private:
  checkpoint::Header read(const std::string& path) {
    const auto file = checkpoint::File::open(path);
    bytes_ = file.size();
    return checkpoint::read_header(file);
  }

  int64_t bytes_ = 0;
  checkpoint::Header header_;
  char* base_ = nullptr;
};

/// The files of an index, by their tensors.
std::map<std::string, std::string> files_of_index(const std::string& path) {
  std::map<std::string, std::string> files;
  try {
    const auto index = nlohmann::json::parse(checkpoint::read_text(path));
    for (const auto& [name, file] : index.at("weight_map").items()) {
      const auto text = file.get<std::string>();
      if (text.empty() || text.find('/') != std::string::npos) {
        malformed(path, "'" + text.substr(0, 80) + "' is no file of its folder");
      }
      files[name] = text;
    }
  } catch (const nlohmann::json::exception& error) {
    malformed(path, std::string("it cannot be read: ") + error.what());
  }
  return files;
}

}  // namespace

struct WeightFile::Contents {
  struct Place {
    std::shared_ptr<Mapped> file;
    const checkpoint::Entry* entry = nullptr;
  };

  explicit Contents(const std::string& path) {
    if (!checkpoint::is_folder(path)) {
      add(path);
    } else if (checkpoint::exists(path + "/" + kIndex)) {
      add_index(path);
    } else if (checkpoint::exists(path + "/" + kWeights)) {
      add(path + "/" + kWeights);
    } else {
      throw CheckpointError("no weights in " + path + ": it has neither " + kWeights + " nor " + kIndex +
                            "; name the folder that save_pretrained wrote, or a safetensors file");
    }
  }

  void add(const std::string& path) {
    const auto file = std::make_shared<Mapped>(path);
    for (const auto& [name, entry] : file->entries()) places[name] = {file, &entry};
  }

  void add_index(const std::string& folder) {
    std::map<std::string, std::shared_ptr<Mapped>> opened;
    for (const auto& [name, file] : files_of_index(folder + "/" + kIndex)) {
      auto& mapped = opened[file];
      if (!mapped) mapped = std::make_shared<Mapped>(folder + "/" + file);
      const auto found = mapped->entries().find(name);
      if (found == mapped->entries().end()) {
        malformed(folder + "/" + kIndex, "it places '" + name + "' in " + file + ", which does not have it");
      }
      places[name] = {mapped, &found->second};
    }
  }

  std::map<std::string, Place> places;
};

WeightFile::WeightFile(const std::string& path) : contents_(std::make_unique<Contents>(path)) {}
WeightFile::~WeightFile() = default;
WeightFile::WeightFile(WeightFile&&) noexcept = default;
WeightFile& WeightFile::operator=(WeightFile&&) noexcept = default;

std::vector<std::string> WeightFile::names() const {
  std::vector<std::string> names;
  for (const auto& [name, place] : contents_->places) names.push_back(name);
  return names;
}

bool WeightFile::has(const std::string& name) const { return contents_->places.contains(name); }

at::Tensor WeightFile::tensor(const std::string& name) const {
  const auto found = contents_->places.find(name);
  if (found == contents_->places.end()) throw CheckpointError("the weights have no tensor '" + name + "'");
  const auto& [file, entry] = found->second;
  const auto options = at::TensorOptions().dtype(entry->dtype);
  char* data = file->data_of(*entry);
  if (reinterpret_cast<uintptr_t>(data) % c10::elementSize(entry->dtype) == 0) {
    return at::from_blob(
        data, entry->shape, [kept = file](void*) {}, options);
  }
  const at::Tensor copy = at::empty(entry->shape, options);  // the format lets tensors begin at any byte
  std::memcpy(copy.mutable_data_ptr(), data, entry->end - entry->begin);
  return copy;
}

}  // namespace deeptide
