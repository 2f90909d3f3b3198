// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Chains a finishing step to an operation.
#include "host/operation.h"

#include <utility>

namespace deeptide::host {

using std::chrono::milliseconds;

namespace {

class ThenOperation : public Operation {
 public:
  ThenOperation(OperationPtr operation, std::function<void()> finish)
      : operation_(std::move(operation)), finish_(std::move(finish)) {}
  bool ready() override { return operation_->ready(); }
  bool advance(milliseconds limit) override {
    if (!operation_->advance(limit)) return false;
    run_finish();
    return true;
  }
  bool order_before(const device::Lane& lane) override {
    if (!operation_->order_before(lane)) return false;
    const device::Lane::Scope scope(lane);
    run_finish();
    return true;
  }

 private:
  void run_finish() {
    if (finish_) std::exchange(finish_, nullptr)();
  }

  OperationPtr operation_;
  std::function<void()> finish_;
};

}  // namespace

OperationPtr then(OperationPtr operation, std::function<void()> finish) {
  return std::make_shared<ThenOperation>(std::move(operation), std::move(finish));
}

}  // namespace deeptide::host
