// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads a model's description: which tensors are one parameter, which are trained, in which type each is kept.
#pragma once

#include <string>
#include <vector>

#include "deeptide/engine.h"
#include "sharding/unit.h"

namespace deeptide::engine {

/// Whether a parameter stays the program's, whole on each rank: a frozen one that is not floating, such as the packed
/// weights of a quantized base. It is saved, loaded and exported as a buffer is.
bool stays_whole(const at::Tensor& parameter);

/// Parameters that lie in exactly the same memory are one, with several names. Without those that stay whole.
/// Errors: ValueError naming a parameter that is undefined, repeated, on the meta device, another engine's, sparse,
/// trained and not floating, that overlaps another in part, or whose tied tensors have no contiguous one among them.
std::vector<sharding::Parameter> distinct_parameters(const std::vector<NamedTensor>& named);

/// The CPU if there are none. Errors: ValueError if they are on several devices.
at::Device common_device(const std::vector<sharding::Parameter>& parameters);

/// Sets each parameter's group; -1 for those that are not trained.
/// Errors: ValueError on an unknown name, or one in two groups.
void assign_groups(std::vector<sharding::Parameter>& parameters, const std::vector<ParameterGroup>& groups);

/// Says which tensors of a model keep fp32 where the model computes in a 16-bit type: the weights and statistics of
/// modules that update running statistics (BatchNorm), for these lose small changes, and torch's kernels take both or
/// neither in fp32.
class KeepsFullPrecision {
 public:
  explicit KeepsFullPrecision(const std::vector<ModuleInfo>& modules);
  /// `name`: of a parameter or a buffer.
  bool tensor(const std::string& name) const;

 private:
  std::vector<std::string> paths_;  // of such modules, sorted
};

/// `compute`: the type of fp32 parameters from now on; a type chosen by hand (fp64, frozen bf16) is kept.
std::vector<sharding::ParameterSpec> specs_of(const std::vector<sharding::Parameter>& parameters,
                                              at::ScalarType compute, const KeepsFullPrecision& keeps);

/// Errors: ValueError if nothing is trainable though `trained_by` is not empty, or if a trainable type is not
/// supported.
void check_trainable(const std::vector<sharding::ParameterSpec>& specs, at::ScalarType compute,
                     const std::string& trained_by);

/// Warns about each parameter whose memory a tensor outside the description also uses: that tensor stays behind.
void warn_of_views(const std::vector<sharding::Parameter>& parameters);

}  // namespace deeptide::engine
