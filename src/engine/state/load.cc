// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Loads a checkpoint: every rank checks everything before any rank changes anything.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <sstream>

#include "base/libraries/format.h"
#include "base/libraries/nlohmann.h"
#include "base/log.h"
#include "base/sha256.h"
#include "checkpoint/imports/foreign_table.h"
#include "checkpoint/imports/open_checkpoint.h"
#include "checkpoint/load/other_folders.h"
#include "checkpoint/load/reader.h"
#include "deeptide/compression.h"
#include "engine/engine_impl.h"
#include "engine/model/pieces.h"
#include "engine/model/slices.h"
#include "engine/state/custom_state.h"
#include "engine/state/node_local.h"
#include "engine/state/partial_load.h"
#include "engine/state/rounding_errors.h"
#include "engine/state/saved_roles.h"
#include "engine/step/across_stages.h"

namespace deeptide {

using at::Tensor;
using checkpoint::Coordinates;
using checkpoint::Piece;
using checkpoint::Role;
using checkpoint::TensorId;
using comm::Call;
using comm::Vote;
using engine::loose_role;
using engine::Progress;
using engine::SavedRoles;
using engine::translate_roles;
using sharding::Parameter;
using zero::StateName;

namespace {

std::string joined(const std::vector<std::string>& lines, size_t most) {
  std::string text;
  for (size_t i = 0; i < std::min(lines.size(), most); ++i) text += "\n  " + lines[i];
  if (lines.size() > most) text += "\n  … and " + std::to_string(lines.size() - most) + " more";
  return text;
}

/// Requests the tensors that are not the engine's.
void add_loose(const std::vector<NamedTensor>& loose, const SavedRoles& saved, std::vector<Piece>& wanted,
               std::vector<Tensor>& staged) {
  for (const NamedTensor& tensor : loose) {
    staged.push_back(at::empty({tensor.tensor.numel()}, tensor.tensor.options().requires_grad(false)));
    wanted.push_back(engine::buffer_piece(tensor, loose_role(saved, tensor.name), staged.back()));
  }
}

/// Restores what is not read into its place.
void fill(const std::vector<NamedTensor>& loose, const std::vector<Tensor>& staged, engine::CustomLoad& custom_states,
          const std::set<StateName>& fresh, zero::ShardedOptimizer* optimizer) {
  if (!fresh.empty()) optimizer->states().zero(fresh);
  custom_states.apply();
  for (size_t i = 0; i < staged.size(); ++i) loose[i].tensor.copy_(staged[i].view(loose[i].tensor.sizes()));
}

/// Requests all that a load fills; returns what the checkpoint has not, and the load goes on without.
engine::Absent request(const checkpoint::Reader& reader, const SavedRoles& saved, bool strict,
                       std::vector<NamedTensor>& loose, std::vector<Piece>& wanted, std::vector<Tensor>& staged) {
  translate_roles(saved, wanted);
  engine::Absent absent(reader, strict);
  absent.take_from(wanted);
  absent.take_from(loose, [&](const std::string& name) { return loose_role(saved, name); });
  add_loose(loose, saved, wanted, staged);
  return absent;
}

/// A parameter that took another name after initialize has one value, so the checkpoint may have only one for it.
class TiesToCompare {
 public:
  void add(const std::vector<engine::LateTie>& ties, const SavedRoles& saved) {
    for (const engine::LateTie& tie : ties) {
      const std::string& name = tie.to.parameter->name;
      if (!saved.has(tie.name) || !saved.has(name)) continue;
      const Tensor here = request(saved, tie.name, tie.to.parameter->tensors[tie.to.tensor]);
      values_.push_back({tie, here, request(saved, name, tie.to.parameter->tensors.front())});
    }
  }
  /// Names what is to be read before `check`: values in the parameters' types.
  const std::vector<Piece>& wanted() const { return wanted_; }

  void check() const {
    for (const auto& [tie, here, there] : values_) {
      const bool transposed = tie.to.tensor != 0 && here.sizes() != there.sizes();
      if (here.equal(transposed ? there.t() : there)) continue;
      throw CheckpointError("'" + tie.name + "' is '" + tie.to.parameter->name +
                            "' now, and the checkpoint has two values for them (nothing was changed): tie them after "
                            "the load");
    }
  }

 private:
  struct Values {
    engine::LateTie tie;
    Tensor here, there;
  };

  Tensor request(const SavedRoles& saved, const std::string& name, const Tensor& like) {
    const Tensor values = at::empty({like.numel()}, like.options().requires_grad(false));
    wanted_.push_back(engine::buffer_piece({name, like}, loose_role(saved, name), values));
    return values.view(like.sizes());
  }

