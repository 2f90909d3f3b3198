// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The layouts of block-sparse attention, one function per mode.
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>

#include "deeptide/sparse_attention.h"

namespace deeptide::ops {
namespace {

/// One head's layout: a square of blocks. Ranges may begin and end before 0 or beyond the square, and mean what
/// Python's slices mean: short sequences have windows that do not fit.
class Blocks {
 public:
  Blocks(int64_t* data, int64_t side) : data_(data), side_(side) {}

  int64_t side() const { return side_; }

  void set(int64_t row_begin, int64_t row_end, int64_t column_begin, int64_t column_end) {
    const auto [first_row, last_row] = clipped(row_begin, row_end);
    const auto [first_column, last_column] = clipped(column_begin, column_end);
    for (int64_t row = first_row; row < last_row; ++row) {
      for (int64_t column = first_column; column < last_column; ++column) data_[row * side_ + column] = 1;
    }
  }
  void set_rows(int64_t begin, int64_t end) { set(begin, end, 0, side_); }
  void set_columns(int64_t begin, int64_t end, int64_t first_row) { set(first_row, side_, begin, end); }

  void drop_future() {
    for (int64_t row = 0; row < side_; ++row) std::fill(data_ + row * side_ + row + 1, data_ + (row + 1) * side_, 0);
  }

 private:
  std::pair<int64_t, int64_t> clipped(int64_t begin, int64_t end) const {
    const auto clip = [&](int64_t at) { return std::clamp<int64_t>(at < 0 ? at + side_ : at, 0, side_); };
    return {clip(begin), clip(end)};
  }

