// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Copies and adds gradients to their places; multiplies there where that gives the same bits.
#include "gradients/arriving.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/mm.h>

#include <map>
#include <mutex>
#include <vector>

#include "device/memory/memory_copy.h"

namespace deeptide::gradients {

using at::Tensor;
using sharding::Parameter;

namespace {

/// Whether it lies by rows or by columns, from a border on at which libraries begin alike.
bool is_plain(const Tensor& matrix) {
  constexpr uintptr_t kBorder = 64;  // bytes
  const bool by_rows = matrix.stride(1) == 1 && matrix.stride(0) >= matrix.size(1);
  const bool by_columns = matrix.stride(0) == 1 && matrix.stride(1) >= matrix.size(0);
  return (by_rows || by_columns) && reinterpret_cast<uintptr_t>(matrix.const_data_ptr()) % kBorder == 0;
}

/// Returns all that may decide in which order a library sums.
std::vector<int64_t> kind_of(const Tensor& place, const Product& product) {
  std::vector<int64_t> kind = {static_cast<int64_t>(place.scalar_type()), static_cast<int64_t>(place.device().type()),
                               place.device().index(), at::get_num_threads()};
  for (const Tensor* each : {&place, &product.left, &product.right}) {
    kind.insert(kind.end(), each->sizes().begin(), each->sizes().end());
    kind.insert(kind.end(), each->strides().begin(), each->strides().end());
  }
  return kind;
}

/// Returns random numbers that lie as `like` does.
Tensor drawn(const Tensor& like, const at::Generator& draws) {
  const Tensor numbers = at::empty_strided(like.sizes(), like.strides(), like.options().device(at::kCPU));
  return numbers.normal_(0.0, 1.0, draws).to(like.device());
}

bool try_adding(const Tensor& place, const Product& product) {
  const at::Generator draws = at::detail::createCPUGenerator();  // the program's own stays as it is
  const Tensor left = drawn(product.left, draws), right = drawn(product.right, draws), first = drawn(place, draws);
  Tensor together = first.clone();
  together.addmm_(left, right);
  return at::equal(together, first + at::mm(left, right));
}

}  // namespace

void check_layout(const Parameter& parameter, const Tensor& gradient) {
  TORCH_CHECK_VALUE(gradient.layout() == at::kStrided || gradient.layout() == at::kSparse, "deeptide: parameter '",
                    parameter.name, "' received a gradient of layout ", gradient.layout(),
                    ", expected a dense one or one sparse by coordinates");
}

bool adds_alike(const Tensor& place, const Product& product) {
  if (!is_plain(place) || !is_plain(product.left) || !is_plain(product.right)) return false;
  static std::mutex mutex;
  static std::map<std::vector<int64_t>, bool> tried;
  const std::lock_guard lock(mutex);
  const auto [found, is_new] = tried.try_emplace(kind_of(place, product), false);
  if (is_new) found->second = try_adding(place, product);
  return found->second;
}

void Arriving::check(const Parameter& parameter) const {
  if (whole_ != nullptr) check_layout(parameter, *whole_);
}

const Tensor& Arriving::whole() {
  if (whole_ == nullptr) {
    computed_ = at::mm(product_->left, product_->right);
    whole_ = &computed_;
  }
  return *whole_;
}

bool Arriving::fits(const Tensor& place) const {
  return whole_ == nullptr && place.dim() == 2 && place.is_contiguous() &&
         place.scalar_type() == product_->left.scalar_type();
}

/// Avoids ATen for a plain copy: models of many small parameters make one call for each.
void Arriving::copy_into(const Tensor& bucket, const Parameter& p) {
  if (p.numel == 0) return;  // an empty tensor has no memory to copy from
  if (whole_ == nullptr) {
    Tensor place = p.view_of(bucket);
    if (fits(place)) {
      at::mm_out(place, product_->left, product_->right);
      return;
    }
  }
  const Tensor& gradient = whole();
  if (gradient.layout() != at::kStrided) {
    p.view_of(bucket).zero_();
    return add_into(bucket, p);
  }
  const auto place = [&] { return static_cast<char*>(bucket.mutable_data_ptr()) + p.offset * bucket.element_size(); };
  if (gradient.is_cpu() && gradient.scalar_type() == bucket.scalar_type() && gradient.is_contiguous() &&
      !gradient.is_neg() && gradient.numel() == p.numel) {
    device::copy_in_parallel(place(), gradient.const_data_ptr(), gradient.nbytes());
  } else {
    p.view_of(bucket).copy_(gradient);
  }
}

/// Rows of a sparse one may repeat. Not by add_(sparse): where every dimension is sparse, torch 2.13 adds to a view's
/// storage offset twice.
void Arriving::add_into(const Tensor& bucket, const Parameter& p) {
  Tensor place = p.view_of(bucket);
  if (fits(place) && adds_alike(place, *product_)) {
    place.addmm_(product_->left, product_->right);
    return;
  }
  const Tensor& gradient = whole();
  if (gradient.layout() == at::kStrided) {
    place.add_(gradient);
  } else if (gradient.sparse_dim() == 1) {
    place.index_add_(0, gradient._indices()[0], gradient._values().to(bucket.scalar_type()));
  } else {
    place.add_(gradient.to_dense());
  }
}

}  // namespace deeptide::gradients