  std::vector<Values> values_;
  std::vector<Piece> wanted_;
};

StateName name_of(const Piece& piece) { return {piece.name, piece.role.moment_name()}; }

/// Takes out of `wanted` the states that this engine keeps but the groups saved did not, such as the momentum of an SGD
/// that had none: they start anew, as zeros.
std::set<StateName> take_fresh_states(const checkpoint::Reader& reader, const optim::Rule& rule,
                                      const engine::BoundModel& model, const engine::Progress& saved,
                                      std::vector<Piece>& wanted) {
  std::set<StateName> fresh;
  for (const auto* p : model.parameters()) {
    for (size_t role = 0; role < rule.roles().size() && p->group >= 0; ++role) {
      const bool kept = rule.keeps(role, saved.hyperparameters.at(p->group));
      if (!kept) fresh.insert({p->name, rule.roles()[role].name});
    }
  }
  for (const Piece& piece : reader.table()) fresh.erase(name_of(piece));
  std::erase_if(wanted, [&](const Piece& piece) { return fresh.contains(name_of(piece)); });
  return fresh;
}

/// Says that this load loses precision: the checkpoint has states in fp32 that this engine keeps in 16 bits.
void tell_of_rounding(const checkpoint::Reader& reader, const std::vector<Piece>& wanted) {
  std::map<StateName, at::ScalarType> kept;
  for (const Piece& piece : wanted) {
    if (piece.role.is_moment()) kept[name_of(piece)] = piece.data.dtype();
  }
  for (const Piece& piece : reader.table()) {
    const auto found = piece.role.is_moment() ? kept.find(name_of(piece)) : kept.end();
    if (found == kept.end() || piece.data.dtype() != at::kFloat || found->second == at::kFloat) continue;
    return log(LogLevel::info, "load_checkpoint: the optimizer's states, saved in fp32, are rounded to " +
                                   std::string(found->second == at::kHalf ? "fp16" : "bf16") +
                                   ", as this run keeps them");
  }
}

/// Tells of further changes, which alter no number.
void tell_of_changes(const checkpoint::Reader& reader, const std::vector<Piece>& wanted, const Progress& saved,
                     const Progress& own) {
  tell_of_rounding(reader, wanted);
  if (saved.offload_ratio < 0.0 || saved.offload_ratio == own.offload_ratio) return;
  const std::string here = own.offload_ratio < 0.0 ? "this run's configuration gives its own"
                                                   : format_text("this run measured {:.2f}", own.offload_ratio);
  log(LogLevel::info,
      format_text("load_checkpoint: offload_optimizer.ratio, which was \"auto\", was measured as {:.2f} "
                  "when this was saved; {}",
                  saved.offload_ratio, here));
}

/// Tensors that this load leaves out on purpose: further names of late ties, other ranks' buffers, moments if they
/// are not wanted, moments that this engine does not keep, and what other stages have.
std::set<TensorId> ignored_tensors(const checkpoint::Reader& reader, bool moments, const std::set<StateName>& unkept,
                                   const std::vector<engine::LateTie>& ties, const std::vector<Piece>& wanted,
                                   const std::set<std::string>& elsewhere, bool keeps_values) {
  std::set<std::string> buffers;
  for (const engine::LateTie& tie : ties) buffers.insert(tie.name);
  for (const Piece& piece : wanted) {
    if (piece.role.is_buffer()) buffers.insert(piece.name);
  }
  std::set<TensorId> ignored;
  for (const Piece& piece : reader.table()) {
    const bool of_another_rank = piece.role.is_buffer() && buffers.count(piece.name) != 0;
    const bool unkept_moment = piece.role.is_moment() && (!moments || unkept.contains(name_of(piece)));
    const bool unkept_value =
        piece.role.is_moment() && !keeps_values && piece.role.moment_name().ends_with(checkpoint::kWholeState);
    const bool leaves_out = unkept_value || of_another_rank || unkept_moment || piece.role.is_rounding_error();
    if (leaves_out || elsewhere.contains(piece.name)) ignored.insert({piece.name, piece.role});
  }
  return ignored;
}

/// Errors: CheckpointError if optimizer states are needed and weights alone were saved.
Progress saved_progress(const checkpoint::Reader& reader, const std::string& path, bool needs_states,
                        const Progress& own) {
  const auto state = read_json(reader.manifest().state_json);
  if (needs_states && state.is_object() && state.value(engine::kWeightsOnly, false)) {
    throw CheckpointError("checkpoint " + path +
                          " has no optimizer states, since it was saved with contents \"weights\" (nothing was "
                          "changed): load it with load_optimizer_states=False, or another one");
  }
  return engine::progress_from_json(state, own);
}

/// The generators of the rank that was at this one's place.
engine::Generators saved_generators(const checkpoint::Reader& reader, engine::Channels& channels) {
  const auto own = engine::coordinates_of(channels.mesh(), channels.world().rank);
  return engine::Generators::from_json(reader.rank_state_json(own));
}

/// Reads over what the engine has: whoever handles an error must know that.
template <typename Read>
void told_of_replacement(Read read) try {
  read();
} catch (const CheckpointError& error) {
  throw CheckpointError(std::string(error.what()) +
                        " (a part of the engine's state was replaced: load another checkpoint before it goes on)");
}

/// Returns what the checkpoint has beyond what is wanted, where that is no error.
/// Errors: CheckpointError listing what does not fit, and the `differences`.
std::vector<std::string> require_fit(const std::string& path, const checkpoint::Reader& reader,
                                     const std::vector<Piece>& wanted, const std::set<TensorId>& ignored, bool strict,
                                     const std::vector<std::string>& differences) {
  auto misfits = reader.check(wanted, strict, ignored);
  misfits.insert(misfits.end(), differences.begin(), differences.end());
  if (!misfits.empty()) {
    throw CheckpointError("checkpoint " + path +
                          " does not fit the model (nothing was changed):" + joined(misfits, 20));
  }
  return strict ? std::vector<std::string>() : reader.check(wanted, true, ignored);
}

std::set<std::string> names_of(const engine::BoundModel& model, const std::vector<NamedTensor>& loose) {
  std::set<std::string> names;
  for (const auto& unit : model.units()) {
    for (const auto& parameter : unit->parameters()) names.insert(parameter.name);
  }
  for (const NamedTensor& tensor : loose) names.insert(tensor.name);
  return names;
}

/// The folder of a load: one that all ranks see, or each host's own.
class Source {
 public:
  /// `on_host`: how many ranks of the data team this host has.
  Source(engine::Channels& channels, engine::Boundary& boundary, const std::string& directory, const std::string& tag,
         bool is_local, int on_host)
      : channels_(channels),
        boundary_(boundary),
        directory_(directory),
        tag_(tag),
        is_local_(is_local),
        on_host_(on_host) {
    if (is_local) here_ = engine::look_at_hosts(channels, directory, tag);
  }

