// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The boxed fallback behind the extra dispatch key, and the table from storages to parameters.
#include "sharding/gate.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <unordered_map>

#include "deferred/key.h"
#include "deferred/recorder.h"
#include "deferred/traits.h"
#include "sharding/unit.h"

namespace deeptide::sharding {

using at::Tensor;
using c10::DispatchKeySet;
using deferred::Traits;

namespace {

struct Entry {
  Parameter* parameter;
  Gatekeeper* keeper;
  c10::intrusive_ptr<c10::StorageImpl> owned;
};

class Registry {
 public:
  // Never destroyed: gated tensors may outlive static destruction.
  static Registry& instance() {
    static auto* registry = new Registry;
    return *registry;
  }
  void add(Parameter& parameter, Gatekeeper& keeper) {
    std::unique_lock lock(mutex_);
    entries_[parameter.storage.get()] = {&parameter, &keeper, parameter.storage};
  }
  void remove(const void* storage) {
    Entry last;  // destroyed after the lock
    std::unique_lock lock(mutex_);
    if (auto it = entries_.find(storage); it != entries_.end()) {
      last = std::move(it->second);
      entries_.erase(it);
    }
  }
  bool find(const void* storage, Use& use) const {
    std::shared_lock lock(mutex_);
    const auto it = entries_.find(storage);
    if (it == entries_.end()) return false;
    use.parameter = it->second.parameter;
    use.keeper = it->second.keeper;
    return true;
  }

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<const void*, Entry> entries_;
};

std::atomic<int64_t> count{0};
std::atomic<int> watches{0};       // of any keeper
std::atomic<int> view_watches{0};  // of keepers that wait for views

int64_t next_id() {
  static std::atomic<int64_t> counter{0};
  return counter.fetch_add(1);
}

using Uses = c10::SmallVector<Use, 4>;

void collect(const Tensor& tensor, bool write, Uses& uses) {
  if (!has_gate_key(tensor) || !tensor.has_storage()) return;
  Use use;
  if (!Registry::instance().find(tensor.storage().unsafeGetStorageImpl(), use)) return;
  for (Use& known : uses) {
    if (known.parameter == use.parameter) {
      known.write |= write;
      return;
    }
  }
  use.write = write;
  uses.push_back(use);
}

/// Keeps everything the running operator uses whole until it returns or throws. Acquires the parameters of one engine
/// at a time: when two engines' parameters meet in one operator (a GAN's loss), every rank follows engine order.
class Hold {
 public:
  explicit Hold(Uses& uses) : uses_(uses) {}
  Hold(const Hold&) = delete;
  /// Not in the constructor: if acquiring a second engine's units fails, the destructor must release the first's.
  void acquire() {
    std::stable_sort(uses_.begin(), uses_.end(),
                     [](const Use& a, const Use& b) { return a.keeper->id() < b.keeper->id(); });
    for (size_t first = 0; first < uses_.size();) {
      size_t last = first;
      while (last < uses_.size() && uses_[last].keeper == uses_[first].keeper) ++last;
      uses_[first].keeper->acquire({uses_.data() + first, last - first});
      first = held_ = last;
    }
  }
  ~Hold() {
    for (size_t first = 0; first < held_;) {
      size_t last = first;
      while (last < held_ && uses_[last].keeper == uses_[first].keeper) ++last;
      uses_[first].keeper->release({uses_.data() + first, last - first}, succeeded);
      first = last;
    }
  }
  bool succeeded = false;

