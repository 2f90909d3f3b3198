// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Keeps tensors of a device in the host's memory.
#include <unistd.h>

#include <mutex>
#include <unordered_map>
#include <utility>

#include "tiers/spill/spill.h"
#include "tiers/spill/spilled_form.h"

namespace deeptide::tiers {

using at::Tensor;

namespace {

constexpr auto kRole = device::Role::host_activations;

/// Copies to and from page-locked memory do not make the host wait, and keep the order of the program's stream.
class HostSpill final : public Spill {
 public:
  explicit HostSpill(std::shared_ptr<device::Ledger> ledger) : ledger_(std::move(ledger)) {}
  ~HostSpill() override { count(-bytes_); }

  Id put(const Tensor& tensor) override {
    const at::NoGradGuard no_grad;
    const SpilledForm form(tensor);
    const Tensor host = form.make_on_host();
    host.copy_(tensor.detach(), /*non_blocking=*/host.is_pinned());
    std::lock_guard lock(mutex_);
    count(form.nbytes());
    tensors_.emplace(++last_, Kept{host, form});
    return last_;
  }

  Tensor get(Id id) override {
    const at::NoGradGuard no_grad;
    const Kept kept = find(id);
    Tensor tensor = kept.form.make();
    tensor.copy_(kept.values, /*non_blocking=*/kept.values.is_pinned());
    return tensor;
  }

  void drop(Id id) noexcept override {
    if (::getpid() != owner_) return;
    std::lock_guard lock(mutex_);
    const auto found = tensors_.find(id);
    if (found == tensors_.end()) return;
    count(-found->second.form.nbytes());
    tensors_.erase(found);
  }

  int64_t peak_bytes() const override {
    std::lock_guard lock(mutex_);
    return peak_;
  }

 private:
  struct Kept {
    Tensor values;
    SpilledForm form;
  };

  Kept find(Id id) {
    std::lock_guard lock(mutex_);
    return tensors_.at(id);
  }
  void count(int64_t bytes) {
    bytes_ += bytes;
    peak_ = std::max(peak_, bytes_);
    ledger_->add(kRole, bytes);
  }

  const std::shared_ptr<device::Ledger> ledger_;
  const pid_t owner_ = ::getpid();
  mutable std::mutex mutex_;
  std::unordered_map<Id, Kept> tensors_;
  Id last_ = 0;
  int64_t bytes_ = 0, peak_ = 0;
};

}  // namespace

std::unique_ptr<Spill> spill_to_host(std::shared_ptr<device::Ledger> ledger) {
  return std::make_unique<HostSpill>(std::move(ledger));
}

}  // namespace deeptide::tiers