  /// `names`: the model's.
  checkpoint::Reader open(const std::set<std::string>& names) const {
    return is_local_ ? here_.open() : checkpoint::open_checkpoint(directory_, tag_, names);
  }
  /// Unless there is nothing of worth to lose, and what is read will be compared then.
  void verify(const checkpoint::Reader& reader, const std::vector<Piece>& wanted, bool has_trained) const {
    if (!is_local_ && !has_trained) return;
    // Files that a stage wants may lie where only ranks of another stage are.
    const auto& named = channels_.stages() == nullptr ? wanted : reader.table();
    if (is_local_) return reader.verify(named, here_.index, here_.ranks);
    reader.verify(wanted, channels_.data().index(), channels_.data().size());  // a stage's ranks want the same tensors
  }
  /// Collective. Then runs `go_on`. Errors: CheckpointError, on every rank, as those of `go_on`.
  template <typename GoOn>
  void compare(const checkpoint::Reader& reader, const TiesToCompare& ties, GoOn go_on) const {
    if (is_local_) engine::read_from_hosts(channels_, boundary_, reader, ties.wanted(), on_host_);
    boundary_.together_on_all_stages("comparing what is tied now", [&] {
      if (!is_local_) reader.read(ties.wanted(), on_host_);
      ties.check();
      go_on();
    });
  }
  /// Collective. Until boundary.go_on() the engine takes no step. Errors: CheckpointError, on every rank.
  void read(const checkpoint::Reader& reader, const std::vector<Piece>& wanted) const {
    boundary_.refuse_to_go_on("loading " + directory_ + "/" + tag_ +
                              " failed when a part of the engine's state was replaced: load another checkpoint before "
                              "the next step or save");
    if (is_local_) {
      return told_of_replacement([&] { engine::read_from_hosts(channels_, boundary_, reader, wanted, on_host_); });
    }
    boundary_.together_on_all_stages("reading the checkpoint",
                                     [&] { told_of_replacement([&] { reader.read(wanted, on_host_); }); });
  }

