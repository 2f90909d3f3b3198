// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Knows the operators that treat each element by itself, and how torch draws.
#include "deferred/parts.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <string>

#include "deferred/key.h"
#include "deferred/memory.h"
#include "deferred/traits.h"
#include "device/torch_versions.h"

namespace deeptide::deferred {

using at::Tensor;

namespace {

constexpr int64_t kScratch = int64_t{1} << 20;  // elements

bool draws(const std::string& name) {
  return is_one_of(name, {"aten::normal_", "aten::uniform_", "aten::randn", "aten::rand"});
}

bool is_factory(const std::string& name) {
  return is_one_of(name, {"aten::empty", "aten::zeros", "aten::ones", "aten::full", "aten::randn", "aten::rand"});
}

bool is_elementwise(const std::string& name) {
  return is_one_of(name, {"aten::normal_", "aten::uniform_", "aten::zero_", "aten::fill_", "aten::mul_", "aten::add_",
                          "aten::sub_", "aten::div_", "aten::clamp_", "aten::clamp_min_", "aten::clamp_max_",
                          "aten::erfinv_", "aten::neg_", "aten::abs_", "aten::copy_"});
}

bool is_contiguous(const Geometry& geometry) {
  int64_t stride = 1;
  for (size_t dim = geometry.sizes.size(); dim-- > 0;) {
    if (geometry.sizes[dim] != 1 && geometry.strides[dim] != stride) return false;
    stride *= geometry.sizes[dim];
  }
  return geometry.device.is_cpu();
}

int64_t numel_of(const Geometry& geometry) { return c10::multiply_integers(geometry.sizes); }

bool is_whole(const Geometry& geometry) {
  return is_contiguous(geometry) && geometry.offset == 0 &&
         static_cast<size_t>(numel_of(geometry)) * c10::elementSize(geometry.dtype) == geometry.nbytes;
}

/// Whether the numbers that it draws for some elements do not depend on how many others it draws.
bool draws_by_parts(const std::string& name, int64_t begin, int64_t count) {
  const bool is_normal = name == "aten::normal_" || name == "aten::randn";
  return !is_normal || (begin % Parts::kMultiple == 0 && count % Parts::kMultiple == 0);
}

/// Whether all tensors beside the first argument are numbers, or what is copied.
bool others_fit(const Operation& operation) {
  bool fit = true;
  for (size_t i = 1; i < operation.arguments.size(); ++i) {
    for_each_tensor(operation.arguments[i], [&](int, const Tensor& tensor) {
      const bool is_source = i == 1 && operation.op.schema().name() == "aten::copy_" && tensor.is_contiguous() &&
                             tensor.is_cpu() && tensor.sizes() == operation.absent[0].geometry.sizes;
      fit = fit && (tensor.dim() == 0 || is_source);
    });
  }
  return fit;
}

/// The step that made a version, which leaves `before` at the version that it continues; null there: it needs none.
std::optional<Parts::Step> step_of(const Operation& operation, const Geometry& whole, const Version*& before) {
  const std::string& name = operation.op.schema().name();
  before = nullptr;
  if (operation.absent.empty()) {
    if (!is_factory(name) || operation.results.size() != 1 || !is_whole(operation.results[0].geometry)) return {};
    return Parts::Step{&operation, 0, numel_of(operation.results[0].geometry), {}};
  }
  const Absent& absent = operation.absent[0];
  if (operation.absent.size() != 1 || absent.argument != 0 || absent.item >= 0) return {};
  before = absent.before.get();
  if (traits_of(operation.op).copies) {
    const bool whole_of_whole = is_whole(absent.geometry) && is_whole(operation.results[0].geometry);
    return whole_of_whole ? std::optional(Parts::Step{&operation, 0, numel_of(whole), {}}) : std::nullopt;
  }
  if (!is_elementwise(name) || !absent.written || !is_contiguous(absent.geometry) || !others_fit(operation)) return {};
  return Parts::Step{&operation, absent.geometry.offset, numel_of(absent.geometry), {}};
}

void run(const Parts::Step& step, const Tensor& part, int64_t begin) {
  const Operation& operation = *step.operation;
  const std::string& name = operation.op.schema().name();
  if (name == "aten::empty") return;
  if (name == "aten::zeros") return void(part.zero_());
  if (name == "aten::ones") return void(part.fill_(1));
  if (name == "aten::full") return void(part.fill_(operation.arguments[1].toScalar()));
  if (name == "aten::randn") return void(part.normal_(0, 1, step.generator));
  if (name == "aten::rand") return void(part.uniform_(0, 1, step.generator));
  check_kept(operation);
  torch::jit::Stack stack = operation.arguments;
  stack[0] = part;
  if (step.generator.defined()) stack[traits_of(operation.op).generator] = step.generator;
  if (stack.size() > 1 && stack[1].isTensor() && stack[1].toTensor().dim() > 0)
    stack[1] = stack[1].toTensor().flatten().narrow(0, begin - step.begin, part.numel());
  const device::KeptArguments kept(stack);
  operation.op.callBoxed(stack);
}

}  // namespace

std::optional<Parts> Parts::of(const Tensor& tensor) {
  const Memory* memory = memory_of(tensor);
  if (memory == nullptr || !is_whole(geometry_of(tensor))) return {};
  const Geometry whole = geometry_of(tensor);
  Parts parts;
  parts.version_ = memory->now;
  for (const Version* version = parts.version_.get(); version != nullptr;) {
    if (!version->made_by) return {};
    const Version* before = nullptr;
    auto step = step_of(*version->made_by, whole, before);
    if (!step || step->begin + step->count > tensor.numel()) return {};
    const std::string& name = step->operation->op.schema().name();
    if (draws(name)) {
      if (!step->operation->generator_state.defined() || !draws_by_parts(name, step->begin, step->count)) return {};
      step->generator = at::detail::createCPUGenerator();
      step->generator.set_state(step->operation->generator_state);
    }
    parts.steps_.push_back(std::move(*step));
    version = before;
  }
  std::reverse(parts.steps_.begin(), parts.steps_.end());
  return parts;
}

Tensor Parts::next(int64_t count) {
  const c10::impl::ExcludeDispatchKeyGuard exclude(kKey);
  const at::NoGradGuard no_grad;
  const Operation& first = *steps_.front().operation;
  const c10::ScalarType type = first.absent.empty() ? first.results[0].geometry.dtype : first.absent[0].geometry.dtype;
  Tensor part = at::empty({count}, at::TensorOptions(type));
  for (const Step& step : steps_) {
    if (traits_of(step.operation->op).copies) {
      part = part.to(step.operation->results[0].geometry.dtype);
      continue;
    }
    const int64_t begin = std::max(position_, step.begin);
    const int64_t end = std::min(position_ + count, step.begin + step.count);
    if (begin < end) run(step, part.narrow(0, begin - position_, end - begin), begin);
  }
  position_ += count;
  return part;
}

bool draw_in_parts(const Operation& operation) {
  const std::string& name = operation.op.schema().name();
  const bool is_new = operation.absent.empty();
  if (!draws(name) || (is_new ? operation.results.size() > 1 : operation.absent.size() != 1)) return false;
  if (is_new && !operation.arguments[0].isIntList()) return false;
  if (!is_new && !is_contiguous(operation.absent[0].geometry)) return false;
  int64_t left =
      is_new ? c10::multiply_integers(operation.arguments[0].toIntVector()) : numel_of(operation.absent[0].geometry);
  if (left <= kScratch || !draws_by_parts(name, 0, left)) return false;
  const Tensor scratch =
      is_new ? Tensor() : at::empty({kScratch}, at::TensorOptions(operation.absent[0].geometry.dtype));
  for (; left > 0; left -= kScratch) {
    const int64_t count = std::min(left, kScratch);
    torch::jit::Stack stack = operation.arguments;
    if (is_new) {
      stack[0] = std::vector<int64_t>{count};
    } else {
      stack[0] = scratch.narrow(0, 0, count);
    }
    const device::KeptArguments kept(stack);
    operation.op.callBoxed(stack);
  }
  return true;
}

}  // namespace deeptide::deferred
