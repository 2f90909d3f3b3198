// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A model as a list of layers, which ranks train as the stages of a pipeline.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "deeptide/config.h"
#include "deeptide/engine.h"
#include "deeptide/world.h"

namespace deeptide {

/// The tensors that one layer hands to the next, often one.
using Activations = std::vector<at::Tensor>;

/// One layer of a PipelineModule: a module, or a function without parameters, that takes one tensor or Activations and
/// returns one or the other. Value type.
class DEEPTIDE_API PipelineLayer {
 public:
  using Forward = std::function<Activations(const Activations&)>;
  struct Made {
    std::shared_ptr<torch::nn::Module> module;  // null: a function
    Forward forward;
  };

  /// A module that is there already, on every rank.
  template <typename Impl>
  PipelineLayer(const torch::nn::ModuleHolder<Impl>& module)  // NOLINT(google-explicit-constructor): a list's element
      : make_([made = of_module(module.ptr())] { return made; }) {}
  /// A module that is made where its stage is: `Module(args…)`.
  template <typename Module, typename... Args>
  static PipelineLayer make(Args... args) {
    return of([args...] { return of_module(Module(args...).ptr()); });
  }
  /// A function, of one tensor or of Activations.
  template <typename Function>
  static PipelineLayer function(Function forward) {
    return of([forward] { return Made{nullptr, adapted(forward)}; });
  }
  /// Layers with one key, on whichever stages, have one module's parameters. `make` returns its holder, with equal
  /// values everywhere. `forward`: what this layer does with the module, called as forward(*module, input); absent:
  /// its forward.
  template <typename Make>
  static PipelineLayer tied(std::string key, Make make) {
    PipelineLayer layer = of([make] { return of_module(make().ptr()); });
    layer.key_ = std::move(key);
    return layer;
  }
  template <typename Make, typename Function>
  static PipelineLayer tied(std::string key, Make make, Function forward) {
    using Shared = typename decltype(make())::ContainedType;
    PipelineLayer layer = tied(std::move(key), make);
    layer.with_ = [forward](const std::shared_ptr<torch::nn::Module>& module) {
      return adapted(CallWith<Shared, Function>{std::dynamic_pointer_cast<Shared>(module), forward});
    };
    return layer;
  }

  const std::string& key() const { return key_; }  // empty: not tied
  Made made() const { return make_(); }
  /// Calls the module of its key as this layer does.
  Forward forward_of(const Made& tied) const { return with_ ? with_(tied.module) : tied.forward; }

 private:
  PipelineLayer() = default;
  static PipelineLayer of(std::function<Made()> make) {
    PipelineLayer layer;
    layer.make_ = std::move(make);
    return layer;
  }

  template <typename Impl>
  struct CallForward {
    std::shared_ptr<Impl> module;
    template <typename Input>
      requires requires(Impl& impl, const Input& input) { impl.forward(input); }
    auto operator()(const Input& input) const {
      return module->forward(input);
    }
  };
  template <typename Impl, typename Function>
  struct CallWith {
    std::shared_ptr<Impl> module;
    Function function;
    template <typename Input>
      requires requires(const Function& call, Impl& impl, const Input& input) { call(impl, input); }
    auto operator()(const Input& input) const {
      return function(*module, input);
    }
  };

  static Activations listed(at::Tensor output) { return {std::move(output)}; }
  static Activations listed(Activations outputs) { return outputs; }
  /// Errors: ValueError unless there is one.
  static const at::Tensor& only(const Activations& inputs);

  template <typename Function>
  static Forward adapted(Function forward) {
    if constexpr (std::invocable<Function, const at::Tensor&>) {
      return [forward](const Activations& inputs) { return listed(forward(only(inputs))); };
    } else {
      static_assert(std::invocable<Function, const Activations&>, "a layer takes a tensor, or deeptide::Activations");
      return [forward](const Activations& inputs) { return listed(forward(inputs)); };
    }
  }
  template <typename Impl>
  static Made of_module(const std::shared_ptr<Impl>& module) {
    return {module, adapted(CallForward<Impl>{module})};
  }

