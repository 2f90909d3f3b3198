// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Follows torch's RecordFunction: a stack of operators under way, and what each of them took by itself.
#include <ATen/SequenceNumber.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>

#include "deeptide/profiler.h"
#include "report/flops/operator_macs.h"
#include "trace/recorder.h"

namespace deeptide {
namespace {

// Each points to its counter while that lives, which may end on another thread.
thread_local std::vector<std::shared_ptr<OperatorCounter*>> own_counters;
// Autograd's threads inherit the callback of a thread that counts, and nothing else of it.
std::atomic<OperatorCounter*> newest_counter{nullptr};

template <typename Use>
void for_each_counter(Use use) {
  for (const auto& counter : own_counters) {
    if (*counter) use(**counter);
  }
  if (!own_counters.empty()) return;
  if (OperatorCounter* counter = newest_counter.load()) use(*counter);
}

int64_t bytes_of(const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return tensor.defined() && tensor.has_storage() ? static_cast<int64_t>(tensor.nbytes()) : 0;
  }
  if (!value.isTensorList()) return 0;
  int64_t bytes = 0;
  for (const at::Tensor& tensor : value.toTensorVector()) bytes += bytes_of(tensor);
  return bytes;
}

/// Whether an operator only names what is there.
bool is_view(const at::RecordFunction& function) {
  const auto schema = function.operator_schema();
  if (!schema) return false;
  const auto& returns = schema->returns();
  return returns.empty() || std::all_of(returns.begin(), returns.end(), [](const c10::Argument& one) {
           return one.alias_info() != nullptr && !one.alias_info()->isWrite();
         });
}

int64_t bytes_of_all(c10::ArrayRef<const c10::IValue> values) {
  int64_t bytes = 0;
  for (const c10::IValue& value : values) bytes += bytes_of(value);
  return bytes;
}

/// This thread's one callback, which all of its counters share.
at::CallbackHandle& handle() {
  thread_local at::CallbackHandle own = 0;
  return own;
}

}  // namespace

namespace report {
struct Hooks {
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
    for_each_counter([&](OperatorCounter& counter) { counter.begin(function); });
    return nullptr;
  }
  static void end(const at::RecordFunction& function, at::ObserverContext*) {
    for_each_counter([&](OperatorCounter& counter) { counter.end(function); });
  }
};
}  // namespace report

OperatorCounter::OperatorCounter() : self_(std::make_shared<OperatorCounter*>(this)) {
  newest_counter = this;
  own_counters.push_back(self_);
  if (handle() != 0) return;
  handle() = at::addThreadLocalCallback(at::RecordFunctionCallback(&report::Hooks::begin, &report::Hooks::end)
                                            .needsInputs(true)
                                            .needsOutputs(true)
                                            .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
}

OperatorCounter::~OperatorCounter() {
  OperatorCounter* self = this;
  newest_counter.compare_exchange_strong(self, nullptr);
  *self_ = nullptr;
  const auto is_gone = [](const auto& counter) { return *counter == nullptr; };
  own_counters.erase(std::remove_if(own_counters.begin(), own_counters.end(), is_gone), own_counters.end());
  if (own_counters.empty() && handle() != 0) at::removeCallback(std::exchange(handle(), 0));
}

void OperatorCounter::begin(const at::RecordFunction& function) {
  Open open{.function = &function};
  open.module = module_;
  if (!open_.empty()) {
    Open& caller = open_.back();
    if (!caller.is_node) caller.is_leaf = false;
    open.counted = caller.counted;
    open.backward = caller.backward;
    if (caller.backward && module_ < 0) open.module = caller.module;  // else a checkpoint's forward runs again
  }
  if (function.scope() == at::RecordScope::BACKWARD_FUNCTION) {
    open.is_node = open.backward = true;
    const auto found = module_of_node_.find(function.seqNr());
    open.module = found == module_of_node_.end() ? module_ : found->second;
  } else {
    // The node that this operator may make gets the number that comes next.
    if (c10::GradMode::is_enabled()) {
      module_of_node_[static_cast<int64_t>(at::sequence_number::peek())] = open.module;
    }
    if (!open.counted) open.macs = report::macs_of(function);
    open.is_view = is_view(function);
    if (!open.is_view) open.bytes = bytes_of_all(function.inputs());  // which are gone when the operator ends
    open.counted = open.counted || open.macs > 0;
  }
  open.begin_ns = trace::now_ns();
  open_.push_back(open);
}

void OperatorCounter::end(const at::RecordFunction& function) {
  const int64_t now = trace::now_ns();
  const auto found = std::find_if(open_.rbegin(), open_.rend(), [&](const Open& o) { return o.function == &function; });
  if (found == open_.rend()) return;  // it began before the count
  const Open open = *found;
  open_.erase(std::next(found).base(), open_.end());  // with those that an exception has ended
  const int64_t took = now - open.begin_ns;
  const bool is_known = open.counted || open.has_known;
  const bool is_uncounted = !open.is_node && !is_known && report::may_multiply(function.name());
  if (!open_.empty()) {
    open_.back().within_ns += took;
    open_.back().has_known = open_.back().has_known || is_known || is_uncounted;
  }
  if (open.is_node) return;
  OperatorUse& use = uses_[{open.module, open.backward, function.name()}];
  use.is_uncounted = use.is_uncounted || is_uncounted;
  ++use.calls;
  use.macs += open.macs;
  use.seconds += static_cast<double>(took - open.within_ns) * 1e-9;
  if (!open.is_leaf || open.is_view) return;
  use.bytes += open.bytes;
  for (const c10::IValue& value : function.outputs()) use.bytes += bytes_of(value);
}

std::vector<OperatorUse> OperatorCounter::uses() const {
  std::vector<OperatorUse> uses;
  for (const auto& [key, use] : uses_) {
    uses.push_back(use);
    std::tie(uses.back().module, uses.back().backward, uses.back().name) = key;
  }
  return uses;
}

}  // namespace deeptide
