// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Keeps references, and puts the last use of each before its memory's next one.
#include "gradients/held_gradients.h"

#include <utility>

namespace deeptide::gradients {

using at::Tensor;
using device::Lane;
using device::Role;
using sharding::Parameter;

HeldGradients::HeldGradients(std::shared_ptr<device::Ledger> ledger, const sharding::Unit& unit, at::ScalarType dtype,
                             at::Device device)
    : ledger_(std::move(ledger)),
      unit_(unit),
      bytes_(unit.numel() * static_cast<int64_t>(c10::elementSize(dtype))),
      home_(Lane::current(device)),
      gradients_(unit.parameters().size()) {
  ledger_->check_room(Role::gradients, bytes_);
  ledger_->add(Role::gradients, bytes_);
}

HeldGradients::~HeldGradients() {
  ledger_->add(Role::gradients, -bytes_);
  try {
    const Lane current = Lane::current(home_.device());
    if (!(current == home_)) home_.wait_for(current.mark());
  } catch (const std::exception&) {  // a device that has failed gives no memory to anybody
  }
}

/// The hook and its caller refer to the tensor; a further reference is the program's. Memory is autograd's to share, as
/// it is where `.grad` stays: who changes it changes the gradient.
bool HeldGradients::may_hold(const Tensor& gradient, const Parameter& parameter, at::ScalarType dtype) {
  constexpr size_t kReferences = 2;
  return parameter.numel > 0 && gradient.layout() == at::kStrided && gradient.scalar_type() == dtype &&
         gradient.numel() == parameter.numel && gradient.is_contiguous() && !gradient.is_neg() &&
         parameter.tensors.front().is_contiguous() && gradient.use_count() <= kReferences &&
         gradient.storage().nbytes() == gradient.nbytes();
}

void HeldGradients::add(int parameter, const Tensor& gradient) {
  gradients_[static_cast<size_t>(parameter)] = gradient.view({-1});
}

std::vector<numerics::Piece> HeldGradients::pieces() const {
  std::vector<numerics::Piece> made;
  for (size_t p = 0; p < gradients_.size(); ++p) {
    if (gradients_[p].defined()) made.push_back({unit_.parameters()[p].offset, gradients_[p]});
  }
  return made;
}

void HeldGradients::copy_into(const Tensor& bucket) const {
  for (const numerics::Piece& piece : pieces()) {
    bucket.narrow(0, piece.begin, piece.values.numel()).copy_(piece.values);
  }
}

}  // namespace deeptide::gradients
