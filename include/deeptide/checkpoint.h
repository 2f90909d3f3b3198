// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Checkpoints as folders: reads, verifies, compares, exports and prunes them without model, group or accelerator.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "deeptide/export.h"

namespace at {
class Tensor;
}

namespace deeptide {

/// A tensor of a checkpoint, whole, whatever the number of ranks that saved it.
struct CheckpointTensor {
  std::string name;  // of the parameter or the buffer
  std::string role;  // "master", "param", an optimizer state such as "exp_avg", "buffer"; "buffer.data=1": rank 1's own
  std::vector<int64_t> shape;
  std::string dtype;  // as safetensors spells it, such as "F32" or "BF16"
  int64_t numel = 0;
  int64_t bytes = 0;
};

/// Called with the bytes done and the bytes in all, from the calling thread.
using CheckpointProgress = std::function<void(int64_t done, int64_t total)>;

/// A checkpoint of any version and any number of ranks. Opening reads the manifest and the headers of its files, each
/// read only the bytes that it returns. Cheap to copy; several threads may call const functions.
class DEEPTIDE_API CheckpointReader {
 public:
  /// Opens `<directory>/<tag>`; without a tag the latest, or `directory` itself if it has a manifest.
  /// Errors: CheckpointError when it is missing, truncated or malformed.
  explicit CheckpointReader(const std::string& directory, const std::string& tag = "");
  /// The same, or DeepSpeed's checkpoint of that name. Not in programs without torch's libraries.
  /// Errors: CheckpointError; also for a checkpoint of DeepSpeed's that is not read here, with the cure.
  static CheckpointReader open(const std::string& directory, const std::string& tag = "");

  const std::string& folder() const;
  int world_size() const;
  /// Optimizer steps done; -1 where the save does not say.
  int64_t global_steps() const;
  /// The engine's own state (counters, schedule, configuration) and the program's, as JSON.
  const std::string& state_json() const;
  const std::string& client_state_json() const;
  /// In the order of names, then of roles.
  const std::vector<CheckpointTensor>& tensors() const;
  /// The tensor of this role. Without one: a parameter's master weights, else its weights, else the buffer of that
  /// name. Errors: CheckpointError when there is none, with names that resemble it.
  const CheckpointTensor& find(const std::string& name, const std::string& role = "") const;

  /// Elements [begin, end) of the flattened tensor into `to`, which holds (end - begin) of the tensor's dtype.
  /// Errors: CheckpointError on a failed read, elements that no file holds, a damaged block; ConfigError for a range
  /// beyond the tensor. Memory: at most 16 MiB beside `to`.
  void read_into(const CheckpointTensor& tensor, int64_t begin, int64_t end, void* to) const;
  /// The whole tensor, or (end - begin,) elements of the flattened one, on the CPU. Errors: as read_into() and find().
  at::Tensor read(const CheckpointTensor& tensor) const;
  at::Tensor read(const CheckpointTensor& tensor, int64_t begin, int64_t end) const;

  struct Parts;
  const Parts& parts() const { return *parts_; }

 private:
  explicit CheckpointReader(std::shared_ptr<const Parts> parts) : parts_(std::move(parts)) {}

