// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Checks the tensors of a reduction and sends them to the device's implementation; finds the culprit of a NaN.
#include "numerics/sums/ordered_sum.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "numerics/kernels/kernel_tensors.h"
#include "numerics/rounding/rounding.h"
#include "numerics/sums/kernel_pieces.h"
#include "numerics/sums/ordered_sum_detail.h"

using at::Tensor;

namespace deeptide::numerics {
namespace {

bool is_wire_dtype(at::ScalarType dtype) { return dtype == at::kFloat || is_half_width(dtype); }

/// `like`: what the rows must match in shape and device, called `name`.
void check_rows(const char* what, at::TensorList rows, const Tensor& like, const char* name) {
  TORCH_CHECK_VALUE(!rows.empty(), what, ": there are no rows, expected one per rank");
  TORCH_CHECK_VALUE(like.defined() && like.dim() == 1 && like.is_contiguous(), what, ": ", name,
                    " must be a contiguous tensor of shape (N,)");
  for (const Tensor& row : rows) {
    TORCH_CHECK_VALUE(row.defined() && row.dim() == 1 && row.numel() == like.numel(), what, ": a row has shape ",
                      row.defined() ? row.sizes() : at::IntArrayRef{}, ", expected (", like.numel(), ",) as ", name,
                      " has");
    TORCH_CHECK_VALUE(is_wire_dtype(row.scalar_type()) && row.scalar_type() == rows[0].scalar_type(), what,
                      ": a row is ", row.scalar_type(), ", expected Float, BFloat16 or Half, the same for all");
    TORCH_CHECK_VALUE(row.is_contiguous(), what, ": each row must be contiguous, got a stride of ", row.stride(0));
    TORCH_CHECK_VALUE(row.device() == like.device(), what, ": a row is on ", row.device(), ", expected ", like.device(),
                      " as ", name, " is");
  }
}

void check_sum(const char* what, at::TensorList rows, const Tensor& accumulator) {
  check_rows(what, rows, accumulator, "the accumulator");
  TORCH_CHECK_VALUE(is_wire_dtype(accumulator.scalar_type()), what, ": accumulator is ", accumulator.scalar_type(),
                    ", expected Float, BFloat16 or Half");
}

void check_squares(const char* what, const Tensor& sum_of_squares, at::Device device) {
  TORCH_CHECK_VALUE(sum_of_squares.defined() && sum_of_squares.dim() == 1 && sum_of_squares.numel() == 1 &&
                        sum_of_squares.scalar_type() == at::kDouble,
                    what, ": sum_of_squares must be one Double, of shape (1,)");
  TORCH_CHECK_VALUE(sum_of_squares.device() == device, what, ": sum_of_squares is on ", sum_of_squares.device(),
                    ", expected ", device, " as the rows are");
}

}  // namespace

Contributions Contributions::narrow(int64_t begin, int64_t length) const {
  if (!pieces.empty()) {
    std::vector<Piece> kept;
    for (const Piece& piece : pieces) {
      const int64_t first = std::max(begin, piece.begin);
      const int64_t end = std::min(begin + length, piece.begin + piece.values.numel());
      if (first < end) kept.push_back({first - begin, piece.values.narrow(0, first - piece.begin, end - first)});
    }
    // None of them is in the part: it is zero.
    if (kept.empty()) return {{at::zeros({length}, pieces[0].values.options())}, scale};
    return {std::move(kept), length, scale};
  }
  std::vector<Tensor> parts;
  for (const Tensor& row : rows) parts.push_back(row.narrow(0, begin, length));
  return {std::move(parts), scale};
}

Contributions Contributions::joined() const {
  if (pieces.empty()) return *this;
  Tensor row = at::empty({numel}, pieces[0].values.options());
  int64_t end = 0;
  for (const Piece& piece : pieces) {
    if (end < piece.begin) row.narrow(0, end, piece.begin - end).zero_();
    row.narrow(0, piece.begin, piece.values.numel()).copy_(piece.values);
    end = piece.begin + piece.values.numel();
  }
  if (end < numel) row.narrow(0, end, numel - end).zero_();
  return {{std::move(row)}, scale};
}

bool Contributions::is_summed() const {
  return rows.size() == 1 && scale == 1.0 && rows[0].scalar_type() == at::kFloat;
}

Tensor Contributions::sum() const {
  if (!pieces.empty()) return joined().sum();
  if (is_summed()) return rows[0];
  Tensor total = at::empty(rows[0].sizes(), rows[0].options().dtype(at::kFloat));
  ordered_sum(rows, scale, /*overwrite=*/true, total, at::empty({1}, rows[0].options().dtype(at::kDouble)));
  return total;
}

void ordered_sum(at::TensorList rows, double scale, bool overwrite, Tensor accumulator, Tensor sum_of_squares,
                 Squares squares) {
  check_sum("ordered_sum", rows, accumulator);
  check_squares("ordered_sum", sum_of_squares, accumulator.device());
  const auto implementation = accumulator.is_cpu()           ? detail::ordered_sum_cpu
                              : detail::has_sum_kernel(rows) ? detail::ordered_sum_kernel
                                                             : detail::ordered_sum_reference;
  if (squares == Squares::begin) sum_of_squares.zero_();
  implementation(rows, static_cast<float>(scale), overwrite, accumulator, sum_of_squares);
}

bool takes_pieces(at::Device device, size_t count) {
  return count > 0 && count <= kernel::Pieces::kMost && detail::has_sum_kernel_on(device);
}

void ordered_squares(const Contributions& contributions, Tensor sum_of_squares, Squares squares) {
  if (!contributions.pieces.empty()) {
    check_squares("ordered_squares", sum_of_squares, contributions.pieces[0].values.device());
    if (!fit_kernels(contributions)) return ordered_squares(contributions.joined(), sum_of_squares, squares);
    if (squares == Squares::begin) sum_of_squares.zero_();
    return detail::ordered_squares_kernel(contributions, sum_of_squares);
  }
  const at::TensorList rows = contributions.rows;
  check_rows("ordered_squares", rows, rows.empty() ? Tensor() : rows[0], "the first row");
  check_squares("ordered_squares", sum_of_squares, rows[0].device());
  const auto scale = static_cast<float>(contributions.scale);
  if (rows[0].is_cpu()) {
    if (squares == Squares::begin) sum_of_squares.zero_();
    detail::ordered_squares_cpu(rows, scale, sum_of_squares);
  } else if (detail::has_sum_kernel(rows)) {
    if (squares == Squares::begin) sum_of_squares.zero_();
    detail::ordered_sum_kernel(rows, scale, /*overwrite=*/true, /*accumulator=*/{}, sum_of_squares);
  } else {
    const Tensor sum = at::empty(rows[0].sizes(), rows[0].options().dtype(at::kFloat));
    ordered_sum(rows, contributions.scale, /*overwrite=*/true, sum, sum_of_squares, squares);
  }
}

void accumulate(const Tensor& gradient, bool overwrite, Tensor accumulator) {
  at::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(gradient.defined() && accumulator.defined() && gradient.dim() == 1 && accumulator.dim() == 1 &&
                        gradient.numel() == accumulator.numel(),
                    "accumulate: the gradient has shape ", gradient.defined() ? gradient.sizes() : at::IntArrayRef{},
                    ", the accumulator ", accumulator.defined() ? accumulator.sizes() : at::IntArrayRef{},
                    "; expected (N,) for both");
  TORCH_CHECK_VALUE(at::isFloatingType(gradient.scalar_type()) && at::isFloatingType(accumulator.scalar_type()),
                    "accumulate: got a gradient of ", gradient.scalar_type(), " and an accumulator of ",
                    accumulator.scalar_type(), ", expected floating types");
  TORCH_CHECK_VALUE(gradient.device() == accumulator.device(), "accumulate: the gradient is on ", gradient.device(),
                    ", expected ", accumulator.device(), " as the accumulator is");
  // ATen adds two dtypes on the CPU through a temporary; its other combinations are one pass already.
  const bool widens = accumulator.scalar_type() == at::kFloat && gradient.scalar_type() != at::kFloat &&
                      is_wire_dtype(gradient.scalar_type());
  if (overwrite) {
    accumulator.copy_(gradient);
  } else if (widens && accumulator.is_cpu() && gradient.is_contiguous() && accumulator.is_contiguous()) {
    detail::accumulate_cpu(gradient, accumulator);
  } else {
    accumulator.add_(gradient);
  }
}

std::optional<NonFinite> find_non_finite(at::TensorList rows, const Tensor& accumulator) {
  check_sum("find_non_finite", rows, accumulator);
  if (accumulator.numel() == 0) return std::nullopt;
  // argmax gives the first of equal values. One copy to the host: the place, then whether the sum and the rows are bad.
  const Tensor index = at::argmax(at::isfinite(accumulator).logical_not().to(at::kByte)).view({1});
  const auto is_bad = [&](const Tensor& flat) {
    return at::isfinite(flat.index_select(0, index)).logical_not().to(at::kLong);
  };
  std::vector<Tensor> found{index, is_bad(accumulator)};
  for (const Tensor& row : rows) found.push_back(is_bad(row));
  const Tensor host = at::cat(found).cpu();
  const auto* values = host.const_data_ptr<int64_t>();
  if (values[1] == 0) return std::nullopt;
  const int64_t* first = std::find(values + 2, values + host.numel(), 1);
  return NonFinite{values[0], first == values + host.numel() ? -1 : static_cast<int>(first - values - 2)};
}

const char* kernel_target() { return detail::chosen_target(); }

}  // namespace deeptide::numerics
