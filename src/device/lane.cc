// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Wraps c10's generic streams and events, for any backend.
#include "device/lane.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "device/torch_versions.h"

namespace deeptide::device {

using c10::impl::VirtualGuardImpl;

bool Mark::passed() const { return event_ == nullptr || event_->query(); }

void Mark::wait() const {
  if (event_ != nullptr) event_->synchronize();
}

Lane Lane::current(c10::Device device) {
  if (device.is_cpu()) return {device, std::nullopt};
  return {device, VirtualGuardImpl(device.type()).getStream(device)};
}

Lane Lane::create(c10::Device device) {
  if (device.is_cpu()) return {device, std::nullopt};
  return {device, VirtualGuardImpl(device.type()).getNewStream(device)};
}

Mark Lane::mark() const {
  if (!stream_) return {};
  auto event = std::make_shared<c10::Event>(device_.type());
  event->record(*stream_);
  return Mark(std::move(event));
}

void Lane::wait_for(const Mark& mark) const {
  if (stream_ && mark.event_) mark.event_->block(*stream_);
}

void* Lane::handle() const { return stream_ ? native_handle(*stream_) : nullptr; }

Lane::Scope::Scope(const Lane& lane) {
  if (lane.stream_) before_ = VirtualGuardImpl(lane.device_.type()).exchangeStream(*lane.stream_);
}

Lane::Scope::~Scope() {
  if (before_) VirtualGuardImpl(before_->device_type()).exchangeStream(*before_);
}

}  // namespace deeptide::device
