// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Roles and mesh coordinates: equality, texts, and invalid ones.
#include "checkpoint/format/role.h"

#include "checkpoint/scratch.h"

namespace deeptide::checkpoint {
namespace {

TEST(Role, HasATextOfItsOwn) {
  EXPECT_EQ(Role::master().text(), "master");
  EXPECT_EQ(Role::param().text(), "param");
  EXPECT_EQ(Role::moment("exp_avg").text(), "exp_avg");
  EXPECT_EQ(Role::buffer().text(), "buffer");
  EXPECT_EQ(Role::buffer(Coordinates({{"data", 3}, {"tensor", 1}})).text(), "buffer.data=3,tensor=1");
}

TEST(Role, SaysWhatItIs) {
  EXPECT_TRUE(Role::master().is_weight() && Role::param().is_weight());
  EXPECT_FALSE(Role::moment("m").is_weight() || Role::buffer().is_weight());
  EXPECT_TRUE(Role::moment("m").is_moment() && !Role::master().is_moment());
  EXPECT_TRUE(Role::buffer().is_buffer() && !Role::param().is_buffer());
  EXPECT_FALSE(Role::moment("m") == Role::moment("n"));
  EXPECT_FALSE(Role::buffer() == Role::buffer(on_data_axis(1)));
}

TEST(Role, RefusesMomentsWhoseKeysWouldBeOthers) {
  for (const char* name : {"", "a/b", "a@b", "master", "param", "buffer", "buffer.data=1"}) {
    EXPECT_TRUE(contains(error_of([&] { Role::moment(name); }), "cannot name an optimizer moment")) << name;
  }
}

TEST(Coordinates, LeaveOutAxesAtZero) {
  EXPECT_EQ(Coordinates({{"data", 0}, {"tensor", 0}}), Coordinates());
  EXPECT_EQ(Coordinates({{"data", 2}, {"tensor", 0}}), on_data_axis(2));
  EXPECT_EQ(Coordinates().text(), "origin");
  EXPECT_FALSE(on_data_axis(1) == Coordinates({{"tensor", 1}}));
}

TEST(Coordinates, RefuseWhatIsNone) {
  EXPECT_TRUE(contains(error_of([] { Coordinates({{"data", -1}}); }), "'data=-1' is not a mesh coordinate"));
  EXPECT_TRUE(contains(error_of([] { Coordinates({{"", 1}}); }), "is not a mesh coordinate"));
  EXPECT_TRUE(contains(error_of([] { Coordinates({{"a/b", 1}}); }), "is not a mesh coordinate"));
}

}  // namespace
}  // namespace deeptide::checkpoint
