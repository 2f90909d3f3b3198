// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// How values come about: recorded operators, and the versions of memories that they read and write.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace deeptide::deferred {

struct Operation;

/// The contents of a memory once an operator has written it. Versions never change: a write makes the next one, so
/// those that nobody can ask for any more go, and the operators that made them with them.
struct Version {
  Version(std::shared_ptr<Operation> operation, size_t bytes) : made_by(std::move(operation)), nbytes(bytes) {}
  ~Version();

  std::shared_ptr<Operation> made_by;
  size_t nbytes = 0;
};

/// The places of a tensor's elements in its memory.
struct Geometry {
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  size_t nbytes = 0;  // of the memory
  c10::Device device = at::kCPU;
};

Geometry geometry_of(const at::Tensor& tensor);

/// An argument whose values are not there.
struct Absent {
  int argument = 0;
  int item = -1;  // in a list of tensors
  Geometry geometry;
  std::shared_ptr<Version> before;  // null: the operator overwrites all of it
  bool written = false;
};

/// The product of an operator: a written argument, or a new tensor.
struct Result {
  std::weak_ptr<Version> version;
  int absent = -1;  // index into Operation::absent, or
  int place = -1;   // which result it is, and
  int item = -1;    // which of its tensors
  Geometry geometry;
};

/// One recorded call.
struct Operation {
  explicit Operation(const c10::OperatorHandle& handle) : op(handle) {}

  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;                // with undefined tensors in place of absent ones
  std::vector<std::pair<at::Tensor, int64_t>> kept;  // large tensors among them, and the version each had
  std::vector<Absent> absent;
  std::vector<Result> results;
  at::Tensor generator_state;  // before the call; undefined: draws nothing
  int64_t number = 0;          // in the order of calls
};

/// Runs what the versions need, in the order of recording, and returns a memory for each. A memory that nothing asks
/// for any more is freed at once. Errors: ValueError if a tensor that was read has changed since.
std::vector<at::Storage> replay(const std::vector<std::shared_ptr<Version>>& versions);

/// Runs one operator for what it draws from its generator, and drops what it gives.
void draw(const Operation& operation);

/// Errors: ValueError if a tensor that the operator read has changed since.
void check_kept(const Operation& operation);

/// Returns an uninitialised tensor in memory of its own; `geometry.nbytes` is ignored.
at::Tensor tensor_of(Geometry geometry);

/// Returns to the system what replays have freed.
void release_idle_memory();

}  // namespace deeptide::deferred
