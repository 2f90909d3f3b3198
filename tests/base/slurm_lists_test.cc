// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// SLURM's lists of nodes and of tasks.
#include "base/slurm_lists.h"

#include <gtest/gtest.h>

#include "deeptide/errors.h"

namespace deeptide {
namespace {

TEST(NodeList, GivesItsFirstHost) {
  EXPECT_EQ(first_of_node_list(""), "");
  EXPECT_EQ(first_of_node_list("n1"), "n1");
  EXPECT_EQ(first_of_node_list("n1,n[2-3]"), "n1");
  EXPECT_EQ(first_of_node_list("n1,n2"), "n1");
  EXPECT_EQ(first_of_node_list("node[01-04,07]"), "node01");
  EXPECT_EQ(first_of_node_list("node[3]"), "node3");
  EXPECT_EQ(first_of_node_list("n[3,5]-ib"), "n3-ib");
  EXPECT_EQ(first_of_node_list("rack[2-3]n[08-11,20]"), "rack2n08");
  EXPECT_EQ(first_of_node_list("a-b.c,d[1-2]"), "a-b.c");
  EXPECT_THROW(first_of_node_list("n[1-"), ConfigError);
  EXPECT_THROW(first_of_node_list("n[]"), ConfigError);
}

TEST(TaskCounts, AreThoseOfANode) {
  EXPECT_EQ(tasks_of_node("4", 0), 4);
  EXPECT_EQ(tasks_of_node("2(x3),1", 0), 2);
  EXPECT_EQ(tasks_of_node("2(x3),1", 2), 2);
  EXPECT_EQ(tasks_of_node("2(x3),1", 3), 1);
  EXPECT_EQ(tasks_of_node("2(x3),1", 4), 0);
  EXPECT_EQ(tasks_of_node("", 0), 0);
}

}  // namespace
}  // namespace deeptide
