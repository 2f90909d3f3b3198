// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Cuts layers among neighbouring ranks: their team, what it exchanges, and the mesh of such a job.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "deeptide/engine.h"
#include "deeptide/tensor_slice.h"

namespace deeptide {
namespace trace {
class Recorder;
}

/// Neighbouring ranks that share layers and train on equal batches. Ranks get equal bits from all methods. Collective:
/// all ranks of the team call them in one order, from one thread each. Shapes: of any, on the CPU, or on the device
/// whose backend the world has (World::make_backend): there the device waits, and not its host. Errors, of all methods:
/// CommError if a peer is lost or late; ValueError for tensors on a device without a backend.
class DEEPTIDE_API TensorTeam {
 public:
  /// Collective over `world`. `stages`: of a pipeline, each with teams of its own. Units: timeout in seconds.
  /// Errors: ConfigError if the ranks do not divide among teams of `size`, naming the nearest sizes that do.
  TensorTeam(const World& world, int size, double timeout_s, int stages = 1);
  ~TensorTeam();
  TensorTeam(const TensorTeam&) = delete;

  int size() const;
  int index() const;
  /// This rank's number among those of its index, which train on other batches, and how many they are.
  int data_rank() const;
  int data_size() const;

  /// A sum that travels while its rank computes. The team outlives it.
  class DEEPTIDE_API Sum {
   public:
    explicit Sum(std::function<at::Tensor()> rest) : rest_(std::move(rest)) {}
    /// Called once. Sums are begun and waited for in one order on all ranks.
    at::Tensor wait() { return std::exchange(rest_, nullptr)(); }

   private:
    std::function<at::Tensor()> rest_;
  };

  /// The sum over the ranks, by pairs in fp32, rounded once to the tensor's type. `phase`: "forward", "backward".
  at::Tensor all_reduce(const at::Tensor& tensor, const std::string& phase);
  /// Row r of that sum on rank r. Shapes: (size, *) -> (*).
  at::Tensor reduce_scatter(const at::Tensor& tensor, const std::string& phase);
  /// The same two, begun here and ended by `wait`. The tensor is not written between.
  Sum start_all_reduce(const at::Tensor& tensor, const std::string& phase);
  Sum start_reduce_scatter(const at::Tensor& tensor, const std::string& phase);
  /// Every rank's tensor, in the team's order. Shapes: (size, *tensor's).
  at::Tensor all_gather(const at::Tensor& tensor, const std::string& phase);
  /// Overwrites the tensor, contiguous, with the first rank's.
  void broadcast(const at::Tensor& tensor, const std::string& phase);

  /// `meanwhile` runs now and then while a rank waits in forward or backward; nothing: nothing does. For engines, whose
  /// other ranks may need what this one has to say before its peers of this team come. `recorder` is told of waits and
  /// collectives; null: nobody is.
  void serve(std::function<void()> meanwhile, std::shared_ptr<trace::Recorder> recorder);

  /// Tells, before an engine is made, that the layers exchange over groups of their own, as Megatron's do. A rank that
  /// waits there serves nobody: an engine at stage 3 then gathers as each rank's program goes, which is one for all.
  void note_own_groups();
  bool layers_have_own_groups() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// How the ranks of a job are arranged.
struct MeshSizes {
  int pipeline = 1;
  int tensor = 1;
  std::optional<int> data = {};  // absent: as many as are left
};

/// For InitOptions::axes: a mesh with a tensor axis, innermost. `slices`: the parameters of which this rank has a
/// slice; ranks along the axis have all others alike. `adding`: of those others, the ones whose gradient on each of
/// these ranks is a part, which add up. `team`: of this rank. Errors: ConfigError if the sizes do not multiply to
/// `ranks`, naming the nearest that do.
DEEPTIDE_API std::shared_ptr<const engine::Axes> tensor_axes(const MeshSizes& sizes, int ranks,
                                                             std::vector<TensorSlice> slices,
                                                             const std::vector<std::string>& adding,
                                                             std::shared_ptr<TensorTeam> team);

/// Refuses an impossible mesh. Errors: as tensor_axes.
DEEPTIDE_API void check_mesh(const MeshSizes& sizes, int ranks);

}  // namespace deeptide
