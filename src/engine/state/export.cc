// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Exports the model as one safetensors file, unit by unit.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <optional>

#include "checkpoint/file_io.h"
#include "checkpoint/safetensors.h"
#include "engine/engine_impl.h"
#include "engine/state/pieces.h"
#include "engine/state/slices.h"

namespace deeptide {

using at::Tensor;
using sharding::Parameter;

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

/// The names under which a unit's tensors are exported, in the unit's order.
template <typename Visit>
void for_each_name(const sharding::Unit& unit, const engine::LiveNames& names, Visit visit) {
  for (const Parameter& p : unit.parameters()) {
    for (const auto& [name, tensor] : names.of(p)) visit(p, name, tensor);
  }
}

/// Wide types first: the format forbids gaps, and so all tensors stay aligned.
checkpoint::Entries lay_out(const engine::BoundModel& model, const engine::LiveNames& names,
                            const std::map<std::string, Tensor>& loose, const engine::Topology& topology) {
  std::vector<std::pair<std::string, checkpoint::Entry>> tensors;
  for (const auto& unit : model.units()) {
    for_each_name(*unit, names, [&](const Parameter& p, const std::string& name, int tensor) {
      const at::IntArrayRef shape = p.tensors[tensor].sizes();
      const auto slice = topology.slices.find(p.name);
      tensors.push_back({name,
                         {unit->layout().dtype,
                          slice == topology.slices.end() ? shape.vec() : engine::whole_shape(slice->second, shape)}});
    });
  }
  for (const auto& [name, tensor] : loose) tensors.push_back({name, {tensor.scalar_type(), tensor.sizes().vec()}});
  const auto width = [](const auto& tensor) { return c10::elementSize(tensor.second.dtype); };
  std::stable_sort(tensors.begin(), tensors.end(),
                   [&](const auto& one, const auto& other) { return width(one) > width(other); });
  checkpoint::Entries entries;
  int64_t end = 0;
  for (auto& [name, entry] : tensors) {
    entry.begin = end;
    end += checkpoint::numel_of(entry.shape, "'" + name + "'") * static_cast<int64_t>(c10::elementSize(entry.dtype));
    entry.end = end;
    entries.emplace(name, entry);
  }
  return entries;
}

}  // namespace

void Engine::Impl::export_safetensors(const std::string& path, const std::vector<NamedTensor>& more) {
  at::NoGradGuard no_grad;
  std::map<std::string, Tensor> loose;
  for (const NamedTensor& tensor : more) loose[tensor.name] = tensor.tensor;
  const engine::LooseTensors now = enter_to_inspect();
  const engine::LiveNames names(now);
  for (const NamedTensor& tensor : now.all()) loose[tensor.name] = tensor.tensor;
  std::optional<ExportFile> file;
  boundary->together("starting the export", [&] {
    TORCH_CHECK_VALUE(!path.empty(), "export_safetensors: the path is empty");
    if (channels.is_first()) file.emplace(path, lay_out(model, names, loose, design.topology));
  });
  // Rank 0 gathers on after it failed: the other ranks take part in every gather.
  std::exception_ptr failure;
  for (const auto& unit : model.units()) {
    const Tensor whole = gathered(*unit);
    for_each_name(*unit, names, [&](const Parameter& p, const std::string& name, int tensor) {
      const Tensor values = whole_parameter(p, whole, tensor);
      if (!file || failure) return;
      try {
        file->write(name, values);
      } catch (...) {
        failure = std::current_exception();
      }
    });
  }
  boundary->together("writing the export", [&] {
    if (failure) std::rethrow_exception(failure);
    if (!file) return;
    for (const auto& [name, tensor] : loose) file->write(name, engine::readable(tensor));
    file->keep();
  });
}

}  // namespace deeptide
