// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Sums the ranks' gradient contributions by pairs in fp32; norm and finite check ride along.
//
// *By pairs*: rows 0 and 1, 2 and 3, and so on are added, then those sums likewise; what has no neighbour waits for the
// next level. The order depends on the number of rows alone, and aligned runs of 2^k rows may be summed first, by
// anybody: the rows that replace them have the same sum, bit for bit.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace deeptide::numerics {

/// A part of a gradient, where it lies.
struct Piece {
  int64_t begin = 0;  // of the gradient's elements
  at::Tensor values;  // (n,) contiguous, fp32|bf16|fp16
};

/// A gradient as the ranks contributed it: `scale` times the sum of the rows by pairs, in fp32. The rows are the
/// ranks', in their order, or sums of as many neighbours each. Shapes: (N,) each, contiguous, fp32|bf16|fp16, all of
/// one type and on one device; at least one. Or, for kernels of a device, one rank's as pieces, in their order: what is
/// between them is zero, and all have one type and one device.
struct Contributions {
  Contributions() = default;                               // none
  Contributions(at::Tensor sum) : rows{std::move(sum)} {}  // NOLINT: a sum is a contribution of its own
  Contributions(std::vector<at::Tensor> rows_by_rank, double factor) : rows(std::move(rows_by_rank)), scale(factor) {}

  Contributions(std::vector<Piece> parts, int64_t count, double factor)
      : scale(factor), pieces(std::move(parts)), numel(count) {}

  bool defined() const { return !rows.empty() || !pieces.empty(); }
  Contributions narrow(int64_t begin, int64_t length) const;
  /// The same as rows, of which pieces make one in new memory.
  Contributions joined() const;
  /// There is nothing to add or to scale: one fp32 row.
  bool is_summed() const;
  /// (N,) fp32: the row itself when it is summed, otherwise new memory.
  at::Tensor sum() const;

  std::vector<at::Tensor> rows;
  double scale = 1.0;
  std::vector<Piece> pieces = {};  // none: there are rows
  int64_t numel = 0;               // of pieces with what is between them
};

/// Hands a kernel the sum block by block, so that it is never written to memory. On the CPU only.
class SumReader {
 public:
  static constexpr int64_t kBlock = 4096;  // elements: 16 KiB of sums, which stay in the first-level cache
  explicit SumReader(const Contributions& contributions);
  /// Elements [begin, begin + count): where they lie if they are summed, else in `scratch` (kBlock,), and then
  /// count <= kBlock. The same bits that `ordered_sum` writes.
  const float* read(int64_t begin, int64_t count, float* scratch) const;

 private:
  std::vector<const void*> rows_;
  at::ScalarType dtype_;
  float scale_;
  bool summed_;
};

/// Whether a sum of squares begins anew, or goes on from what is there: parts that begin at multiples of
/// SumReader::kBlock, in their order, give the bits of the whole; on a CPU, elsewhere nearly.
enum class Squares : uint8_t { begin, go_on };

/// accumulator = (overwrite ? 0 : accumulator) + scale * the rows' sum by pairs, in fp32. Writes the sum of squares of
/// the *new* accumulator to `sum_of_squares` (non-finite if any element is). The sum of squares is taken in fp64 over
/// fixed blocks added in order: it does not depend on the number of threads. GPUs with kernels add the blocks in
/// another fixed order. An accumulator of 16 bits is added to in fp32 and rounded once; the squares are of what it
/// holds then. Shapes: rows: one per rank, (N,) fp32|bf16|fp16; accumulator (N,) fp32|bf16|fp16; sum_of_squares (1,)
/// fp64, same device. N may be 0.
void ordered_sum(at::TensorList rows, double scale, bool overwrite, at::Tensor accumulator, at::Tensor sum_of_squares,
                 Squares squares = Squares::begin);

/// Whether this device's kernels take so many pieces of a gradient.
bool takes_pieces(at::Device device, size_t count);

/// Computes the sum of squares of `ordered_sum` with `overwrite`, without writing the sum. Shapes: as there.
void ordered_squares(const Contributions& contributions, at::Tensor sum_of_squares, Squares squares = Squares::begin);

/// accumulator = (overwrite ? 0 : accumulator) + gradient, with cast. Shapes: (N,) each; any float dtypes; N may be 0.
void accumulate(const at::Tensor& gradient, bool overwrite, at::Tensor accumulator);

struct NonFinite {
  int64_t index = 0;  // first bad element
  int rank = -1;      // first rank whose contribution is bad there; -1 when only the sum overflowed
};

/// Finds the first NaN or Inf after `ordered_sum` reported one. Slow path.
std::optional<NonFinite> find_non_finite(at::TensorList rows, const at::Tensor& accumulator);

/// Highway's name of the instruction set that the sums above run on here.
const char* kernel_target();

}  // namespace deeptide::numerics
