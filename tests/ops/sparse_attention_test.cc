// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Block-sparse attention beside dense attention whose scores are masked, and how a layout is cut into work.
#include "deeptide/sparse_attention.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

#include "ops/attention/spans.h"

namespace deeptide::ops {
namespace {

using at::Tensor;

SparsityConfig config_of(SparsityMode mode, AttentionDirection attention = AttentionDirection::bidirectional) {
  SparsityConfig config;
  config.mode = mode;
  config.block = 4;
  config.attention = attention;
  return config;
}

/// All scores in fp64, those of blocks that do not attend masked.
Tensor dense(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& layout, int64_t block) {
  const Tensor scores = torch::matmul(query, key.transpose(2, 3)) / std::sqrt(static_cast<double>(query.size(3)));
  const Tensor attends = layout.repeat_interleave(block, 1).repeat_interleave(block, 2).to(torch::kBool);
  const Tensor soft =
      torch::softmax(scores.masked_fill(attends.logical_not(), -std::numeric_limits<double>::infinity()), -1);
  return torch::matmul(torch::nan_to_num(soft, 0.0), value);
}

TEST(SparseAttention, EqualsDenseAttentionOverTheBlocksThatAttend) {
  for (const auto mode : {SparsityMode::dense, SparsityMode::fixed, SparsityMode::variable, SparsityMode::bigbird,
                          SparsityMode::bslongformer, SparsityMode::local_sliding_window}) {
    SparsityConfig config = config_of(mode, AttentionDirection::unidirectional);
    config.num_random_blocks = 1;
    config.different_layout_per_head = true;
    config.num_different_global_patterns = 2;
    const Tensor layout = sparse_layout(config, 3, 28);
    torch::manual_seed(static_cast<uint64_t>(mode));
    std::vector<Tensor> mine, exact;
    for (int i = 0; i < 3; ++i) {
      exact.push_back(torch::randn({2, 3, 28, 5}, torch::kDouble).requires_grad_());
      mine.push_back(exact.back().detach().clone().requires_grad_());
    }
    const Tensor got = sparse_attention(mine[0], mine[1], mine[2], layout, config.block);
    const Tensor expected = dense(exact[0], exact[1], exact[2], layout, config.block);
    EXPECT_TRUE(torch::allclose(got, expected, 1e-12, 1e-12)) << static_cast<int>(mode);
    const Tensor weight = torch::randn_like(expected);
    (got * weight).sum().backward();
    (expected * weight).sum().backward();
    for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(torch::allclose(mine[i].grad(), exact[i].grad(), 1e-11, 1e-12)) << i;
  }
}

TEST(SparseAttention, GivesZerosWhereAllIsMasked) {
  const Tensor layout = sparse_layout(config_of(SparsityMode::dense), 1, 8);
  const Tensor all = torch::randn({1, 1, 8, 3}).requires_grad_();
  const Tensor mask = torch::zeros({1, 8});
  const Tensor got = sparse_attention(all, all, all, layout, 4,
                                      {.key_padding_mask_NS = mask, .key_padding_mask_mode = MaskMode::multiply});
  got.sum().backward();
  EXPECT_TRUE(torch::equal(got, torch::zeros_like(got)));
  EXPECT_TRUE(torch::equal(all.grad(), torch::zeros_like(all)));
}

TEST(SparseAttention, LetsANumberThatIsNoneThrough) {
  const Tensor layout = sparse_layout(config_of(SparsityMode::dense), 1, 8);
  Tensor query = torch::randn({1, 1, 8, 3});
  query[0][0][2][0] = std::numeric_limits<float>::quiet_NaN();
  const Tensor got = sparse_attention(query, torch::randn_like(query), torch::randn_like(query), layout, 4,
                                      {.key_padding_mask_NS = torch::zeros({1, 8})});
  EXPECT_TRUE(got[0][0][2].isnan().all().item<bool>());
  EXPECT_FALSE(got[0][0][3].isnan().any().item<bool>());
}

TEST(SparseAttention, RefusesWhatDoesNotFit) {
  const Tensor x = torch::randn({1, 2, 8, 3}), layout = sparse_layout(config_of(SparsityMode::dense), 2, 8);
  const auto refuses = [&](const Tensor& query, const Tensor& key, const Tensor& blocks, int64_t block,
                           const SparseAttentionOptions& options = {}) {
    EXPECT_THROW(sparse_attention(query, key, key, blocks, block, options), c10::ValueError);
  };
  refuses(x, torch::randn({1, 2, 8, 4}), layout, 4);
  refuses(x, x.to(torch::kBFloat16), layout, 4);
  refuses(x, x, layout, 3);
  refuses(x, x, layout.narrow(0, 0, 1), 4);
  refuses(x, x, layout, 4, {.key_padding_mask_NS = torch::zeros({1, 7})});
  refuses(x, x, layout, 4, {.attention_mask_SS = torch::zeros({1, 8, 8})});
  refuses(x, x, layout, 4, {.relative_position = torch::zeros({3, 8, 8})});
}

TEST(SparseLayout, RefusesSettingsThatExcludeEachOther) {
  const auto refuses = [](const SparsityConfig& config) { EXPECT_THROW(check_sparsity(config), c10::ValueError); };
  SparsityConfig config = config_of(SparsityMode::fixed);
  config.num_global_blocks = 3;
  refuses(config);
  config = config_of(SparsityMode::fixed);
  config.num_different_global_patterns = 2;
  refuses(config);
  config.different_layout_per_head = true;
  config.num_different_global_patterns = 5;
  refuses(config);
  config = config_of(SparsityMode::fixed, AttentionDirection::unidirectional);
  config.horizontal_global_attention = true;
  refuses(config);
  config = config_of(SparsityMode::bslongformer);
  config.global_block_end_indices = std::vector<int64_t>{0};
  refuses(config);
  config.global_block_end_indices = std::vector<int64_t>{1, 2};
  refuses(config);
}

TEST(SparseLayout, DrawsTheSameRandomBlocksAgain) {
  SparsityConfig config = config_of(SparsityMode::bigbird);
  config.num_random_blocks = 2;
  EXPECT_TRUE(torch::equal(sparse_layout(config, 2, 64), sparse_layout(config, 2, 64)));
}

TEST(Spans, JoinRowsThatAttendAlikeUpToALimit) {
  const Tensor layout = sparse_layout(config_of(SparsityMode::dense), 2, 16);
  const auto rows_of = [&](int64_t most) {
    const auto groups = head_groups(layout, 4, /*causal=*/false, most);
    EXPECT_EQ(groups.size(), 1);
    EXPECT_EQ(groups[0].heads, (std::vector<int64_t>{0, 1}));
    std::vector<int64_t> rows;
    for (const Span& span : groups[0].spans) rows.push_back(span.rows.count);
    return rows;
  };
  EXPECT_EQ(rows_of(1000), (std::vector<int64_t>{16}));
  EXPECT_EQ(rows_of(8 * 16), (std::vector<int64_t>{8, 8}));
  EXPECT_EQ(rows_of(1), (std::vector<int64_t>{4, 4, 4, 4}));
}

TEST(Spans, HoldColumnsAsRangesThatDoNotTouch) {
  const Tensor layout = torch::tensor({{{1, 1, 0, 1}, {0, 0, 0, 0}, {0, 1, 1, 1}, {0, 0, 1, 0}}}, torch::kLong);
  const auto spans = head_groups(layout, 2, /*causal=*/false, 1000)[0].spans;
  ASSERT_EQ(spans.size(), 3);
  EXPECT_EQ(spans[0].columns, (std::vector<Range>{{0, 4}, {6, 2}}));
  EXPECT_EQ(spans[1].rows, (Range{4, 2}));
  EXPECT_EQ(spans[1].num_columns(), 6);
  const auto causal = head_groups(layout, 2, /*causal=*/true, 1000)[0].spans;
  EXPECT_EQ(causal[0].columns, (std::vector<Range>{{0, 2}}));
  EXPECT_EQ(causal[1].columns, (std::vector<Range>{{2, 4}}));
}

}  // namespace
}  // namespace deeptide::ops
