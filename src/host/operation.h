// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A transfer under way on any transport, and the error that ends it.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>

#include "device/lane.h"

namespace deeptide::host {

/// A peer or a connection is lost; the text names it.
class TransportError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A transfer or a collective under way. Keeps its tensors alive until it is done.
class Operation {
 public:
  virtual ~Operation() = default;
  /// Whether it is done, or so nearly that `advance` does not wait.
  virtual bool ready() = 0;
  /// Works for at most about `limit`; returns true when done. Errors: TransportError.
  virtual bool advance(std::chrono::milliseconds limit) = 0;
  /// Makes work issued to `lane` later run after the operation, without a wait on the host. Returns false if the
  /// operation needs the host: then call `advance` until it is done.
  virtual bool order_before(const device::Lane& lane) { return false; }
};
using OperationPtr = std::shared_ptr<Operation>;

/// Runs `operation`, then `finish` once it is done.
OperationPtr then(OperationPtr operation, std::function<void()> finish);

}  // namespace deeptide::host
