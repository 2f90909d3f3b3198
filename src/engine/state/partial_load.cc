// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Sorts what a checkpoint lacks into what stays, what begins anew and what is an error.
#include "engine/state/partial_load.h"

#include <algorithm>

#include "base/libraries/format.h"
#include "base/libraries/nlohmann.h"
#include "base/log.h"

namespace deeptide::engine {

using checkpoint::Piece;
using checkpoint::Role;
using checkpoint::TensorId;

namespace {

constexpr size_t kMostListed = 20;

std::string listed(const std::vector<std::string>& lines) {
  std::string text;
  for (size_t i = 0; i < std::min(lines.size(), kMostListed); ++i) text += "\n  " + lines[i];
  if (lines.size() > kMostListed) text += "\n  … and " + std::to_string(lines.size() - kMostListed) + " more";
  return text;
}

}  // namespace

std::set<std::string> frozen_names(const BoundModel& model) {
  std::set<std::string> frozen;
  for (const auto& unit : model.units()) {
    if (unit->layout().trainable) continue;
    for (const sharding::Parameter& p : unit->parameters()) frozen.insert(p.name);
  }
  return frozen;
}

void leave_out_frozen(const BoundModel& model, std::vector<Piece>& pieces, std::vector<NamedTensor>& added,
                      nlohmann::json& state) {
  std::set<std::string> frozen = frozen_names(model);
  for (const NamedTensor& tensor : added) {
    if (!tensor.tensor.requires_grad()) frozen.insert(tensor.name);
  }
  std::erase_if(pieces, [&](const Piece& piece) { return piece.role == Role::param() && frozen.contains(piece.name); });
  std::erase_if(added, [&](const NamedTensor& tensor) { return frozen.contains(tensor.name); });
  state[kLeftOut] = frozen;
}

Absent::Absent(const checkpoint::Reader& reader, bool strict) : strict_(strict) {
  for (const Piece& piece : reader.table()) there_.insert({piece.name, piece.role});
  const auto state = read_json(reader.manifest().state_json);
  if (state.contains(kLeftOut)) state[kLeftOut].get_to(left_out_);
}

bool Absent::is_absent(const TensorId& id, bool trained) const {
  return !there_.contains(id) && (!strict_ || (!trained && left_out_.contains(id.name)));
}

void Absent::take_from(std::vector<Piece>& wanted) {
  for (const Piece& piece : wanted) {
    const bool trained = piece.role != Role::param();
    if (!piece.role.is_moment() && is_absent({piece.name, piece.role}, trained)) kept_.insert(piece.name);
  }
  std::erase_if(wanted, [&](const Piece& piece) {
    if (!piece.role.is_moment()) return kept_.contains(piece.name);
    if (!is_absent({piece.name, piece.role}, /*trained=*/true)) return false;
    if (!kept_.contains(piece.name)) fresh_.insert({piece.name, piece.role.moment_name()});
    return true;
  });
}

void Absent::keep_counts(Progress& saved, const Progress& own) const {
  for (const zero::StateName& state : fresh_) saved.parameter_steps[state.first] = 0;
  for (const std::string& name : kept_) {
    const auto steps = own.parameter_steps.find(name);
    saved.parameter_steps[name] = steps == own.parameter_steps.end() ? own.optimizer_steps : steps->second;
    const auto numbers = own.parameter_numbers.find(name);
    if (numbers != own.parameter_numbers.end()) saved.parameter_numbers[name] = numbers->second;
  }
}

void Absent::tell(const std::vector<std::string>& unexpected) const {
  std::vector<std::string> lines;
  size_t frozen = 0;
  for (const std::string& name : kept_) {
    if (left_out_.contains(name)) {
      ++frozen;
    } else {
      lines.push_back("missing in the checkpoint, stays as it is: '" + name + "'");
    }
  }
  for (const auto& [name, state] : fresh_) {
    lines.push_back("missing in the checkpoint, begins anew: '" + name + "' (" + state + ")");
  }
  lines.insert(lines.end(), unexpected.begin(), unexpected.end());
  if (frozen > 0) {
    log(LogLevel::info, format_text("load_checkpoint: {} frozen parameters stay as they are: "
                                    "exclude_frozen_parameters left them out",
                                    frozen));
  }
  if (!lines.empty()) log(LogLevel::warning, "load_checkpoint, which is not strict:" + listed(lines));
}

}  // namespace deeptide::engine
