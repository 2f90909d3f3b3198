// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Exports the model as one safetensors file, tensor by tensor.
#include <algorithm>
#include <optional>

#include "checkpoint/format/file_io.h"
#include "checkpoint/format/safetensors.h"
#include "engine/engine_impl.h"
#include "engine/model/whole_model.h"

namespace deeptide {

using at::Tensor;

namespace {

/// The file of one export. Unless it is kept, nothing is left of it.
class ExportFile {
 public:
  /// Makes the file at once: a full disk or a missing right shows before anything is gathered.
  ExportFile(const std::string& path, checkpoint::Entries entries)
      : path_(path),
        growing_(path + ".tmp"),
        entries_(std::move(entries)),
        header_(checkpoint::encode_header(entries_, {{"format", "pt"}})) {
    const auto slash = path.rfind('/');
    if (slash != std::string::npos && slash > 0) checkpoint::make_folders(path.substr(0, slash));
    file_.emplace(checkpoint::File::create(growing_));
    file_->write_at(header_.data(), static_cast<int64_t>(header_.size()), 0);
  }
  ExportFile(const ExportFile&) = delete;
  ~ExportFile() {
    if (!kept_) checkpoint::remove_quietly(growing_);
  }

  void write(const std::string& name, const Tensor& values) {
    const checkpoint::Entry& entry = entries_.at(name);
    const Tensor flat = values.cpu().contiguous();
    const int64_t bytes = entry.end - entry.begin;
    if (bytes > 0) file_->write_at(flat.const_data_ptr(), bytes, static_cast<int64_t>(header_.size()) + entry.begin);
  }

  void keep() {
    file_->sync();
    checkpoint::move_path(growing_, path_);
    kept_ = true;
  }

 private:
  std::string path_, growing_;
  checkpoint::Entries entries_;
  std::string header_;
  std::optional<checkpoint::File> file_;
  bool kept_ = false;
};

/// Wide types first: the format forbids gaps, and so all tensors stay aligned.
checkpoint::Entries lay_out(std::vector<engine::Listed> tensors) {
  std::stable_sort(tensors.begin(), tensors.end(), [](const engine::Listed& one, const engine::Listed& other) {
    return c10::elementSize(one.dtype) > c10::elementSize(other.dtype);
  });
  checkpoint::Entries entries;
  int64_t end = 0;
  for (const engine::Listed& each : tensors) {
    const int64_t numel = checkpoint::numel_of(each.shape, "'" + each.name + "'");
    const int64_t begin = end;
    end += numel * static_cast<int64_t>(c10::elementSize(each.dtype));
    entries.emplace(each.name, checkpoint::Entry{each.dtype, each.shape, begin, end});
  }
  return entries;
}

}  // namespace

void Engine::Impl::export_safetensors(const std::string& path, const std::vector<NamedTensor>& more,
                                      bool exclude_frozen) {
  std::optional<ExportFile> file;
  // Rank 0 gathers on after it failed: the other ranks take part in every gather.
  std::exception_ptr failure;
  const auto begin = [&](const std::vector<engine::Listed>& tensors) {
    TORCH_CHECK_VALUE(!path.empty(), "export_safetensors: the path is empty");
    file.emplace(path, lay_out(tensors));
  };
  const auto take = [&](const std::string& name, const Tensor& values) {
    if (failure) return;
    try {
      file->write(name, values);
    } catch (...) {
      failure = std::current_exception();
    }
  };
  visit_model(more, exclude_frozen, {begin, take});
  boundary->together_on_all_stages("writing the export", [&] {
    if (failure) std::rethrow_exception(failure);
    if (file) file->keep();
  });
}

}  // namespace deeptide
