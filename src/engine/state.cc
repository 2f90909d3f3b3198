// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Saving, loading and looking at state: the engine's side of checkpoints.
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/shard_file.h"
#include "engine/engine_impl.h"

namespace deeptide {

using at::Tensor;
using checkpoint::Piece;
using comm::Message;
using nlohmann::json;
using sharding::Parameter;
using sharding::Unit;

namespace {

constexpr int kFailed = 0;  // Message::numbers of the exchanges below

std::string buffer_role(int rank) { return rank == 0 ? "buffer" : "buffer." + std::to_string(rank); }

std::string to_hex(const Tensor& bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  const auto* data = bytes.const_data_ptr<uint8_t>();
  for (int64_t i = 0; i < bytes.numel(); ++i) {
    text += kDigits[data[i] >> 4];
    text += kDigits[data[i] & 15];
  }
  return text;
}

Tensor from_hex(const std::string& text) {
  Tensor bytes = at::empty({static_cast<int64_t>(text.size() / 2)}, at::kByte);
  auto* data = bytes.mutable_data_ptr<uint8_t>();
  for (size_t i = 0; i + 1 < text.size(); i += 2)
    data[i / 2] = static_cast<uint8_t>(std::stoi(text.substr(i, 2), nullptr, 16));
  return bytes;
}

json hyper_to_json(const Hyperparameters& hyper) {
  json saved;
  for (const HyperparameterInfo& info : hyper.optimizer()->hyperparameters) {
    const double value = hyper.get(info.name);
    saved[info.name] = info.flag ? json(value != 0.0) : json(value);
  }
  return saved;
}

/// Takes over what the checkpoint has of a group; a name that its optimizer lacked keeps its value.
Hyperparameters hyper_from_json(const json& saved, Hyperparameters hyper) {
  // Earlier checkpoints have another name for it.
  const std::map<std::string, std::string> former{{"decoupled_weight_decay", "decoupled_decay"}};
  if (!hyper.optimizer()) return hyper;
  for (const HyperparameterInfo& info : hyper.optimizer()->hyperparameters) {
    const auto old = former.find(info.name);
    const bool by_old_name = !saved.contains(info.name) && old != former.end();
    const json& value = saved.value(by_old_name ? old->second : info.name, json());
    if (!value.is_null()) hyper.set(info.name, value.is_boolean() ? value.get<bool>() : value.get<double>());
  }
  return hyper;
}

/// What a checkpoint restores besides tensors. Parsed whole before anything changes. `own`: the engine's groups.
Engine::Impl::Progress parse_progress(const std::string& state_json, const std::string& rank_json,
                                      const std::vector<Hyperparameters>& own) {
  Engine::Impl::Progress progress;
  const json state = json::parse(state_json);
  progress.global_steps = state.at("global_steps");
  progress.skipped_steps = state.at("skipped_steps");
  progress.micro_steps = state.at("micro_steps");
  progress.optimizer_steps = state.at("optimizer_steps");
  progress.schedule_iteration = state.at("schedule_iteration");
  const json groups = state.value("groups", json::array());
  for (size_t i = 0; i < std::min(groups.size(), own.size()); ++i) {
    progress.hyperparameters.push_back(hyper_from_json(groups[i], own[i]));
  }
  if (rank_json.empty()) return progress;
  const json generators = json::parse(rank_json);
  progress.cpu_generator = from_hex(generators.at("cpu"));
  if (generators.contains("device")) progress.device_generator = from_hex(generators["device"]);
  return progress;
}

/// Generator states that a rank needs to go on exactly where it was.
json rng_to_json(at::Device device) {
  at::Generator cpu = at::globalContext().defaultGenerator(at::kCPU);
  json states = {{"cpu", to_hex(cpu.get_state())}};
  if (device.is_cpu()) return states;
  at::Generator own = at::globalContext().defaultGenerator(device);
  states["device"] = to_hex(own.get_state().cpu());
  return states;
}

void restore_generators(const Engine::Impl::Progress& progress, at::Device device) {
  at::Generator cpu = at::globalContext().defaultGenerator(at::kCPU);
  if (progress.cpu_generator.defined()) cpu.set_state(progress.cpu_generator);
  if (device.is_cpu() || !progress.device_generator.defined()) return;
  at::Generator own = at::globalContext().defaultGenerator(device);
  own.set_state(progress.device_generator);
}

/// Of what this rank holds: what it owns (to save it, once a world), or all (to load it; at stage 0 every rank holds
/// all).
enum class Extent : uint8_t { owned, held };

/// The piece of `p` in `flat`, which starts at element `begin` of its unit.
Piece piece_of(const Unit& unit, const Parameter& p, const std::string& role, const Tensor& flat, int64_t begin,
               Extent extent) {
  auto [first, last] = unit.owned_range(p);
  if (extent == Extent::held) {
    first = std::max(p.offset, begin);
    last = std::max(first, std::min(p.offset + p.numel, begin + flat.numel()));
  }
  Piece piece{p.name, role, p.tensors.front().sizes().vec(), first - p.offset, last - p.offset, {}};
  if (first == last) piece.begin = piece.end = 0;
  piece.data = first == last ? at::empty({0}, flat.options()) : flat.narrow(0, first - begin, last - first);
  return piece;
}

Piece buffer_piece(const NamedTensor& buffer, const std::string& role, const Tensor& storage) {
  return {buffer.name, role, buffer.tensor.sizes().vec(), 0, buffer.tensor.numel(), storage};
}

/// Everything that this rank saves, or wants on load, as views of the live state. `moments`: optimizer states too.
std::vector<Piece> live_pieces(const Engine::Impl& impl, bool moments, Extent extent) {
  std::vector<Piece> pieces;
  int trained = 0;
  for (const auto& unit : impl.model.units()) {
    const bool has_states = unit->layout().trainable && impl.optimizer != nullptr;
    if (!has_states) {
      for (const Parameter& p : unit->parameters()) {
        pieces.push_back(piece_of(*unit, p, "param", unit->shard(), unit->shard_begin(), extent));
      }
    } else {
      for (const auto& state : impl.optimizer->states(trained)) {
        if (!moments && state.role != "master") continue;
        for (const Parameter& p : unit->parameters()) {
          pieces.push_back(piece_of(*unit, p, state.role, state.data, impl.optimizer->state_begin(trained), extent));
        }
      }
    }
    if (unit->layout().trainable) ++trained;
  }
  return pieces;
}

std::string joined(const std::vector<std::string>& lines, size_t most) {
  std::string text;
  for (size_t i = 0; i < std::min(lines.size(), most); ++i) text += "\n  " + lines[i];
  if (lines.size() > most) text += "\n  … and " + std::to_string(lines.size() - most) + " more";
  return text;
}

/// Runs `work` here and tells all ranks whether it failed; throws on every rank when it did anywhere.
template <typename Work>
void together(Engine::Impl& impl, const char* what, Work work) {
  std::string failure;
  try {
    work();
  } catch (const std::exception& error) {
    failure = error.what();
  }
  Message own;
  own.numbers[kFailed] = failure.empty() ? 0 : 1;
  const auto messages = impl.residency->exchange(own, {impl.global_steps, "checkpoint", what});
  if (!failure.empty()) throw CheckpointError(failure);
  for (size_t r = 0; r < messages.size(); ++r) {
    if (messages[r].numbers[kFailed] != 0) {
      throw CheckpointError(std::string(what) + " failed on rank " + std::to_string(r) + "; see its error");
    }
  }
}

/// A checkpoint without optimizer (or an engine without one) has "param" where the other has "master".
void translate_roles(const checkpoint::Reader& reader, std::vector<Piece>& wanted) {
  std::map<std::string, std::string> weights;  // name -> role in the file
  for (const Piece& piece : reader.table()) {
    if (piece.role == "master" || piece.role == "param") weights[piece.name] = piece.role;
  }
  for (Piece& piece : wanted) {
    const auto found = weights.find(piece.name);
    if ((piece.role == "master" || piece.role == "param") && found != weights.end()) piece.role = found->second;
  }
}

void add_buffers(const Engine::Impl& impl, const checkpoint::Reader& reader, std::vector<Piece>& wanted,
                 std::vector<Tensor>& staged) {
  const std::string own = buffer_role(impl.world.rank);
  std::string role = "buffer";
  for (const Piece& piece : reader.table()) {
    if (piece.role == own) role = own;
  }
  for (const NamedTensor& buffer : impl.model.buffers()) {
    staged.push_back(at::empty({buffer.tensor.numel()}, buffer.tensor.options()));
    wanted.push_back(buffer_piece(buffer, role, staged.back()));
  }
}

/// Roles of the rule that the engine's groups do not need, such as the momentum of an SGD without one.
std::set<std::string> unkept_roles(const zero::ShardedOptimizer* optimizer) {
  std::set<std::string> roles;
  if (!optimizer) return roles;
  for (const optim::StateRole& role : optimizer->rule().roles()) roles.insert(role.name);
  for (const auto& state : optimizer->states(0)) roles.erase(state.role);
  return roles;
}

/// Takes out of `wanted` the states that this engine keeps but the groups saved did not: they start anew, as zeros.
std::set<std::string> take_fresh_roles(const checkpoint::Reader& reader, const optim::Rule& rule,
                                       const std::vector<Hyperparameters>& saved, std::vector<Piece>& wanted) {
  std::set<std::string> fresh;
  for (size_t role = 0; role < rule.roles().size() && !saved.empty(); ++role) {
    const auto keeps = [&](const Hyperparameters& hyper) { return rule.keeps(role, hyper); };
    if (std::none_of(saved.begin(), saved.end(), keeps)) fresh.insert(rule.roles()[role].name);
  }
  for (const Piece& piece : reader.table()) fresh.erase(piece.role);
  std::erase_if(wanted, [&](const Piece& piece) { return fresh.contains(piece.role); });
  return fresh;
}

/// `strict` reports tensors that were not requested: lists the ones that this load skips deliberately, as empty pieces.
void add_ignored(const checkpoint::Reader& reader, bool moments, const std::set<std::string>& unkept,
                 std::vector<Piece>& wanted) {
  std::set<std::pair<std::string, std::string>> known;
  for (const Piece& piece : wanted) known.emplace(piece.name, piece.role);
  for (Piece piece : reader.table()) {
    const bool buffer = piece.role.rfind("buffer", 0) == 0;
    const bool moment = piece.role != "master" && piece.role != "param" && !buffer;
    bool foreign_buffer = false;  // the same buffer as another rank saved it
    for (const auto& [name, role] : known)
      foreign_buffer = foreign_buffer || (buffer && name == piece.name && role != piece.role);
    if (known.count({piece.name, piece.role}) ||
        !(foreign_buffer || (moment && !moments) || unkept.contains(piece.role)))
      continue;
    piece.begin = piece.end = 0;
    wanted.push_back(std::move(piece));  // without data: of whatever type the checkpoint has
  }
}

}  // namespace

std::string Engine::Impl::save_checkpoint(const std::string& directory, std::string tag,
                                          const std::string& client_state_json, bool save_latest) {
  at::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(!directory.empty(), "save_checkpoint: the folder's name is empty");
  TORCH_CHECK_VALUE(!reducer || !(reducer->has_pending() || reducer->has_gradient()),
                    "save_checkpoint between backward() and step(): the gradients would be lost; call step() first");
  TORCH_CHECK_VALUE(micro_steps % batch.accumulation == 0 || boundary_override,
                    "save_checkpoint within an accumulation (", micro_steps % batch.accumulation, "/",
                    batch.accumulation,
                    " micro-batches done): the gradients would be lost; save after an applied step");
  if (tag.empty()) tag = "global_step" + std::to_string(global_steps);
  model.check_bound();
  enter(Operation::save_checkpoint);
  json state = {{"global_steps", global_steps},
                {"skipped_steps", skipped_steps},
                {"micro_steps", micro_steps},
                {"optimizer_steps", optimizer ? optimizer->steps() : 0},
                {"schedule_iteration", schedule_iteration},
                {"zero_stage", config.zero.stage},
                {"config", config.text}};
  for (size_t i = 0; i < hyperparameters.size(); ++i) state["groups"].push_back(hyper_to_json(hyperparameters[i]));
  auto pieces = live_pieces(*this, /*moments=*/true, Extent::owned);
  for (const NamedTensor& buffer : model.buffers()) {
    pieces.push_back(buffer_piece(buffer, buffer_role(world.rank), buffer.tensor.detach().reshape({-1})));
  }
  try {
    together(*this, "writing the checkpoint",
             [&] { checkpoint::write_rank(directory, tag, world.rank, pieces, rng_to_json(model.device()).dump()); });
    together(*this, "committing the checkpoint", [&] {
      const checkpoint::Manifest manifest{1, world.size, state.dump(), client_state_json};
      if (world.rank == 0) checkpoint::commit(directory, tag, manifest, save_latest);
    });
  } catch (const CheckpointError&) {
    if (world.rank == 0) checkpoint::abandon(directory, tag);
    throw;
  }
  return directory + "/" + tag;
}

std::optional<LoadedCheckpoint> Engine::Impl::load_checkpoint(const std::string& directory, std::string tag,
                                                              const LoadOptions& options) {
  at::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(!directory.empty(), "load_checkpoint: the folder's name is empty");
  model.check_bound();
  Message entering;
  entering.numbers[kRounds] = reducer ? reducer->rounds_begun() : 0;
  const int64_t rounds_begun = most_rounds(enter(Operation::load_checkpoint, entering));
  residency->release_all();
  if (tag.empty()) tag = checkpoint::latest_tag(directory);
  Message found;
  found.numbers[kFailed] = tag.empty() ? 1 : static_cast<int64_t>(std::hash<std::string>{}(tag) >> 2);
  const auto tags = residency->exchange(found, {global_steps, "checkpoint", "agreeing on the tag to load"});
  for (const Message& m : tags) {
    if (m.numbers[kFailed] != tags[0].numbers[kFailed])
      throw CheckpointError("the ranks see different checkpoints in " + directory);
  }
  if (tag.empty()) return std::nullopt;

  const bool moments = options.optimizer_states && !options.module_only && optimizer != nullptr;
  std::unique_ptr<checkpoint::Reader> reader;
  std::vector<Piece> wanted;
  std::vector<Tensor> staged;
  Progress progress;
  std::set<std::string> fresh;
  together(*this, "checking the checkpoint", [&] {
    reader = std::make_unique<checkpoint::Reader>(directory, tag);
    progress = parse_progress(reader->manifest().state_json, reader->rank_state_json(world.rank), hyperparameters);
    if (moments) optimizer->keep_states(progress.hyperparameters);
    wanted = live_pieces(*this, moments, Extent::held);
    if (moments) fresh = take_fresh_roles(*reader, *rule, progress.hyperparameters, wanted);
    translate_roles(*reader, wanted);
    add_buffers(*this, *reader, wanted, staged);
    add_ignored(*reader, moments, unkept_roles(optimizer.get()), wanted);
    const auto mismatches = reader->check(wanted, options.strict);
    if (!mismatches.empty()) {
      throw CheckpointError("checkpoint " + directory + "/" + tag +
                            " does not fit the model (nothing was changed):" + joined(mismatches, 20));
    }
  });
  together(*this, "reading the checkpoint", [&] { reader->read(wanted); });
  if (!fresh.empty()) optimizer->zero_states(fresh);
  for (size_t i = 0; i < staged.size(); ++i) {
    Tensor buffer = model.buffers()[i].tensor;
    buffer.copy_(staged[i].view(buffer.sizes()));
  }
  publish_parameters(rounds_begun);
  if (!options.module_only) restore_progress(progress, moments, options);
  return LoadedCheckpoint{directory + "/" + tag, reader->manifest().client_state_json};
}

/// Parameters follow from the masters that were read; frozen units from their shards.
void Engine::Impl::publish_parameters(int64_t rounds_begun) {
  if (optimizer) optimizer->publish_all();
  for (const auto& unit : model.units()) {
    for (Parameter& p : unit->parameters()) p.rewritten = false;
    if (unit->sharded() || unit->shared() || (unit->layout().trainable && optimizer)) continue;
    auto pending = gathers.all_gather(unit->whole(), unit->shard());
    gathers.wait(pending, {global_steps, "checkpoint", "publishing unit '" + unit->layout().name + "'"});
  }
  if (model.arena()) gathers.barrier({global_steps, "checkpoint", "waiting for all ranks to have read theirs"});
  if (reducer) reducer->discard(rounds_begun);
}

void Engine::Impl::restore_progress(const Progress& saved, bool moments, const LoadOptions& options) {
  global_steps = saved.global_steps;
  skipped_steps = saved.skipped_steps;
  // Saved at a step's end; where a step has another number of micro-batches now, the next one begins here all the same.
  micro_steps = saved.micro_steps - saved.micro_steps % batch.accumulation;
  if (moments) {
    optimizer->set_steps(saved.optimizer_steps);
    std::copy(saved.hyperparameters.begin(), saved.hyperparameters.end(), hyperparameters.begin());
  }
  if (options.lr_scheduler_states) schedule_iteration = saved.schedule_iteration;
  if (schedule) schedule->apply(schedule_iteration, base_hyperparameters, hyperparameters);
  restore_generators(saved, model.device());
  set_boundary(boundary_override);
}

std::vector<NamedTensor> Engine::Impl::module_state_dict() {
  at::NoGradGuard no_grad;
  model.check_bound();
  enter(Operation::gather_state);
  std::vector<NamedTensor> state;
  for (const auto& unit : model.units()) {
    Tensor whole = unit->whole();
    if (unit->sharded()) {
      whole =
          device::allocate_flat(ledger, device::Role::gathered, unit->numel(), unit->layout().dtype, model.device());
      auto pending = gathers.all_gather(whole, unit->shard());
      gathers.wait(pending, {global_steps, "checkpoint", "gathering unit '" + unit->layout().name + "'"});
    }
    for (const Parameter& p : unit->parameters()) {
      const Tensor copy = p.view_of(whole).clone().cpu();
      state.push_back({p.name, copy});
      for (const auto& alias : p.aliases) state.push_back({alias, copy});
    }
  }
  for (const NamedTensor& buffer : model.buffers())
    state.push_back({buffer.name, buffer.tensor.detach().clone().cpu()});
  return state;
}

Tensor Engine::Impl::full_state(const std::string& name, const std::string& role) {
  at::NoGradGuard no_grad;
  const Parameter* p = model.find(name);
  TORCH_CHECK_VALUE(p != nullptr, "the model has no parameter '", name, "'");
  Message own;
  own.numbers[kRounds] = reducer ? reducer->rounds_wanted() : 0;
  const auto messages = enter(Operation::gather_state, own);
  if (role == "gradient" && reducer) {  // what backward has left in buckets belongs to it
    reducer->finish(most_rounds(messages));
  }
  const auto trainable = model.trainable();
  const auto at_unit = std::find(trainable.begin(), trainable.end(), p->unit);
  if (!optimizer || at_unit == trainable.end()) return {};
  const int u = static_cast<int>(at_unit - trainable.begin());
  Tensor mine;
  if (role == "gradient" && reducer->has_gradient()) mine = reducer->gradient(u).sum();
  for (const auto& state : optimizer->states(u)) {
    if (state.role == role) mine = state.data;
  }
  if (!mine.defined()) return {};
  Tensor whole = mine;
  if (mine.numel() != p->unit->numel()) {
    whole = at::empty({p->unit->numel()}, mine.options());
    auto pending = gathers.all_gather(whole, mine);
    gathers.wait(pending, {global_steps, "checkpoint", "gathering " + role + " of '" + name + "'"});
  }
  return p->view_of(whole).clone().cpu();
}

}  // namespace deeptide