 private:
  engine::Channels& channels_;
  engine::Boundary& boundary_;
  const std::string &directory_, &tag_;
  bool is_local_;
  int on_host_;
  engine::HostFolder here_;
};

/// Returns an equal number on ranks that see equal text, in any build.
uint64_t digest_of(const std::string& text) {
  const auto hash = sha256(text);
  uint64_t digest = 0;
  std::memcpy(&digest, hash.data(), sizeof digest);
  return digest;
}

/// Resolves a load without a tag: weights that lie in the folder itself, if they alone are wanted, or the checkpoint
/// that `latest_universal` or `latest` names. Empty if there is none.
/// Errors: CheckpointError if the path leads to something else; ValueError if a universal one is wanted and there is
/// none.
std::string default_tag(const std::string& directory, const LoadOptions& options, bool universal) {
  std::string tag = options.module_only ? checkpoint::tag_of_weights(directory) : "";
  if (tag.empty()) tag = checkpoint::tag_to_load(directory, universal);
  const std::string instead = tag.empty() ? checkpoint::other_contents(directory) : "";
  if (!instead.empty()) throw CheckpointError("no checkpoint in " + directory + instead);
  TORCH_CHECK_VALUE(!universal || !tag.empty(), "load_checkpoint: checkpoint.load_universal is true, and ", directory,
                    " has no latest_universal and no latest: name the tag, or leave the key out");
  return tag;
}

}  // namespace

/// Returns the tag to load: the given one, or what no tag means. Empty if no rank finds any.
/// Errors: CheckpointError if ranks have different ones.
std::string Engine::Impl::agree_on_tag(const std::string& directory, const std::string& given,
                                       const LoadOptions& options) {
  saver->finish();  // it may be what is to be loaded
  std::string tag = given;
  boundary->together_on_all_stages("looking for the latest checkpoint", [&] {
    if (tag.empty()) tag = default_tag(directory, options, config.checkpoint().load_universal);
  });
  if (given.empty() && config.checkpoint().node_local) tag = engine::agree_on_tag(channels, directory, tag);
  const Vote own{.failed = false, .digest = digest_of(tag)};
  for (const Vote& vote : boundary->exchange(own, {"checkpoint", "agreeing on the tag to load"})) {
    if (vote.digest != own.digest) throw CheckpointError("the ranks found different checkpoints in " + directory);
  }
  if (tag.empty() && channels.is_first()) {
    log(LogLevel::warning, "load_checkpoint: no checkpoint in " + directory + ", which has no file 'latest'" +
                               checkpoint::tags_in(directory) + "; nothing was loaded");
  }
  return tag;
}

/// Collective over the mesh. Of parameters and buffers; none without a pipeline.
std::set<std::string> Engine::Impl::names_of_other_stages(const std::vector<NamedTensor>& loose) {
  auto* const stages = channels.stages();
  if (stages == nullptr) return {};
  std::string own;
  for (const Parameter* p : model.parameters()) own += p->name + "\n";
  for (const NamedTensor& tensor : loose) own += tensor.name + "\n";
  std::set<std::string> names;
  const auto texts = engine::texts_of_stages(*stages, own, "comparing names with the other stages");
  for (int stage = 0; stage < stages->size(); ++stage) {
    std::istringstream lines(texts[static_cast<size_t>(stage)]);
    for (std::string name; stage != stages->index() && std::getline(lines, name);) names.insert(name);
  }
  return names;
}

/// Whether there is state that a damaged checkpoint must not change. What initialize() left is worth no second read of
/// all that is to come.
bool Engine::Impl::has_trained() const {
  return (progress.global_steps > 0 || has_loaded) && !boundary->refuses_to_go_on();
}

std::optional<LoadedCheckpoint> Engine::Impl::load_checkpoint(const std::string& directory, std::string tag,
                                                              const LoadOptions& options) {
  at::NoGradGuard no_grad;
  const auto entered = enter_alike(Call::load_checkpoint, [&](comm::Close&) {
    TORCH_CHECK_VALUE(!directory.empty(), "load_checkpoint: the folder's name is empty");
  });
  const engine::LooseTensors& now = entered.second;
  std::vector<NamedTensor> loose = now.all();
  residency->release_all();
  tag = agree_on_tag(directory, tag, options);
  if (tag.empty()) return std::nullopt;
  const bool moments = options.optimizer_states && !options.module_only && optimizer != nullptr;
  const auto elsewhere = names_of_other_stages(loose);
  std::unique_ptr<checkpoint::Reader> reader;
  std::vector<Piece> wanted;
  std::vector<Tensor> staged;
  Progress saved;
  engine::Generators generators;
  std::set<StateName> fresh;
  std::optional<engine::Absent> absent;
  std::vector<std::string> unexpected;
  TiesToCompare ties;
  engine::CustomLoad custom_states;
  engine::RoundingErrorLoad errors;
  const Source source(channels, *boundary, directory, tag, config.checkpoint().node_local, design.topology.on_host);
  boundary->together_on_all_stages("checking the checkpoint", [&] {
    reader = std::make_unique<checkpoint::Reader>(source.open(names_of(model, loose)));
    saved = saved_progress(*reader, directory + "/" + tag, moments && options.strict, progress);
    generators = saved_generators(*reader, channels);
    const auto differences = moments ? engine::mismatches(saved, progress) : std::vector<std::string>();
    if (moments && differences.empty()) optimizer->states().keep(saved.hyperparameters);
    wanted = engine::whole_pieces(design.topology, model, optimizer.get(), moments, engine::Extent::held);
    if (moments && differences.empty()) fresh = take_fresh_states(*reader, *design.rule, model, saved, wanted);
    if (moments && optimizer->custom()) custom_states = {design.topology, *reader, *optimizer->custom()};
    wanted.insert(wanted.end(), custom_states.wanted().begin(), custom_states.wanted().end());
    const SavedRoles roles(*reader, engine::buffer_coordinates_of(channels.mesh(), channels.world().rank));
    absent = request(*reader, roles, options.strict, loose, wanted, staged);
    const auto unkept = optimizer ? optimizer->states().unkept() : std::set<StateName>();
    const auto ignored =
        ignored_tensors(*reader, moments, unkept, now.tied, wanted, elsewhere, optimizer && optimizer->custom());
    if (moments) errors = {*reader, model, rounding_errors(), channels, wanted};
    unexpected = require_fit(directory + "/" + tag, *reader, wanted, ignored, options.strict, differences);
    if (config.checkpoint().verify) source.verify(*reader, wanted, has_trained());
    ties.add(now.tied, roles);
  });
  source.compare(*reader, ties, [&] {
    fresh.insert(absent->fresh().begin(), absent->fresh().end());
    go_on_without(*absent, unexpected, saved);
  });
  if (channels.is_first()) tell_of_changes(*reader, wanted, saved, progress);
  if (intake) intake->drop_left();
  source.read(*reader, wanted);
  boundary->together("restoring buffers", [&] { fill(loose, staged, custom_states, fresh, optimizer.get()); });
  publish_parameters(engine::most_rounds(entered.first), errors);
  if (!options.module_only) {
    boundary->together("restoring the random number generators", [&] { generators.restore(model.device()); });
    stepper->restore(saved, moments, options.lr_scheduler_states);
  }
  return end_load(directory + "/" + tag, *reader, options);
}

LoadedCheckpoint Engine::Impl::end_load(const std::string& path, const checkpoint::Reader& reader,
                                        const LoadOptions& options) {
  const std::string& client_state = reader.manifest().client_state_json;
  const auto& compression = stepper->compression();
  if (compression && !options.module_only) compression->take_state(client_state);
  boundary->go_on();
  has_loaded = true;
  return {path, client_state};
}

/// Prepares what a load leaves as it is: masters follow what the program wrote, counts stay.
void Engine::Impl::go_on_without(const engine::Absent& absent, const std::vector<std::string>& unexpected,
                                 engine::Progress& saved) {
  if (channels.is_first()) absent.tell(unexpected);
  if (absent.empty() || !optimizer) return;
  optimizer->states().refresh_masters();
  progress.parameter_steps = optimizer->counts().uneven_steps();
  progress.parameter_numbers = optimizer->counts().parameter_numbers();
  absent.keep_counts(saved, progress);
}

/// Publishes parameters from the masters that were read, and frozen units from their shards.
void Engine::Impl::publish_parameters(int64_t rounds_begun, const engine::RoundingErrorLoad& errors) {
  auto& gathers = channels.gathers();  // reductions may be under way, on some ranks more than on others
  if (optimizer) optimizer->publish_all(channels.all(engine::Channels::Purpose::gathers));
  bool shared = false;
  for (const auto& unit : model.units()) {
    unit->forget_external_writes();
    shared = shared || unit->memory() == sharding::UnitMemory::shared;
    if (unit->memory() != sharding::UnitMemory::whole || (unit->layout().trainable && optimizer)) continue;
    auto& over = channels.of(unit->shard_over(), engine::Channels::Purpose::gathers);
    auto pending = over.all_gather(unit->whole(), unit->shard().in_place());
    over.wait(pending, {"checkpoint", "publishing unit '" + unit->layout().name + "'"});
  }
  if (shared) gathers.barrier({"checkpoint", "waiting for all ranks to read their shards"});
  if (!reducer) return;
  reducer->discard(rounds_begun);
  errors.apply(rounding_errors());  // the rounds that ended just now have left some
}

}  // namespace deeptide
