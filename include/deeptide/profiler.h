// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Counts what operators compute and move, seen at torch's dispatcher: in C++ and Python, eager and compiled.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "deeptide/export.h"

namespace at {
struct RecordFunction;
}

namespace deeptide {

namespace report {
struct Hooks;
}

/// One operator in one module and direction. Operators that others call count themselves, not what they call.
struct OperatorUse {
  int module = -1;  // as the program numbers them; -1: none
  bool backward = false;
  std::string name;  // "aten::addmm"
  int64_t calls = 0;
  int64_t macs = 0;   // multiply-accumulates of matrix products, convolutions and attention
  int64_t bytes = 0;  // of tensors read and written; views move nothing
  double seconds = 0.0;
  bool is_uncounted = false;  // it may multiply and has no formula here: `macs` lacks it
};

/// Counts on the thread that made it, and on autograd's threads on its behalf, while it lives; the same thread ends it.
/// Costs about a microsecond an operator.
class DEEPTIDE_API OperatorCounter {
 public:
  OperatorCounter();
  ~OperatorCounter();
  OperatorCounter(const OperatorCounter&) = delete;

  /// Operators belong to `module` from now on; backward's belong to the module whose forward they differentiate.
  void set_module(int module) { module_ = module; }
  std::vector<OperatorUse> uses() const;

 private:
  friend struct report::Hooks;
  struct Open {
    const at::RecordFunction* function;
    int64_t begin_ns = 0;
    int64_t within_ns = 0;  // of operators that it called
    int64_t macs = 0;
    int64_t bytes = 0;  // read
    bool is_view = false;
    int module = -1;
    bool counted = false;    // its products, or a caller's, are in `macs`
    bool has_known = false;  // operators that it called are counted, or named as uncounted
    bool backward = false;
    bool is_leaf = true;
    bool is_node = false;  // one of autograd's, not an operator
  };
  void begin(const at::RecordFunction& function);
  void end(const at::RecordFunction& function);

  std::shared_ptr<OperatorCounter*> self_;
  int module_ = -1;
  std::vector<Open> open_;
  std::unordered_map<int64_t, int> module_of_node_;  // by autograd's sequence number
  std::map<std::tuple<int, bool, std::string>, OperatorUse> uses_;
};

/// How fast this machine multiplies and moves.
struct MachinePeak {
  double flops_per_s = 0.0;  // of a large matrix product
  double bytes_per_s = 0.0;  // of a triad over tensors that no cache holds

  /// Share of this peak that `flops` in `seconds` are; -1 where they are more: the measured product was not the
  /// fastest.
  double share_of(double flops, double seconds) const {
    const double share = seconds > 0.0 && flops_per_s > 0.0 ? flops / seconds / flops_per_s : -1.0;
    return share > 1.0 ? -1.0 : share;
  }
};

/// Takes a few tenths of a second; measured with the threads that this rank computes with.
DEEPTIDE_API MachinePeak measure_peak(c10::Device device, c10::ScalarType dtype);

}  // namespace deeptide
