// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads the ends of each parameter from both sides of a checkpoint.
#include "checkpoint/imports/master_check.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "checkpoint/format/safetensors.h"
#include "checkpoint/imports/deepspeed_tensors.h"

namespace deeptide::checkpoint {
namespace {

constexpr int64_t kCompared = 16;  // elements at each end of a parameter

bool is_enabled(const PickleValue* section) {
  const PickleValue* enabled = section == nullptr ? nullptr : section->find("enabled");
  return enabled != nullptr && (enabled->flag || enabled->integer != 0);
}

/// Whether DeepSpeed changes the module's weights beside their masters: training quantizes them, or the masters' steps
/// arrive later.
bool has_other_weights(const TorchFile& model) {
  const PickleValue* config = model.root().find("ds_config");
  if (config == nullptr) return false;
  const PickleValue* zero = config->find("zero_optimization");
  return is_enabled(config->find("quantize_training")) || config->find("compression_training") != nullptr ||
         (zero != nullptr && zero->find("zenflow") != nullptr);
}

/// The first and the last elements of each master.
std::vector<Piece> ends_of(const Table& weights, const Reader& checkpoint) {
  std::vector<Piece> ends;
  for (const Piece& whole : checkpoint.table()) {
    if (whole.role != Role::master()) continue;
    const auto found = weights.find({whole.name, Role::param()});
    if (found == weights.end() || found->second.shape != whole.shape) continue;
    const int64_t numel = whole.region.numel(), head = std::min(numel, kCompared);
    const auto add = [&](int64_t begin, int64_t end) {
      if (begin >= end) return;
      Piece piece = whole;
      piece.region = Region::range(begin, end);
      piece.data = at::empty({end - begin}, at::kDouble);
      ends.push_back(std::move(piece));
    };
    add(0, head);
    add(std::max(head, numel - kCompared), numel);
  }
  return ends;
}

/// Half a unit in the last place is what rounding to the nearest loses; DeepSpeed also rounds stochastically.
bool rounds_to(double master, double weight, at::ScalarType type) {
  if (master == weight || (std::isnan(master) && std::isnan(weight)) || std::isinf(weight)) return true;
  const double unit = type == at::kBFloat16 ? std::ldexp(1.0, -7)
                      : type == at::kHalf   ? std::ldexp(1.0, -10)
                                            : std::ldexp(1.0, -23);
  const double smallest = type == at::kHalf ? std::ldexp(1.0, -14) : std::ldexp(1.0, -126);
  return std::abs(master - weight) <= std::max(unit * std::abs(weight), smallest);
}

[[noreturn]] void refuse(const std::string& path, const Piece& piece, int64_t at, double master, double weight) {
  throw CheckpointError(
      "DeepSpeed's checkpoint " + path + " does not fit together: element " +
      std::to_string(piece.region.offsets[0] + at) + " of the fp32 master of '" + piece.name + "' is " +
      std::to_string(master) + ", expected what rounds to the module's weight, " + std::to_string(weight) +
      "; its masters and optimizer states may be of other parameters (as in a universal checkpoint that was made of a "
      "run with round_robin_gradients), so none is read: import the checkpoint it was made of, or load the weights "
      "alone, torch.load of mp_rank_00_model_states.pt has them under 'module'");
}

}  // namespace

void check_masters(const DeepspeedModel& model, const Reader& checkpoint) {
  if (has_other_weights(model.first()) || model.num_slices() > 1) return;
  const at::NoGradGuard no_grad;
  ForeignTable module(nullptr);
  read_module(model, module);
  ManifestTable contents;
  contents.tensors = module.finish(model.folder().path);
  std::vector<Piece> masters = ends_of(contents.tensors, checkpoint);
  std::vector<Piece> weights = masters;
  std::map<std::string, at::ScalarType> types;
  for (Piece& piece : weights) {
    piece.role = Role::param();
    piece.data = at::empty({piece.region.numel()}, at::kDouble);
    types[piece.name] = contents.tensors.at({piece.name, piece.role}).dtype;
  }
  checkpoint.read(masters);
  Reader(model.folder().path, std::move(contents)).read(weights);
  for (size_t i = 0; i < masters.size(); ++i) {
    const double* master = masters[i].data.tensor().const_data_ptr<double>();
    const double* weight = weights[i].data.tensor().const_data_ptr<double>();
    for (int64_t at = 0; at < masters[i].region.numel(); ++at) {
      if (rounds_to(master[at], weight[at], types[masters[i].name])) continue;
      refuse(model.folder().path, masters[i], at, master[at], weight[at]);
    }
  }
}

}  // namespace deeptide::checkpoint
