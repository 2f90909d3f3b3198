// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Brings gradients into the reducer: from autograd by hooks, and from `.grad` where a program put them.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/run/passes.h"
#include "gradients/hooks.h"
#include "gradients/reducer.h"
#include "sharding/unit.h"

namespace deeptide::engine {

class GradientIntake {
 public:
  /// `trainable`: by position, as the reducer has them. Drops what lies in `.grad`: it is from before initialize.
  /// `before`: called each time autograd is about to accumulate a gradient.
  /// `speaks`: this rank says what `Passes` has to say.
  GradientIntake(std::vector<sharding::Unit*> trainable, gradients::Reducer& reducer, bool speaks,
                 std::function<void()> before = {});

  /// Before a step: looks for gradients in `.grad`. They are there because the program put them there, or because the
  /// parameter's accumulator was replaced and had no hook; it has one from now on. Returns the units that have some.
  /// Errors: ValueError naming a parameter that backward has already given a gradient: which of the two counts?
  std::vector<bool> check_left();
  /// Whether any lies there.
  bool has_left() const;
  /// Once no rank's check has failed: takes these gradients, as if backward had just given them.
  void take_left();
  /// Likewise of what autograd alone collected there, since the accumulator was replaced: before somebody looks at
  /// gradients, who does not ask for what the program put into `.grad`.
  std::vector<bool> check_collected();
  void take_collected();
  /// Gradients travel multiplied by `scale`. Those of a backward that is not the engine's are not yet, and are then.
  void set_loss_scale(double scale) { loss_scale_ = scale; }
  /// While it lives, gradients that arrive are scaled: the engine's backward is running.
  class Scaled {
   public:
    explicit Scaled(GradientIntake& intake) : intake_(intake) { ++intake_.scaled_; }
    ~Scaled() { --intake_.scaled_; }
    Scaled(const Scaled&) = delete;

   private:
    GradientIntake& intake_;
  };
  /// From now on calls `before` as the constructor's. Not while a backward runs.
  void announce(std::function<void()> before) { hooks_->announce(std::move(before)); }
  /// Counts the passes of backward, and whose gradients they gave.
  Passes& passes() { return passes_; }
  /// Before a step uses what has arrived. Names a parameter that got gradients of a backward that is not the engine's
  /// beside its own, the first time that one did; else an empty text.
  std::string take_mixture();
  /// Drops what lies in `.grad` of these tensors' parameters and what has not been sent yet. By parameter, unit after
  /// unit: 1 if it is one of them.
  std::vector<uint8_t> drop(const std::vector<at::Tensor>& tensors);
  /// Unit among the trainable ones, and parameter, of a trained parameter's tensor; nothing for others.
  std::optional<std::pair<int, int>> place_of(const at::Tensor& tensor) const;
  /// Whether the engine's own backward is running.
  bool is_in_backward() const { return scaled_ > 0; }
  /// Gradients that autograd gives from now on wait under this number, begun anew; nothing: they are taken at once.
  /// Not while a backward runs.
  void hold(std::optional<int64_t> number);
  /// Takes those that wait under a number, as if backward had just given them.
  void give(int64_t number);
  /// Takes the gradient left @ right of a trained parameter's tensor, scaled as the losses are, without autograd.
  /// Returns false, and takes nothing, where it is none of a unit here, lies in another order than the parameter's
  /// first tensor, or somebody else asks for it.
  bool take_product(const at::Tensor& weight, const gradients::Product& product);
  /// Adds a sum of gradients, scaled as the losses are, to the next gradient of a trained parameter's tensor, in the
  /// sum's type: in the parameter's it may overflow. Returns false, and takes nothing, where both have one type or
  /// somebody else asks for the gradient.
  bool join(const at::Tensor& weight, const at::Tensor& sum);
  /// After a backward: takes the sums that have met no gradient.
  void take_joining();
  /// Drops what lies in `.grad`, and what waits. Returns the name of the first parameter that had a `.grad`, or an
  /// empty text.
  std::string drop_left();

 private:
  /// One tensor of a trained parameter.
  struct Place {
    int unit = 0;  // among the trainable ones
    int parameter = 0;
    int tensor = 0;
  };
  struct Waiting {
    int index = 0;  // of its place
    at::Tensor gradient;
  };

  void arrive(int index, const at::Tensor& gradient);
  void add(int index, const at::Tensor& gradient);
  void follow();
  /// Whether autograd alone has collected a gradient there.
  bool is_collected(size_t index) const { return replaced_[index] && tensor(places_[index]).grad().defined(); }
  void take(int index);
  at::Tensor ordered_and_scaled(int index, const at::Tensor& gradient, double scale) const;
  const sharding::Parameter& parameter(const Place& place) const {
    return units_[place.unit]->parameters()[place.parameter];
  }
  const at::Tensor& tensor(const Place& place) const { return parameter(place).tensors[place.tensor]; }

  std::vector<sharding::Unit*> units_;
  gradients::Reducer& reducer_;
  std::vector<Place> places_;
  std::unordered_map<const c10::TensorImpl*, int> index_of_;  // in places_, by tensor
  std::vector<bool> replaced_;  // by place: its accumulator, since gradients were last taken from .grad
  std::atomic<double> loss_scale_{1.0};
  std::map<int64_t, std::vector<Waiting>> waiting_;  // by number
  std::vector<Waiting>* held_ = nullptr;             // null: what arrives is taken at once
  std::unordered_map<int, at::Tensor> joining_;      // by place: sums, in the order of the parameter's first tensor
  std::atomic<int> scaled_{0};                       // engine's backward passes under way; autograd's threads read it
  Passes passes_;
  std::unique_ptr<gradients::GradientHooks> hooks_;
};

}  // namespace deeptide::engine
