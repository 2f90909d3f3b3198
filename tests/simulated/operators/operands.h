// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Device tensors as kernels see them: CPU tensors over the same pages, and the bytes that a task uses.
#pragma once

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "simulated/operators/backend.h"

namespace deeptide::simulated {

/// Returns the bytes that the tensor spans, from its storage's start; {0, 0} without elements. A strided tensor counts
/// as its bounding range.
std::pair<size_t, size_t> span(const at::Tensor& tensor);

/// Twins of one task's tensors. Tensors that share a storage have twins that share one, as in-place operators check.
class Operands {
 public:
  /// Returns the CPU's view of a tensor in device or pinned memory, and notes its use.
  at::Tensor cpu(const at::Tensor& tensor, bool write);
  /// Returns the same shape without memory.
  at::Tensor meta(const at::Tensor& tensor);
  /// Enqueues a task with the uses noted so far on this thread's stream.
  void run(const std::string& name, std::function<void()> task, HostWait wait = HostWait::no, const Cost& cost = {});
  /// The same on another stream.
  void run_on(int stream, const std::string& name, std::function<void()> task, HostWait wait, const Cost& cost);
  bool empty() const { return uses_.empty(); }

 private:
  std::vector<Use> uses_;
  std::unordered_map<const void*, c10::Storage> cpu_, meta_;
};

}  // namespace deeptide::simulated
