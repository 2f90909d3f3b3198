// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Saves a checkpoint: every rank writes its pieces, all agree, rank 0 commits.
#include <ATen/core/grad_mode.h>

#include <nlohmann/json.hpp>

#include "checkpoint/writer.h"
#include "engine/custom_state.h"
#include "engine/engine_impl.h"
#include "engine/pieces.h"

namespace deeptide {

using comm::Call;

namespace {

/// A parameter that the program replaced is saved with the value that the model has now, whole, by the first rank.
void substitute(const std::vector<NamedTensor>& replaced, bool is_first, std::vector<checkpoint::Piece>& pieces) {
  for (const NamedTensor& now : replaced) {
    for (checkpoint::Piece& piece : pieces) {
      if (piece.name != now.name || !piece.role.is_weight()) continue;
      const at::Tensor flat = engine::readable(now.tensor).reshape({-1}).to(piece.data.dtype());
      const int64_t count = is_first ? flat.numel() : 0;
      piece = {now.name, piece.role, now.tensor.sizes().vec(), checkpoint::Region::range(0, count),
               flat.narrow(0, 0, count)};
    }
  }
}

}  // namespace

bool Engine::Impl::has_gradients() const {
  return reducer && (reducer->has_pending() || reducer->has_gradient() || intake->has_left());
}

void Engine::Impl::check_no_gradients(const char* method) const {
  TORCH_CHECK_VALUE(!reducer || !(reducer->has_pending() || reducer->has_gradient()), method,
                    " between backward() and step(): the gradients would be lost; call step() first, or zero_grad() to "
                    "drop them");
}

void Engine::Impl::check_between_steps(const char* method) const {
  check_no_gradients(method);
  const int64_t within = progress.micro_steps % batch.accumulation;
  TORCH_CHECK_VALUE(within == 0 || stepper->has_boundary_override(), method, " within an accumulation (", within, "/",
                    batch.accumulation,
                    " micro-batches done): the gradients would be lost; call it after an applied step");
}

void Engine::Impl::check_saving(const std::string& directory) const {
  TORCH_CHECK_VALUE(!directory.empty(), "save_checkpoint: the folder's name is empty");
  check_between_steps("save_checkpoint");
}

std::string Engine::Impl::save_checkpoint(const std::string& directory, std::string tag,
                                          const std::string& client_state_json, bool save_latest,
                                          bool exclude_frozen_parameters) {
  at::NoGradGuard no_grad;
  engine::LooseTensors loose = enter_alike(Call::save_checkpoint, [&] { check_saving(directory); }).second;
  if (optimizer) optimizer->states().refresh_masters();
  if (tag.empty()) tag = "global_step" + std::to_string(progress.global_steps);
  const comm::SaveName own{channels.is_first() ? checkpoint::draw_nonce() : 0, exclude_frozen_parameters};
  const auto names = boundary->exchange(own, {"checkpoint", "naming the save"});
  const checkpoint::SaveTarget target{directory, tag, names.front().nonce};
  for (const comm::SaveName& name : names) {
    TORCH_CHECK_VALUE(name.exclude_frozen == names.front().exclude_frozen,
                      "save_checkpoint: some ranks were given exclude_frozen_parameters=true and some false; give all "
                      "ranks the same");
  }
  if (optimizer) progress.parameter_steps = optimizer->states().uneven_steps();
  if (optimizer) progress.parameter_numbers = optimizer->states().parameter_numbers();
  nlohmann::json state = engine::to_json(progress);
  state["zero_stage"] = config.zero().stage;
  state["config"] = config.text();
  const World& world = channels.world();
  const auto coordinates = engine::coordinates_of(channels.mesh(), world.rank);
  checkpoint::Snapshot snapshot{world.rank,
                                {coordinates, engine::Generators::of(model.device()).to_json()},
                                engine::live_pieces(model, optimizer.get(), /*moments=*/true, engine::Extent::owned)};
  if (optimizer && optimizer->custom()) {
    boundary->together("collecting the optimizer's states", [&] {
      for (auto& piece : engine::custom_pieces(*optimizer->custom())) snapshot.pieces.push_back(std::move(piece));
    });
  }
  for (const engine::LateTie& tie : loose.tied) {
    if (model.find(tie.name).parameter) loose.replaced.push_back({tie.name, tie.to.parameter->tensors[tie.to.tensor]});
  }
  if (exclude_frozen_parameters) engine::leave_out_frozen(model, snapshot.pieces, loose.added, state);
  substitute(loose.replaced, channels.is_first(), snapshot.pieces);
  auto unbound = loose.buffers;
  unbound.insert(unbound.end(), loose.added.begin(), loose.added.end());
  for (const NamedTensor& tensor : unbound) {
    snapshot.pieces.push_back(engine::buffer_piece(tensor, checkpoint::Role::buffer(coordinates),
                                                   engine::readable(tensor.tensor).reshape({-1})));
  }
  try {
    boundary->together("writing the checkpoint", [&] { checkpoint::write_rank(target, snapshot); });
    boundary->together("committing the checkpoint", [&] {
      const checkpoint::Manifest manifest{checkpoint::kManifestVersion, world.size, state.dump(), client_state_json};
      if (world.rank == 0) checkpoint::commit(target, manifest, save_latest);
    });
  } catch (const CheckpointError&) {
    if (world.rank == 0) checkpoint::abandon(target);
    throw;
  }
  return directory + "/" + tag;
}

}  // namespace deeptide