  int64_t* data_;
  int64_t side_;
};

bool one_way(const SparsityConfig& config) { return config.attention == AttentionDirection::unidirectional; }

/// A window in which all attend to all or, one way, to what is not after them.
void set_window(Blocks& blocks, int64_t begin, int64_t end, bool one_way) {
  if (!one_way) return blocks.set(begin, end, begin, end);
  for (int64_t row = begin; row < end; ++row) blocks.set(row, row + 1, begin, row + 1);
}

void set_sliding_window(Blocks& blocks, const SparsityConfig& config, bool one_way) {
  TORCH_CHECK_VALUE(blocks.side() >= config.num_sliding_window_blocks, "num_sliding_window_blocks is ",
                    config.num_sliding_window_blocks, ", but the sequence has only ", blocks.side(), " blocks");
  const int64_t half = config.num_sliding_window_blocks / 2;
  for (int64_t row = 0; row < blocks.side(); ++row) {
    blocks.set(row, row + 1, std::max<int64_t>(0, row - half), row + 1 + (one_way ? 0 : half));
  }
}

/// `among_past`: a row draws from the blocks that are not after it.
void set_random(Blocks& blocks, const SparsityConfig& config, bool among_past, const RandomSample& sample) {
  const int64_t count = config.num_random_blocks;
  TORCH_CHECK_VALUE(blocks.side() >= count, "num_random_blocks is ", count, ", but the sequence has only ",
                    blocks.side(), " blocks");
  for (int64_t row = 0; row < blocks.side(); ++row) {
    const int64_t population = among_past ? row + 1 : blocks.side();
    TORCH_CHECK_VALUE(population >= count, "num_random_blocks is ", count, ", but row ", row, " of a unidirectional ",
                      "layout has only ", population, " blocks to draw from; draw at most 1");
    for (const int64_t column : sample(population, count)) blocks.set(row, row + 1, column, column + 1);
  }
}

/// Begin and end of each global range: without given ends, single blocks. Leaves out those beyond the sequence.
std::vector<std::pair<int64_t, int64_t>> global_ranges(const SparsityConfig& config, int64_t side) {
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (size_t i = 0; i < config.global_block_indices.size(); ++i) {
    int64_t begin = config.global_block_indices[i];
    if (begin >= side) continue;
    if (config.global_block_end_indices) {
      ranges.emplace_back(begin, std::min((*config.global_block_end_indices)[i], side));
      continue;
    }
    TORCH_CHECK_VALUE(begin >= -side, "global_block_indices has ", begin, ", but the sequence has only ", side,
                      " blocks");
    if (begin < 0) begin += side;
    ranges.emplace_back(begin, begin + 1);
  }
  return ranges;
}

/// The blocks of a local window that stand for it are the last of it, or for other heads those before.
void set_fixed(Blocks& blocks, const SparsityConfig& config, int64_t head) {
  const int64_t local = config.num_local_blocks, global = config.num_global_blocks, side = blocks.side();
  for (int64_t begin = 0; begin < side; begin += local) {
    set_window(blocks, begin, std::min(begin + local, side), one_way(config));
  }
  const auto set_global = [&](int64_t begin) {
    blocks.set_columns(begin, begin + global, one_way(config) ? begin : 0);
    if (config.horizontal_global_attention) blocks.set_rows(begin, begin + global);
  };
  const int64_t first = local - (1 + head % config.num_different_global_patterns) * global;
  const int64_t end = side - side % local;
  for (int64_t begin = first; begin < end; begin += local) set_global(begin);
  if (end < side) set_global(std::min(end + first, side - global));
}

void set_variable(Blocks& blocks, const SparsityConfig& config, const RandomSample& sample) {
  const int64_t side = blocks.side();
  set_random(blocks, config, /*among_past=*/false, sample);
  int64_t begin = 0;
  for (size_t i = 0; begin < side; ++i) {  // the last size goes on to the sequence's end
    const auto& sizes = config.local_window_blocks;
    const int64_t size = sizes[std::min(i, sizes.size() - 1)];
    set_window(blocks, begin, std::min(begin + size, side), one_way(config));
    begin += size;
  }
  for (const auto& [first, last] : global_ranges(config, side)) {
    if (config.horizontal_global_attention) blocks.set_rows(first, last);
    blocks.set_columns(first, last, one_way(config) ? first : 0);
  }
}

void set_bigbird(Blocks& blocks, const SparsityConfig& config, const RandomSample& sample) {
  set_random(blocks, config, one_way(config), sample);
  set_sliding_window(blocks, config, /*one_way=*/false);
  const int64_t global = config.num_global_blocks;
  TORCH_CHECK_VALUE(blocks.side() >= global, "num_global_blocks is ", global, ", but the sequence has only ",
                    blocks.side(), " blocks");
  blocks.set_rows(0, global);
  blocks.set_columns(0, global, 0);
  if (one_way(config)) blocks.drop_future();
}

void set_longformer(Blocks& blocks, const SparsityConfig& config) {
  set_sliding_window(blocks, config, /*one_way=*/false);
  for (const auto& [begin, end] : global_ranges(config, blocks.side())) {
    blocks.set_rows(begin, end);
    blocks.set_columns(begin, end, 0);
  }
  if (one_way(config)) blocks.drop_future();
}

void check_fixed(const SparsityConfig& config) {
  const int64_t local = config.num_local_blocks, global = config.num_global_blocks;
  TORCH_CHECK_VALUE(local >= 1 && global >= 1 && local % global == 0, "num_local_blocks is ", local,
                    ", expected a multiple of num_global_blocks, ", global);
  const int64_t patterns = config.num_different_global_patterns;
  TORCH_CHECK_VALUE(patterns == 1 || config.different_layout_per_head, "num_different_global_patterns is ", patterns,
                    ", which needs different_layout_per_head");
  TORCH_CHECK_VALUE(patterns >= 1 && patterns <= local / global, "num_different_global_patterns is ", patterns,
                    ", expected 1 to ", local / global, ", the windows' blocks by the global ones");
}

RandomSample seeded_sample() {
  return [generator = std::mt19937_64(0)](int64_t population, int64_t count) mutable {
    std::vector<int64_t> all(static_cast<size_t>(population)), chosen;
    std::iota(all.begin(), all.end(), 0);
    std::sample(all.begin(), all.end(), std::back_inserter(chosen), count, generator);
    return chosen;
  };
}

void set(Blocks& blocks, const SparsityConfig& config, int64_t head, const RandomSample& sample) {
  switch (config.mode) {
    case SparsityMode::dense:
      return blocks.set_rows(0, blocks.side());
    case SparsityMode::fixed:
      return set_fixed(blocks, config, head);
    case SparsityMode::variable:
      return set_variable(blocks, config, sample);
    case SparsityMode::bigbird:
      return set_bigbird(blocks, config, sample);
    case SparsityMode::bslongformer:
      return set_longformer(blocks, config);
    case SparsityMode::local_sliding_window:
      return set_sliding_window(blocks, config, one_way(config));
  }
}

}  // namespace

void check_sparsity(const SparsityConfig& config) {
  const bool has_horizontal = config.mode == SparsityMode::fixed || config.mode == SparsityMode::variable;
  TORCH_CHECK_VALUE(!(has_horizontal && config.horizontal_global_attention && one_way(config)),
                    "horizontal_global_attention needs attention \"bidirectional\"");
  if (config.mode == SparsityMode::fixed) check_fixed(config);
  if (config.mode == SparsityMode::variable) {
    const auto& sizes = config.local_window_blocks;
    TORCH_CHECK_VALUE(!sizes.empty() && std::all_of(sizes.begin(), sizes.end(), [](int64_t size) { return size > 0; }),
                      "local_window_blocks needs at least one size, all above 0");
  }
  const bool has_ranges = config.mode == SparsityMode::variable || config.mode == SparsityMode::bslongformer;
  if (!has_ranges || !config.global_block_end_indices) return;
  const auto &begins = config.global_block_indices, &ends = *config.global_block_end_indices;
  TORCH_CHECK_VALUE(begins.size() == ends.size(), "global_block_indices has ", begins.size(),
                    " entries, expected as many as global_block_end_indices, ", ends.size());
  for (size_t i = 0; i < ends.size(); ++i) {
    TORCH_CHECK_VALUE(begins[i] < ends[i], "a global range goes from block ", begins[i], " to ", ends[i],
                      ", expected its end after its begin");
  }
}

at::Tensor sparse_layout(const SparsityConfig& config, int64_t num_heads, int64_t sequence_length,
                         const RandomSample& sample) {
  check_sparsity(config);
  TORCH_CHECK_VALUE(num_heads >= 1, "num_heads is ", num_heads, ", expected at least 1");
  TORCH_CHECK_VALUE(config.block >= 1 && sequence_length >= 0 && sequence_length % config.block == 0,
                    "the sequence's length is ", sequence_length, ", expected a multiple of the block, ", config.block,
                    "; pad it, as SparseAttentionUtils.pad_to_block_size does");
  const int64_t side = sequence_length / config.block;
  at::Tensor layout = at::zeros({num_heads, side, side}, at::kLong);
  const RandomSample& draw = sample ? sample : seeded_sample();
  const bool per_head = config.different_layout_per_head && config.mode != SparsityMode::local_sliding_window;
  for (int64_t head = 0; head < (per_head ? num_heads : 1); ++head) {
    Blocks blocks(layout.data_ptr<int64_t>() + head * side * side, side);
    set(blocks, config, head, draw);
  }
  if (!per_head && num_heads > 1) layout.narrow(0, 1, num_heads - 1).copy_(layout.narrow(0, 0, 1));
  return layout;
}

}  // namespace deeptide::ops
