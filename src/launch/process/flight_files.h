// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Holds the two memory files that a rank inherits: the ring of its last collectives, and the file for its stacks.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>

#include "trace/flight_ring.h"

namespace deeptide::launch {

/// A rank's coordinates in a mesh of these sizes, as " (pipeline 1, data 0)"; empty where data is the only axis, or the
/// sizes are not known.
std::string place_in(const std::array<int, 5>& mesh, int rank);

/// Created before the rank starts. Readable for the lifetime of this object, even if the rank dies.
class FlightFiles {
 public:
  /// Errors: std::system_error.
  FlightFiles();
  ~FlightFiles();
  FlightFiles(FlightFiles&& other) noexcept;
  FlightFiles(const FlightFiles&) = delete;
  FlightFiles& operator=(const FlightFiles&) = delete;

  /// Returns the variables for the rank, which inherits both descriptors under the same numbers.
  std::map<std::string, std::string> environment() const;
  int ring_fd() const { return ring_fd_; }
  int stacks_fd() const { return stacks_fd_; }

  const trace::FlightRing& ring() const { return *ring_; }
  /// The sizes of the job's axes, as world::Mesh has them; 0: the rank has not told them.
  std::array<int, 5> mesh() const;
  /// Returns the stacks that the rank has written since the last clear.
  std::string stacks() const;
  void clear_stacks() const;
  /// Asks the rank to show its steps for so long.
  void watch(double seconds) const;
  /// Asks the rank for a timeline of its next steps; 0: to end the one under way. `number` exceeds those before.
  void ask_timeline(uint64_t number, int64_t num_steps, const std::string& folder) const;

 private:
  int ring_fd_ = -1;
  int stacks_fd_ = -1;
  trace::FlightRing* ring_ = nullptr;
};

}  // namespace deeptide::launch
