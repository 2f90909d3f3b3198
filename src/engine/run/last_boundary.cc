// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Copies small buffers, and watches the version counters of large ones.
#include "engine/run/last_boundary.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <utility>

#include "sharding/gate.h"

namespace deeptide::engine {

using at::Tensor;

namespace {

/// Inference tensors count no versions. Views of sharded parameters would be gathered.
bool can_follow(const Tensor& buffer) {
  return buffer.defined() && !buffer.is_inference() && !sharding::has_gate_key(buffer);
}

}  // namespace

bool LastBoundary::holds(const Kept& kept, const NamedTensor& buffer) {
  const Tensor& was = kept.now.tensor;
  return kept.now.name == buffer.name && was.sizes() == buffer.tensor.sizes() &&
         was.scalar_type() == buffer.tensor.scalar_type() && was.device() == buffer.tensor.device();
}

/// Keeps what is known of buffers that are still there.
void LastBoundary::follow(std::vector<NamedTensor> buffers) {
  std::erase_if(buffers, [](const NamedTensor& buffer) { return !can_follow(buffer.tensor); });
  const bool same =
      buffers.size() == kept_.size() && std::equal(kept_.begin(), kept_.end(), buffers.begin(), &LastBoundary::holds);
  std::vector<Kept> before;
  if (!same) before = std::exchange(kept_, std::vector<Kept>(buffers.size()));
  for (size_t i = 0; i < buffers.size(); ++i) {
    Kept& kept = kept_[i];
    if (!same) {
      const auto found =
          std::find_if(before.begin(), before.end(), [&](const Kept& k) { return holds(k, buffers[i]); });
      if (found != before.end()) kept = *found;
    }
    const bool is_known = kept.now.tensor.defined();
    const bool is_other = is_known && !kept.now.tensor.is_same(buffers[i].tensor);
    const bool is_large = buffers[i].tensor.nbytes() > kSmallBytes;
    const int64_t version = buffers[i].tensor._version();
    const bool has_changed = is_other || (is_known && version != kept.version);
    kept.is_copied = kept.is_copied || !is_large || has_changed;
    kept.version = version;
    kept.now = std::move(buffers[i]);
  }
}

void LastBoundary::note(int64_t micro_steps) {
  const at::NoGradGuard no_grad;
  micro_steps_ = micro_steps;
  has_forward_ = false;
  generators_ = Generators::of(device_);
  follow(live_.buffers());
  std::vector<Tensor> copies, values;
  for (Kept& kept : kept_) {
    if (!kept.is_copied) continue;
    if (!kept.copy.defined()) kept.copy = at::empty_like(kept.now.tensor);
    copies.push_back(kept.copy);
    values.push_back(kept.now.tensor.detach());
  }
  if (!copies.empty()) at::_foreach_copy_(copies, values);
}

std::vector<std::string> LastBoundary::restore(std::vector<NamedTensor>& buffers) const {
  std::vector<std::string> lost;
  for (NamedTensor& buffer : buffers) {
    const auto found = std::find_if(kept_.begin(), kept_.end(), [&](const Kept& kept) { return holds(kept, buffer); });
    const bool is_same = found != kept_.end() && found->now.tensor.is_same(buffer.tensor);
    if (found != kept_.end() && found->copy.defined() && (is_same || live_.knows_buffers())) {
      buffer.tensor = found->copy;
    } else if (found != kept_.end() && (!is_same || buffer.tensor._version() != found->version)) {
      lost.push_back(buffer.name);
    }
  }
  return lost;
}

}  // namespace deeptide::engine
