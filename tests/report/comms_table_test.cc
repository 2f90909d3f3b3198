// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The formulas of bandwidth, the columns, and which kinds are counted.
#include "report/comms_table.h"

#include <gtest/gtest.h>

namespace deeptide::report {
namespace {

trace::SpanRecord collective(const char* name, int64_t bytes, int64_t ns, int ranks = 2) {
  return {.work = trace::Work::collective,
          .name = name,
          .channel = "gathers",
          .begin_ns = 0,
          .end_ns = ns,
          .bytes = bytes,
          .ranks = ranks};
}

TEST(CommsTable, GivesAlgorithmAndBusBandwidth) {
  CommsTable table({.enabled = true, .prof_all = true});
  for (int i = 0; i < 20; ++i) table.end(collective("all-gather", 1'000'000, i == 0 ? 900'000'000 : 1'000'000, 4));
  table.end(collective("all-to-all", 1'000'000, 1'000'000, 2));  // of another team
  const auto lines = table.lines();
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0].operation, "all_gather");
  EXPECT_EQ(lines[0].count, 20);
  EXPECT_NEAR(lines[0].mean_ms, 1.0, 1e-6);  // the slowest tenth is left out
  EXPECT_NEAR(lines[0].total_ms, 919.0, 1e-3);
  EXPECT_NEAR(lines[0].algorithm_gbps, 8.0, 1e-6);  // 1 MB in 1 ms
  EXPECT_NEAR(lines[0].bus_gbps, 6.0, 1e-6);        // times 3 / 4
  EXPECT_NEAR(lines[1].bus_gbps, 4.0, 1e-6);        // times 1 / 2
}

TEST(CommsTable, SortsByKindAndSizeUnderDeepSpeedsColumns) {
  CommsTable table({.enabled = true, .prof_all = true});
  EXPECT_EQ(table.text(), "");
  table.end(collective("all-to-all", 2048, 1000));
  table.end(collective("all-gather", 1024, 1000));
  const std::string text = table.text();
  EXPECT_NE(text.find("Comm. Op"), std::string::npos);
  EXPECT_NE(text.find("busbw_avg (Gbps)"), std::string::npos);
  EXPECT_LT(text.find("all_gather"), text.find("all_to_all")) << text;
  EXPECT_NE(text.find("1.0 KiB"), std::string::npos) << text;
}

TEST(CommsTable, CountsOnlyTheKindsAskedFor) {
  CommsTable table({.enabled = true, .prof_all = false, .prof_ops = {"all_to_all"}});
  table.end(collective("all-to-all", 8, 10));
  table.end(collective("all-gather", 8, 10));
  ASSERT_EQ(table.lines().size(), 1u);
  EXPECT_EQ(table.lines()[0].operation, "all_to_all");
}

}  // namespace
}  // namespace deeptide::report
