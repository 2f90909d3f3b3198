// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Saves a checkpoint: every rank writes its pieces, all agree, rank 0 commits.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <chrono>
#include <set>

#include "base/libraries/format.h"
#include "base/libraries/nlohmann.h"
#include "base/log.h"
#include "checkpoint/format/retention.h"
#include "checkpoint/save/background_save.h"
#include "checkpoint/save/frozen_files.h"
#include "checkpoint/save/shard_file.h"
#include "checkpoint/save/writer.h"
#include "deeptide/compression.h"
#include "engine/engine_impl.h"
#include "engine/model/pieces.h"
#include "engine/model/slices.h"
#include "engine/state/custom_state.h"
#include "engine/state/partial_load.h"
#include "engine/state/rounding_errors.h"
#include "engine/step/across_stages.h"
#include "engine/step/host_tables.h"
#include "sharding/gate.h"

namespace deeptide {

using comm::Call;

namespace {

/// Refuses what no load could give back. Python writes half of a surrogate pair as \ud800, which the parser refuses:
/// any other escape stands for it here.
void check_client_state(std::string text) {
  for (size_t at = 0; (at = text.find("\\u", at)) != std::string::npos; at += 2) {
    if (at + 2 < text.size() && (text[at + 2] == 'd' || text[at + 2] == 'D')) text[at + 2] = '0';
  }
  TORCH_CHECK_VALUE(try_read_json(text).is_object(), "save_checkpoint: client_state_json is '", text.substr(0, 40),
                    "', expected a JSON object such as {\"epoch\": 3}");
}

/// A parameter that the program replaced is saved with the value that the model has now, whole, by the first rank
/// that has it.
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

SaveContents contents_of(const SaveOptions& options, const Config& config) {
  return options.contents.value_or(config.checkpoint().contents);
}

/// Frozen parameters lie in files of their own: the next save of the folder links to those that have not changed.
void set_apart(const std::set<std::string>& frozen, std::vector<checkpoint::Piece>& pieces) {
  for (checkpoint::Piece& piece : pieces) {
    const int64_t bytes = piece.region.numel() * static_cast<int64_t>(c10::elementSize(piece.data.dtype()));
    piece.apart =
        piece.role == checkpoint::Role::param() && bytes >= checkpoint::kLeastApartBytes && frozen.contains(piece.name);
  }
}

/// The group of each trained parameter, for readers without the model; null with one group or none.
nlohmann::json groups_by_name(const engine::BoundModel& model, const engine::Progress& progress) {
  if (progress.hyperparameters.size() < 2) return nullptr;
  nlohmann::json groups = nlohmann::json::object();
  for (const auto& unit : model.units()) {
    for (const auto& parameter : unit->parameters()) {
      if (parameter.group >= 0) groups[parameter.name] = parameter.group;
    }
  }
  return groups;
}

/// Collective. Adds what the other stages know of their parameters by name.
void merge_stages(engine::Stages& stages, nlohmann::json& state) {
  nlohmann::json own = nlohmann::json::object();
  for (const char* key : {"parameter_steps", "parameter_numbers", "parameter_groups", engine::kLeftOut}) {
    if (state.contains(key)) own[key] = state[key];
  }
  std::set<std::string> left_out;
  for (const std::string& text : engine::texts_of_stages(stages, write_json(own), "collecting what stages save")) {
    const auto theirs = read_json(text);
    for (const auto& [key, entries] : theirs.items()) {
      if (entries.is_object()) state[key].update(entries);
    }
    for (const std::string& name : theirs.value(engine::kLeftOut, std::set<std::string>())) left_out.insert(name);
  }
  if (state.contains(engine::kLeftOut)) state[engine::kLeftOut] = left_out;
}

/// Rounds moments where "bf16_moments" asks for it.
void round_moments(std::vector<checkpoint::Piece>& pieces) {
  for (checkpoint::Piece& piece : pieces) {
    if (!piece.role.is_moment() || piece.role.is_rounding_error() || piece.data.dtype() != at::kFloat) continue;
    piece.data = piece.region.numel() == 0 ? checkpoint::PieceData(at::empty({0}, at::kBFloat16))
                                           : checkpoint::rounded(piece.data, at::kBFloat16);
  }
}

}  // namespace

bool Engine::Impl::has_gradients() const {
  return reducer && (reducer->has_pending() || reducer->has_gradient() || intake->has_left());
}

void Engine::Impl::check_no_gradients(const char* method) const {
  TORCH_CHECK_VALUE(!reducer || !(reducer->has_pending() || reducer->has_gradient()), method,
                    " between backward() and step(): the gradients would be lost; call step() first, up to the end of "
                    "the accumulation, or zero_grad() to drop them");
}

/// Whether this rank has begun what the next step is to be of.
bool Engine::Impl::is_within_accumulation() const {
  if (!reducer) return false;
  const bool counts = !stepper->boundary_override() && progress.micro_steps % batch.accumulation != 0;
  return counts || last.has_forward() || has_gradients();
}

/// Tells, once per save, what is not in it.
void Engine::Impl::restore_last_boundary(std::vector<NamedTensor>& buffers) const {
  const std::vector<std::string> lost = last.restore(buffers);
  if (!lost.empty()) {
    log(LogLevel::warning, format_text("save_checkpoint within an accumulation: buffer '{}'{} is saved as it is now: "
                                       "it has no copy of the last step's end",
                                       lost.front(), lost.size() > 1 ? " and others" : ""));
  }
  if (!channels.is_first()) return;
  log(LogLevel::info,
      format_text("save_checkpoint within an accumulation: the state as step {} left it is saved, and a resume repeats "
                  "what came since. Gradients since then are not saved; they stay here for the next step()",
                  progress.global_steps));
}

/// Names in a checkpoint do not tell the teams of a unit apart yet, but for slices, which have their places in it.
void Engine::Impl::check_axes(const char* method, bool may_be_cut) const {
  for (const engine::UnitRow& row : design.units) {
    const bool is_cut = std::all_of(row.layout.slots.begin(), row.layout.slots.end(), [&](const sharding::Slot& slot) {
      return design.topology.slices.contains(design.model.parameters[static_cast<size_t>(slot.parameter)].name);
    });
    TORCH_CHECK_VALUE(row.place.reduce_over == design.data || (is_cut && may_be_cut), method, ": unit '",
                      row.layout.name, "' is of team '", row.place.reduce_over.key(),
                      "' alone, whose state cannot be told from that of other teams yet");
  }
}

void Engine::Impl::check_saving(const std::string& directory) const {
  check_axes("save_checkpoint", /*may_be_cut=*/true);
  TORCH_CHECK_VALUE(!directory.empty(), "save_checkpoint: the folder's name is empty");
}

/// Agrees on what all ranks must know alike before they save: one nonce, and that they were asked for the same.
Engine::Impl::NamedSave Engine::Impl::name_save(const std::string& directory, std::string tag,
                                                const SaveOptions& options, bool blocking) {
  if (tag.empty()) tag = "global_step" + std::to_string(progress.global_steps);
  const comm::SaveName own{channels.is_first() ? checkpoint::draw_nonce() : 0,
                           options.exclude_frozen_parameters,
                           blocking,
                           contents_of(options, config),
                           options.in_handler || is_within_accumulation(),
                           progress.global_steps};
  const auto names = boundary->exchange(own, {"checkpoint", "naming the save"});
  for (const comm::SaveName& name : names) {
    TORCH_CHECK_VALUE(name.exclude_frozen == names.front().exclude_frozen,
                      "save_checkpoint: some ranks were given exclude_frozen_parameters=true and some false; give all "
                      "ranks the same");
    TORCH_CHECK_VALUE(name.blocking == names.front().blocking,
                      "save_checkpoint: some ranks were given blocking=true and some false; give all ranks the same");
    TORCH_CHECK_VALUE(name.contents == names.front().contents,
                      "save_checkpoint: the ranks were given different contents; give all ranks the same");
  }
  comm::SaveName agreed = names.front();
  const auto is_within = [](const comm::SaveName& name) { return name.within; };
  const auto check_steps = [&](const std::vector<comm::SaveName>& all) {
    for (const comm::SaveName& name : all) {
      if (name.global_steps == agreed.global_steps) continue;
      throw CheckpointError(format_text(
          "save_checkpoint: a rank has ended step {} and another step {}: the one was interrupted in it. Nothing was "
          "saved; resume from the last checkpoint, which is as it was",
          agreed.global_steps, name.global_steps));
    }
  };
  check_steps(names);
  agreed.within = std::any_of(names.begin(), names.end(), is_within);
  if (auto* const stages = channels.stages()) {
    const auto all = stages->exchange(agreed, {"checkpoint", "naming the save"});
    check_steps(all);
    agreed.within = std::any_of(all.begin(), all.end(), is_within);
    agreed.nonce = all.front().nonce;
  }
  return {{directory, tag, agreed.nonce, config.checkpoint().folders}, agreed.within};
}

/// Collects what this rank saves, as views of the live state. `state`: what is saved of the engine besides tensors.
checkpoint::Snapshot Engine::Impl::take_snapshot(engine::LooseTensors& loose, const engine::Generators& generators,
                                                 bool exclude_frozen, nlohmann::json& state) {
  const World& world = channels.world();
  const auto coordinates = engine::coordinates_of(channels.mesh(), world.rank);
  checkpoint::Snapshot snapshot{
      world.rank,
      {coordinates, generators.to_json()},
      engine::whole_pieces(design.topology, model, optimizer.get(), /*moments=*/true, engine::Extent::owned)};
  if (optimizer && optimizer->custom()) {
    boundary->together("collecting the optimizer's states", [&] {
      for (auto& piece : engine::custom_pieces(design.topology, *optimizer->custom()))
        snapshot.pieces.push_back(std::move(piece));
    });
  }
  for (auto& piece : engine::rounding_error_pieces(model, rounding_errors(), coordinates)) {
    snapshot.pieces.push_back(std::move(piece));
  }
  for (const engine::LateTie& tie : loose.tied) {
    if (model.find(tie.name).parameter) loose.replaced.push_back({tie.name, tie.to.parameter->tensors[tie.to.tensor]});
  }
  if (exclude_frozen) engine::leave_out_frozen(model, snapshot.pieces, loose.added, state);
  for (const NamedTensor& now : loose.replaced) {
    TORCH_CHECK_VALUE(!design.topology.slices.contains(now.name), "save_checkpoint: '", now.name,
                      "' was replaced, and is a slice of a parameter; copy into it instead, under no_grad");
  }
  substitute(loose.replaced, channels.data().index() == 0, snapshot.pieces);
  auto unbound = loose.buffers;
  unbound.insert(unbound.end(), loose.added.begin(), loose.added.end());
  const auto* const team = channels.tensor_team();
  const bool has_buffers = team == nullptr || team->index() == 0;  // ranks that share layers have the same ones
  for (const NamedTensor& tensor : has_buffers ? unbound : std::vector<NamedTensor>()) {
    const auto role = checkpoint::Role::buffer(engine::buffer_coordinates_of(channels.mesh(), world.rank));
    snapshot.pieces.push_back(engine::buffer_piece(tensor, role, engine::readable(tensor.tensor).reshape({-1})));
  }
  const auto is_gathered = [](const NamedTensor& now) { return sharding::has_gate_key(now.tensor); };
  unbound.insert(unbound.end(), loose.replaced.begin(), loose.replaced.end());
  // A gathered value may have left a round of wishes under way, which ends before ranks vote.
  if (std::any_of(unbound.begin(), unbound.end(), is_gathered)) enter_alike(Call::save_checkpoint, [](comm::Close&) {});
  return snapshot;
}

std::string Engine::Impl::save_checkpoint(const std::string& directory, std::string tag,
                                          const std::string& client_state_json, const SaveOptions& options) {
  at::NoGradGuard no_grad;
  const auto start = std::chrono::steady_clock::now();
  const auto check = [&](comm::Close& own) {
    own.in_handler = options.in_handler;
    check_saving(directory);
    check_client_state(client_state_json);
  };
  engine::LooseTensors loose = enter_alike(Call::save_checkpoint, check).second;
  saver->finish();
  if (optimizer) optimizer->states().refresh_masters();
  const CheckpointConfig& how = config.checkpoint();
  const bool blocking = options.blocking.value_or(!how.saves_beside_training());
  const auto [target, within] = name_save(directory, std::move(tag), options, blocking);
  if (within) restore_last_boundary(loose.buffers);
  const engine::Generators generators = within ? last.generators() : engine::Generators::of(model.device());
  if (optimizer) progress.parameter_steps = optimizer->counts().uneven_steps();
  if (optimizer) progress.parameter_numbers = optimizer->counts().parameter_numbers();
  engine::Progress saved = progress;
  if (within) saved.micro_steps = last.micro_steps();
  nlohmann::json state = engine::to_json(saved);
  if (auto groups = groups_by_name(model, saved); !groups.is_null()) state["parameter_groups"] = std::move(groups);
  state["zero_stage"] = config.zero().stage;
  state["config"] = config.text();
  const SaveContents contents = contents_of(options, config);
  const bool exclude_frozen = options.exclude_frozen_parameters || contents == SaveContents::trainable;
  if (auto* const stages = channels.stages()) engine::leave_to_later_stages(*stages, loose.buffers);
  checkpoint::SavePlan plan{target, take_snapshot(loose, generators, exclude_frozen, state)};
  if (auto* const stages = channels.stages()) merge_stages(*stages, state);
  if (contents == SaveContents::weights) {
    std::erase_if(plan.snapshot.pieces, [](const checkpoint::Piece& piece) { return piece.role.is_moment(); });
    state[engine::kWeightsOnly] = true;
  }
  if (const auto frozen = engine::frozen_names(model); !frozen.empty()) {
    set_apart(frozen, plan.snapshot.pieces);
    boundary->together("linking frozen parameters", [&] { checkpoint::link_stored(target, plan.snapshot); });
  }
  if (how.bf16_moments) round_moments(plan.snapshot.pieces);
  if (how.folders.size() > 1) checkpoint::deal_out(plan.snapshot.pieces, static_cast<int>(how.folders.size()));
  const auto& compression = stepper->compression();
  plan.manifest = {checkpoint::kManifestVersion, channels.world().size, write_json(state),
                   compression ? compression->add_state(client_state_json) : client_state_json};
  if (how.node_local) plan.manifest = engine::manifest_of_first(channels, std::move(plan.manifest));
  plan.save_latest = options.save_latest;
  plan.retention = {how.keep_last, how.keep_every};
  plan.buffer_bytes = how.buffer_bytes;
  if (blocking) {
    save_now(plan);
  } else {
    boundary->together("naming the checkpoint", [&] { checkpoint::growing_path(target); });
    saver->begin(std::move(plan), start, *boundary);
  }
  return target.directory + "/" + target.tag;
}

void Engine::Impl::save_now(const checkpoint::SavePlan& plan) {
  const bool is_local = config.checkpoint().node_local;
  bool commits = channels.world().rank == 0;
  try {
    boundary->together_on_all_stages("writing the checkpoint",
                                     [&] { checkpoint::write_rank(plan.target, plan.snapshot, plan.buffer_bytes); });
    if (is_local) commits = engine::share_tables(channels, *boundary, plan.target);
    boundary->together_on_all_stages("committing the checkpoint", [&] {
      if (commits) checkpoint::commit(plan.target, plan.manifest, plan.save_latest);
    });
  } catch (const CheckpointError&) {
    if (commits || is_local) checkpoint::abandon(plan.target);
    throw;
  }
  if (commits) checkpoint::retain(plan.target, plan.retention);
}

}  // namespace deeptide
