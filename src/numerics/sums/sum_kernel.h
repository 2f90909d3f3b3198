// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The kernel of the ordered sum: one pass over the rows, with the sum of squares, which is finite if all elements are.
#pragma once

#include <cstdint>

#include "numerics/kernels/kernel_arguments.h"

namespace deeptide::numerics::kernel {

struct SumArguments {
  /// Elements whose squares are added by 32 lanes: SumReader::kBlock.
  static constexpr int64_t kPiece = 4096;
  /// Pieces whose sums are added by 32 lanes.
  static constexpr int64_t kPieces = 1024;

  Rows rows;
  Pieces pieces = {};   // instead of rows, if there are any: then without an accumulator
  Numbers accumulator;  // null: only the squares are wanted
  bool overwrite = true;
  int64_t count = 0;
  double* scratch = nullptr;         // of `num_scratch(count)` numbers
  double* sum_of_squares = nullptr;  // added to

  static int64_t num_scratch(int64_t count) {
    int64_t total = 0, level = (count + kPiece - 1) / kPiece;
    for (; level > 1; level = (level + kPieces - 1) / kPieces) total += level;
    return total + 1;
  }
};

}  // namespace deeptide::numerics::kernel

/// Built by nvcc or hipcc, or absent. Errors: std::runtime_error when the device refuses a launch.
namespace deeptide::numerics::device_kernels {

/// Whether there is a kernel for the current device.
bool has_sum();
/// `stream`: the current device's, by its own handle.
void sum(const kernel::SumArguments& arguments, void* stream);

}  // namespace deeptide::numerics::device_kernels

/// The same bodies, compiled for the host by a test.
namespace deeptide::numerics::host_kernels {

void sum(const kernel::SumArguments& arguments, void* stream);

}  // namespace deeptide::numerics::host_kernels
