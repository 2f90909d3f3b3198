// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Hyper-parameters of optimizers by name, as the configuration's table lists them. Needs no torch.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "deeptide/export.h"

namespace deeptide {

/// One number of an optimizer: "lr", "beta1", "nesterov".
struct HyperparameterInfo {
  std::string name;
  std::string config_key;  // in ds_config's optimizer.params: "betas"
  std::string group_key;   // in a param group of torch: "betas"
  int element = -1;        // its place in that key's list; -1: the key's value itself
  bool flag = false;       // true or false, kept as 1 or 0
  double fallback = 0.0;
  std::optional<double> lowest, highest;
  bool highest_excluded = false;

  bool operator==(const HyperparameterInfo&) const = default;
};

/// An optimizer that the configuration's table offers.
struct DEEPTIDE_API OptimizerInfo {
  std::string name;                // the first of its types: "Adam"
  std::vector<std::string> types;  // "Adam", "AdamW"
  std::vector<HyperparameterInfo> hyperparameters;

  /// The index of a hyper-parameter; none: the optimizer has none of this name.
  std::optional<size_t> find(std::string_view hyperparameter) const;
  bool operator==(const OptimizerInfo&) const = default;
};

/// All optimizers that can be had, in the table's order.
DEEPTIDE_API const std::vector<OptimizerInfo>& optimizers();
/// By any of its types, in any case; null: no optimizer that can be had.
DEEPTIDE_API const OptimizerInfo* find_optimizer(std::string_view type);

/// Returns the one info of this content, kept for the process's life: of an optimizer that is not in the table.
DEEPTIDE_API const OptimizerInfo& kept_optimizer_info(const OptimizerInfo& info);

/// The hyper-parameters of one parameter group: a number for each name in its optimizer's table.
class DEEPTIDE_API Hyperparameters {
 public:
  Hyperparameters() = default;  // of no optimizer: empty
  explicit Hyperparameters(const OptimizerInfo& optimizer);
  /// The table's defaults. Errors: ConfigError when no optimizer has this type.
  explicit Hyperparameters(std::string_view type);

  const OptimizerInfo* optimizer() const { return optimizer_; }  // null when empty
  bool has(std::string_view name) const;
  /// Errors: ConfigError naming the hyper-parameters that exist.
  double get(std::string_view name) const { return values_[index_of(name)]; }
  Hyperparameters& set(std::string_view name, double value);
  double lr() const { return get("lr"); }

  /// By index in `optimizer()->hyperparameters`.
  double operator[](size_t index) const { return values_[index]; }
  void set_at(size_t index, double value) { values_.at(index) = value; }

  bool operator==(const Hyperparameters&) const = default;

 private:
  size_t index_of(std::string_view name) const;

  const OptimizerInfo* optimizer_ = nullptr;
  std::vector<double> values_;
};

}  // namespace deeptide