  std::shared_ptr<const Parts> parts_;
};

/// Statistics of a tensor's finite elements; truth values count as 0 and 1, complex numbers by their parts.
struct CheckpointStatistics {
  double least = 0.0, most = 0.0, mean = 0.0, norm = 0.0;
  int64_t num_finite = 0, num_others = 0;
  std::vector<double> first;  // up to eight elements
};
/// Reads the whole tensor, block by block. Errors: as CheckpointReader::read_into().
DEEPTIDE_API CheckpointStatistics checkpoint_statistics(const CheckpointReader& reader, const CheckpointTensor& tensor);

/// One line of list_checkpoints().
struct CheckpointSummary {
  std::string tag;
  bool is_latest = false;
  int64_t global_steps = -1;
  int world_size = 0;
  int64_t num_tensors = 0;
  int64_t bytes = 0;        // of all tensors
  int64_t saved_at_s = 0;   // seconds since 1970, by the manifest's file
  bool has_hashes = false;  // saves before hashes existed can be verified in form only
  std::string fault;        // why its manifest cannot be read; the fields above are defaults then
};
/// The checkpoints in `directory`, by steps, then by time. Errors: CheckpointError when there is no such folder.
DEEPTIDE_API std::vector<CheckpointSummary> list_checkpoints(const std::string& directory);

/// Reads every byte of `<directory>/<tag>` and returns a line per fault, which names the tensor; empty when whole. A
/// changed byte anywhere is found where the save has hashes; else only what contradicts itself.
/// Errors: CheckpointError when there is no such checkpoint.
DEEPTIDE_API std::vector<std::string> verify_checkpoint(const std::string& directory, const std::string& tag = "",
                                                        const CheckpointProgress& progress = {});

/// The difference between two checkpoints in one tensor.
struct CheckpointDifference {
  enum class Kind : uint8_t { only_first, only_second, shape, dtype, values };
  std::string name, role;
  Kind kind = Kind::values;
  std::string first, second;    // the shapes or dtypes
  int64_t num_different = 0;    // elements, by value; NaN equals NaN
  double max_difference = 0.0;  // over elements that are finite on both sides
};
/// "only_first", "only_second", "shape", "dtype", "values".
DEEPTIDE_API const char* name_of(CheckpointDifference::Kind kind);
/// Compares tensors by name and role; of different dtypes the values as well. Empty when all are equal.
DEEPTIDE_API std::vector<CheckpointDifference> compare_checkpoints(const CheckpointReader& first,
                                                                   const CheckpointReader& second,
                                                                   const CheckpointProgress& progress = {});

enum class ExportFormat : uint8_t {
  safetensors,  // model.safetensors, as Transformers reads it
  state_dict,   // pytorch_model.bin, as torch.save writes a dict of tensors
  universal,    // DeepSpeed's layout with optimizer states: `checkpoint.load_universal` reads it at any stage
  dcp,          // torch.distributed.checkpoint's layout with optimizer states, named as torch's get_state_dict does
};
struct ExportOptions {
  ExportFormat format = ExportFormat::safetensors;
  std::string dtype;  // of floating weights: "fp32", "bf16", "fp16"; empty: as saved. Buffers keep theirs
  std::string max_shard_size = "5GB";  // of a file: bytes, "5GB" (10^9 each), "500MiB"; empty: one file
  bool exclude_frozen = false;         // leaves out parameters that were not trained
};
/// Writes weights and the first rank's buffers under their names into `folder`: one file, or several and an index; of
/// `universal` a folder with the checkpoint's name and two files that name it; of `dcp` two files. These take no other
/// option. In `universal` frozen weights lie in the module's state, and no loss scale is in it: it starts from its
/// configuration. A tied weight is there once, under its first name. Returns the names. Memory: some 32 MiB, whatever
/// the tensors. Errors: CheckpointError, ConfigError for options that cannot be.
DEEPTIDE_API std::vector<std::string> export_checkpoint(const CheckpointReader& reader, const std::string& folder,
                                                        const ExportOptions& options = {},
                                                        const CheckpointProgress& progress = {});

/// Hyper-parameters by parameter group under torch's keys, such as [{"lr": 0.1, "betas": [0.9, 0.95]}]; an empty object
/// for each group of an optimizer that the configuration's table does not have.
DEEPTIDE_API std::string param_groups_json(const CheckpointReader& reader);

struct PruneOptions {
  int64_t keep_last = 1;   // of most steps; at least 1
  int64_t keep_every = 0;  // also those whose steps are multiples of it; 0: none
  bool dry_run = false;
};
/// Removes checkpoints from `directory` and returns their tags. Keeps the one that `latest` names, whatever cannot be
/// read and whatever is no checkpoint. A removed folder takes with it what the program put there. Errors:
/// CheckpointError on a folder that cannot be removed, ConfigError for options that cannot be.
DEEPTIDE_API std::vector<std::string> prune_checkpoints(const std::string& directory, const PruneOptions& options);

}  // namespace deeptide