 private:
  Uses& uses_;
  size_t held_ = 0;
};

/// The parameters among an operator's arguments; of one that makes views, those whose keeper waits for views.
Uses uses_of(const c10::OperatorHandle& op, const Traits& traits, const torch::jit::Stack& stack) {
  Uses uses;
  const auto arguments = torch::jit::last(stack, op.schema().arguments().size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    deferred::for_each_tensor(arguments[i], [&, write = traits.writes_argument(i)](int, const Tensor& tensor) {
      collect(tensor, write, uses);
    });
  }
  if (traits.views_only) {
    uses.erase(std::remove_if(uses.begin(), uses.end(), [](const Use& use) { return use.keeper->lends(); }),
               uses.end());
  }
  return uses;
}

void check_collective(const c10::OperatorHandle& op, const Uses& uses) {
  const auto lent = std::find_if(uses.begin(), uses.end(), [](const Use& use) { return use.keeper->lends(); });
  TORCH_CHECK_VALUE(lent == uses.end(), "deeptide: parameter '", lent->parameter->name, "' was given to ",
                    op.schema().name(),
                    " while it is sharded (ZeRO stage 3): a collective still reads its memory after the release. "
                    "Pass parameter.detach().clone(), and copy the result back with parameter.copy_().");
}

/// Nobody waits for an operator: its inner ones need not come here either, but where zero.Init records them.
void pass_quietly(const c10::OperatorHandle& op, DispatchKeySet below, torch::jit::Stack* stack) {
  std::optional<c10::impl::ExcludeDispatchKeyGuard> exclude;
  if (!c10::impl::tls_is_dispatch_key_included(deferred::kKey)) exclude.emplace(deferred::kKey);
  op.redispatchBoxed(below, stack);
}

void gate(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  const DispatchKeySet below = keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, deferred::kKey);
  if (deferred::record(op, below, stack)) return;
  if (watches.load(std::memory_order_relaxed) == 0) {
    pass_quietly(op, below, stack);
    return;
  }
  const Traits& traits = deferred::traits_of(op);
  if (traits.views_only && view_watches.load(std::memory_order_relaxed) == 0) {
    // A composite that copies after all (reshape, to) passes the gate again with its inner operators.
    op.redispatchBoxed(below, stack);
    return;
  }
  Uses uses = uses_of(op, traits, *stack);
  if (uses.empty()) {
    op.redispatchBoxed(below, stack);
    return;
  }
  if (traits.collective) check_collective(op, uses);
  count.fetch_add(1, std::memory_order_relaxed);
  Hold hold(uses);
  hold.acquire();
  c10::impl::ExcludeDispatchKeyGuard exclude(deferred::kKey);
  op.redispatchBoxed(below, stack);
  hold.succeeded = true;
}

}  // namespace

void set_gate_key(const Tensor& tensor, bool on) { deferred::set_key(tensor, on); }

bool has_gate_key(const Tensor& tensor) { return deferred::has_key(tensor); }

void run_as_operator(c10::ArrayRef<Tensor> tensors, const std::vector<bool>& written,
                     const std::function<void()>& work) {
  Uses uses;
  for (size_t i = 0; i < tensors.size(); ++i) collect(tensors[i], written.at(i), uses);
  if (uses.empty()) return work();
  count.fetch_add(1, std::memory_order_relaxed);
  Hold hold(uses);
  hold.acquire();
  c10::impl::ExcludeDispatchKeyGuard exclude(deferred::kKey);
  work();
  hold.succeeded = true;
}

uint64_t lent_unit(const Tensor& tensor) {
  Use use;
  if (!has_gate_key(tensor) || !tensor.has_storage()) return 0;
  if (!Registry::instance().find(tensor.storage().unsafeGetStorageImpl(), use) || !use.keeper->lends()) return 0;
  return reinterpret_cast<uint64_t>(use.parameter->unit);
}

bool is_lent(const Tensor& tensor) { return lent_unit(tensor) != 0; }

void wait_for_values(const c10::Storage& storage) {
  if (view_watches.load(std::memory_order_relaxed) == 0) return;
  Uses uses(1);
  if (!Registry::instance().find(storage.unsafeGetStorageImpl(), uses.front()) || uses.front().keeper->lends()) return;
  Hold(uses).acquire();
}

const char* phase() {
  if (torch::autograd::get_current_graph_task_id() != -1) return "backward";
  return at::GradMode::is_enabled() ? "forward" : "evaluation";
}

int64_t gate_count() { return count.load(std::memory_order_relaxed); }

Gatekeeper::Gatekeeper() : id_(next_id()) {}

Watch::Watch(const Gatekeeper& keeper) : views_(!keeper.lends()) {
  watches.fetch_add(1, std::memory_order_relaxed);
  if (views_) view_watches.fetch_add(1, std::memory_order_relaxed);
}

Watch::~Watch() {
  watches.fetch_sub(1, std::memory_order_relaxed);
  if (views_) view_watches.fetch_sub(1, std::memory_order_relaxed);
}

GateEntry::GateEntry(Parameter& parameter, Gatekeeper& keeper) : storage_(parameter.storage.get()) {
  Registry::instance().add(parameter, keeper);
}

GateEntry::GateEntry(GateEntry&& other) noexcept : storage_(std::exchange(other.storage_, nullptr)) {}

GateEntry& GateEntry::operator=(GateEntry&& other) noexcept {
  std::swap(storage_, other.storage_);
  return *this;
}

GateEntry::~GateEntry() {
  if (storage_ != nullptr) Registry::instance().remove(storage_);
}

}  // namespace deeptide::sharding

TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&deeptide::sharding::gate>());
}
