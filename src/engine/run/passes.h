// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Counts passes of backward since the last step, and warns programs that forget step() or add a foreign backward's.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace deeptide::engine {

/// A pass is *own* if the engine's backward() began it, and *foreign* if the program's loss.backward() did, or another
/// engine. Gradients arrive on autograd's threads, one per device; all else is called between passes.
class Passes {
 public:
  /// `speaks`: whether this rank writes the warnings.
  explicit Passes(bool speaks) : speaks_(speaks) {}
  /// Warns of a program that has run passes and never a step.
  ~Passes();
  Passes(const Passes&) = delete;

  /// The number of tensors whose gradients arrive.
  void expect(size_t num_tensors) { foreign_.assign(num_tensors, 0); }
  /// More passes than these without a step are worth a warning, at the least.
  void set_accumulation(int64_t micro_batches) { accumulation_ = micro_batches; }
  void note_own();
  void note_gradient(int tensor, bool is_own);
  /// step() was called, at the accumulation's boundary or not.
  void note_step();
  /// A step is about to use what has arrived. Returns a tensor with a foreign gradient where own ones came too, the
  /// first time that this is so; else -1.
  int take_mixture();
  /// Foreign gradients were dropped, or the program has looked at them.
  void forget();
  void forget(int tensor) { foreign_[static_cast<size_t>(tensor)] = 0; }

 private:
  void count();

  const bool speaks_;
  int64_t accumulation_ = 1;
  std::vector<uint8_t> foreign_;  // by tensor: arrived since gradients were last dropped or used
  std::atomic<bool> has_own_{false}, has_foreign_{false};
  std::atomic<int> first_{-1};  // the tensor whose foreign gradients count passes
  std::atomic<int64_t> since_step_{0};
  int64_t most_ = 0;  // between two steps
  bool has_stepped_ = false, has_warned_ = false, has_told_mixture_ = false;
};

}  // namespace deeptide::engine
