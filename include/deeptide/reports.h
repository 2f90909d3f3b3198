// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reports an engine's steps: times, collectives, scalars for monitors. Needs no torch.
#pragma once

#include <cstdint>
#include <string>

namespace deeptide {

/// How a rank spent a step. Units: seconds; zeros where the configuration asks for no breakdown.
struct StepTimes {
  float total = 0.0f;
  float between = 0.0f;  // steps: the program fetches data
  float forward = 0.0f;
  float backward = 0.0f;
  float step = 0.0f;
  float waiting = 0.0f;           // of the above, for other ranks
  float backward_waiting = 0.0f;  // of that
  float files = 0.0f;             // of the above, for transfers of files
  float optimizer = 0.0f;         // of step, without waits

  float computing() const { return total - between - waiting - files; }
};

/// The collectives of one kind and size, on this rank. A latency lasts from the start to when the rank noticed the end,
/// so what hides behind computing counts too.
struct CollectiveLine {
  std::string operation;  // "all_gather"
  int64_t bytes = 0;      // of what is made whole or taken apart
  int64_t count = 0;
  double total_ms = 0.0;
  double mean_ms = 0.0;         // without the fastest and the slowest tenth
  double algorithm_gbps = 0.0;  // Gbit/s: the bytes over the mean
  double bus_gbps = 0.0;        // likewise what a link carries
};

/// A scalar for monitors, under DeepSpeed's names.
struct MonitorEvent {
  std::string name;  // "Train/Samples/lr"
  double value = 0.0;
  int64_t x = 0;  // samples of all ranks so far
};

}  // namespace deeptide