  std::function<Made()> make_;
  std::string key_;
  std::function<Forward(const std::shared_ptr<torch::nn::Module>&)> with_;
};

/// The children of a numbered container, such as a torch::nn::ModuleList of blocks, as layers. Errors: ValueError
/// naming a child that is no `Module`.
template <typename Module>
std::vector<PipelineLayer> layers_of(const torch::nn::Module& container) {
  std::vector<PipelineLayer> layers;
  for (const auto& child : container.named_children()) {
    auto impl = std::dynamic_pointer_cast<typename Module::ContainedType>(child.value());
    TORCH_CHECK_VALUE(impl != nullptr, "layers_of: child ", child.key(), " is ", child.value()->name(),
                      ", which is no module of the type that was named");
    layers.emplace_back(Module(impl));
  }
  return layers;
}

/// parameters: stages have nearly equally many trained elements, cut as DeepSpeed cuts; uniform: layers. profile: the
/// slowest stage is fastest, by each layer's forward and backward; memory: the largest is smallest, by bytes of
/// parameters, of gradients and Adam's states in fp32, and of what backward keeps of as many micro-batches as 1f1b, or
/// the interleaved schedule, has alive there. Rank 0 makes and runs the layers one by one for these two.
enum class PipelinePartition : uint8_t { parameters, uniform, profile, memory };

struct PipelineOptions {
  int num_stages = 1;
  int chunks = 1;  // runs of layers on each stage: the schedule is interleaved then
  PipelinePartition partition = PipelinePartition::parameters;
  Activations profile_input;    // the first layer's input in a micro-batch; profile and memory run the layers on it
  std::vector<int64_t> bounds;  // own: part p has the layers [bounds[p], bounds[p + 1]); empty: by `partition`
  int activation_checkpoint_interval =
      0;                        // so many layers keep their input alone until backward; 0: each what it needs
  std::optional<int64_t> seed;  // torch is seeded with it + the layer's number before a layer is made
  std::optional<World> world;   // absent: init_distributed()
};

/// A model that ranks train as the stages of a pipeline; this rank makes the layers of its stage. Consecutive ranks
/// share a stage. Parameters have the uncut model's names: "3.weight" is of layer 3, "tied_modules.KEY.weight" of a
/// tied one, as in Python. Errors: ConfigError for stages that cannot be, or have nothing to train.
class DEEPTIDE_API PipelineModule : public torch::nn::Module {
 public:
  PipelineModule(std::vector<PipelineLayer> layers, const PipelineOptions& options);

  int num_stages() const { return options_.num_stages; }
  int num_chunks() const { return options_.chunks; }
  int stage() const { return stage_; }
  const World& world() const { return world_; }
  /// Bounds of the parts: part p is chunk p / num_stages of stage p % num_stages.
  const std::vector<int64_t>& bounds() const { return bounds_; }
  /// Whether each backward of a chunk is a micro-batch of the engine: of those with a trained parameter of their own,
  /// and of all where this stage trains nothing.
  bool trains(int chunk) const;
  /// Sets PipelineOptions' activation_checkpoint_interval anew. Between steps. Errors: ConfigError if it is negative.
  void set_checkpoint_interval(int interval);
  /// Runs the layers of one of this stage's chunks.
  Activations forward(Activations inputs, int chunk = 0) const;

  /// A module of several stages. The first one owns it; on others its parameters are no part of this module.
  struct Tie {
    int64_t number = 0;                         // of the key, alike on all stages
    std::vector<int> stages;                    // ascending
    std::shared_ptr<torch::nn::Module> module;  // on these stages
    std::string key;
  };
  /// Those of this stage.
  const std::vector<Tie>& ties() const { return ties_; }

 private:
  using Layers = std::vector<PipelineLayer>;
  std::vector<std::pair<int64_t, int64_t>> runs_of(int stage) const;
  std::map<std::string, std::vector<int>> stages_of_keys(const Layers& layers) const;
  void choose_bounds(const Layers& layers);
  void add(const Layers& layers, int64_t index, const std::map<std::string, std::vector<int>>& stages_of_key);

  PipelineOptions options_;
  World world_;
  int stage_ = 0;
  std::vector<int64_t> bounds_;
  std::vector<std::vector<PipelineLayer::Forward>> steps_;  // by chunk
  std::vector<bool> trains_;                                // by chunk
  std::map<std::string, PipelineLayer::Made> tied_;
  std::vector<Tie> ties_;
};

/// One micro-batch. The first stage uses its inputs, the last one its targets.
struct MicroBatch {
  Activations inputs;
  Activations targets;
};

struct PipelineStep {
  double loss = 0.0;  // the mean over micro-batches and data ranks
  StepOutcome outcome;
};

/// Trains one stage of a PipelineModule, which it keeps. Micro-batches are the configuration's accumulation steps; its
/// parallel.schedule orders them. Not copyable; movable.
class DEEPTIDE_API PipelineEngine {
 public:
  /// The scalar loss of a micro-batch, on the last stage, of the last layer's outputs.
  using Loss = std::function<at::Tensor(const Activations& outputs, const Activations& targets)>;
  /// Returns the next micro-batch of this rank's data rank: the first and the last stage call theirs as often as a step
  /// has micro-batches, others never. Both get the same: where each returns inputs and targets, these are compared.
  using Batches = std::function<MicroBatch()>;

  /// Collective. Errors: ConfigError.
  PipelineEngine(std::shared_ptr<PipelineModule> model, Loss loss, const Config& config, InitOptions options = {});
  ~PipelineEngine();
  PipelineEngine(PipelineEngine&&) noexcept;
  PipelineEngine& operator=(PipelineEngine&&) noexcept;

  /// Its backward and step are train_batch's alone.
  Engine& engine();
  PipelineModule& model();
  /// This rank's among those that share its stage: data rank and data ranks.
  int data_rank() const;
  int data_size() const;

  /// Collective over all stages. One optimizer step. Errors: ValueError if the loss is no scalar, if the
  /// first and the last stage got other micro-batches, or if a forward writes a buffer of a module that stages share;
  /// what `next` throws.
  PipelineStep train_batch(const Batches& next);
  /// Collective over all stages. Returns the mean loss of so many micro-batches, without gradients.
  double eval_batch(const Batches& next, int64_t micro_batches);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace deeptide
