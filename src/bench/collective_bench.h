// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Measures how fast a world's collectives are, and checks each before it is timed.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <functional>
#include <string>
#include <vector>

#include "comm/group.h"
#include "deeptide/binding.h"
#include "host/host.h"
#include "world/failure_board.h"

namespace deeptide::bench {

using binding::CollectiveTimes;
using comm::Group;

enum class Collective : uint8_t { all_reduce, all_gather, reduce_scatter, all_to_all, broadcast };
inline constexpr std::array kCollectives{Collective::all_reduce, Collective::all_gather, Collective::reduce_scatter,
                                         Collective::all_to_all, Collective::broadcast};

/// Returns "all-reduce" and the like.
const char* name_of(Collective collective);
/// Ratio of bus to algorithm bandwidth, as nccl-tests define them: what a link must carry per byte.
double bus_factor(Collective collective, int world_size);

/// The sizes that ranks hold in a collective of `numel`: all that a rank receives (all-gather) or gives (others).
struct CollectiveShape {
  Collective collective;
  int rank;
  int world_size;
  int64_t numel;

  int64_t input_numel() const;
  int64_t output_numel() const;
};

/// Writes this rank's input: small integers that identify rank and place, and sum exactly in any type.
/// Shapes: input (input_numel,), of any type and device.
void fill_input(const CollectiveShape& shape, const at::Tensor& input);
/// Errors: RuntimeError naming the first element that the ranks' inputs do not give (for broadcast, rank 0's input).
void check_output(const CollectiveShape& shape, const at::Tensor& output);

/// Returns seconds per call over `calls` calls in sequence, as nccl-tests do: excludes the barrier before them and
/// includes `finish` after them.
double time_calls(
    Group& group, const std::function<void()>& call, int64_t calls, const std::function<void()>& finish = [] {});
/// Returns enough calls to move about 16 MiB, so that the clock's resolution does not show.
int64_t calls_for(int64_t bytes);

/// Runs collectives of one Group, as an engine makes it. All calls are collective. One per world.
class CollectiveBench {
 public:
  /// `shared_memory`: false sends all over c10d. Errors: ConfigError for a world of one; as host::Host::find and Group.
  CollectiveBench(const World& world, at::ScalarType dtype, at::Device device, int64_t max_bytes,
                  bool shared_memory = true);

  /// The transport in use: "shared memory", "two levels", "c10d".
  std::string path() const { return group_.path(); }
  int num_hosts() const { return static_cast<int>(host_->hosts().size()); }

  /// Checks one call, makes `warmups` calls, then `trials` times as many as calls_for returns.
  CollectiveTimes measure(Collective collective, int64_t bytes, int warmups, int trials);

  /// Returns each value's maximum over all ranks. Collective.
  std::vector<double> slowest(const std::vector<double>& seconds);

  /// Makes one call and waits. An all-reduce is a reduce-scatter and an all-gather, as in training.
  void call(const CollectiveShape& shape);
  /// Buffers of such a call.
  at::Tensor input(const CollectiveShape& shape) const { return input_.narrow(0, 0, shape.input_numel()); }
  at::Tensor output(const CollectiveShape& shape) const { return output_.narrow(0, 0, shape.output_numel()); }

 private:
  int64_t rounded(int64_t bytes) const;
  CollectiveTimes measure_checked(Collective collective, int64_t bytes, int warmups, int trials);
  void verify(const CollectiveShape& shape);

  std::shared_ptr<world::FailureBoard> board_;
  std::shared_ptr<host::Host> host_;
  Group group_, control_;
  at::Tensor input_, output_;
};

}  // namespace deeptide::bench
