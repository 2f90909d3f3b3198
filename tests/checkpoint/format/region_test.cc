// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Regions against a slow oracle that enumerates their elements.
#include "checkpoint/format/region.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "checkpoint/random_regions.h"

namespace deeptide::checkpoint {
namespace {

const std::vector<Shape> kShapes = {{}, {1}, {7}, {4, 5}, {1, 6}, {6, 1}, {3, 0, 2}, {0}, {2, 3, 4}, {3, 1, 2, 5}};

TEST(Region, KnowsWhetherItFits) {
  const Shape shape = {4, 6};
  for (const Region& region : {Region::range(0, 24), Region::range(24, 24), Region::range(5, 9), Region{},
                               Region{{0, 0}, {4, 6}}, Region{{3, 5}, {1, 1}}, Region{{4, 0}, {0, 6}}}) {
    EXPECT_TRUE(fits(region, shape)) << region.text();
  }
  for (const Region& region :
       {Region::range(0, 25), Region::range(-1, 4), Region::range(9, 5), Region{{0, 0}, {5, 6}}, Region{{0, 1}, {4, 6}},
        Region{{0, 0}, {4, -1}}, Region{{0, -1}, {4, 2}}, Region{{0, 0, 0}, {4, 6, 1}}, Region{{0}, {4, 6}},
        Region{{}, {}}, Region{{INT64_MAX, 0}, {1, 1}}, Region{{0, 0}, {INT64_MAX, 1}}}) {
    EXPECT_FALSE(fits(region, shape)) << region.text();
  }
  EXPECT_TRUE(fits(Region{{}, {}}, {}));
  EXPECT_TRUE(fits(Region::range(0, 1), {}));
}

TEST(Region, SaysWhichElementsItHas) {
  EXPECT_EQ(Region::range(2, 5).text(), "[2, 5)");
  EXPECT_EQ((Region{{0, 2}, {4, 4}}.text()), "[0:4, 2:6]");
}

TEST(Region, ACutAlongColumnsIsOneRunPerRow) {
  const Shape shape = {4, 6};
  const Runs columns(shape, {{0, 2}, {4, 3}});
  EXPECT_EQ(columns.count(), 4);
  EXPECT_EQ(columns.length(), 3);
  EXPECT_EQ(columns.begin(3), 20);
  EXPECT_EQ(columns.end(), 23);
  const Runs rows(shape, {{1, 0}, {2, 6}});
  EXPECT_EQ(rows.count(), 1);
  EXPECT_EQ(rows.length(), 12);
  EXPECT_EQ(rows.begin(0), 6);
}

TEST(Region, RunsAreItsElementsInOrder) {
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    const Shape& shape = kShapes[draw(random, std::ssize(kShapes))];
    const Region region = random_region(random, shape);
    ASSERT_TRUE(fits(region, shape));
    const Runs runs(shape, region);
    std::vector<int64_t> elements;
    for (int64_t i = 0; i < runs.count(); ++i) {
      for (int64_t k = 0; k < runs.length(); ++k) elements.push_back(runs.begin(i) + k);
    }
    EXPECT_EQ(elements, elements_of(shape, region)) << region.text();
    EXPECT_EQ(region.numel(), std::ssize(elements));
    EXPECT_EQ(runs.end(), elements.empty() ? 0 : elements.back() + 1);
  }
}

TEST(Region, SharesWithAnotherExactlyTheCommonElements) {
  std::mt19937 random(2);
  for (int round = 0; round < 5000; ++round) {
    const Shape& shape = kShapes[draw(random, std::ssize(kShapes))];
    const Region a = random_region(random, shape), b = random_region(random, shape);
    const auto of_a = elements_of(shape, a), of_b = elements_of(shape, b);
    std::vector<int64_t> common;
    std::set_intersection(of_a.begin(), of_a.end(), of_b.begin(), of_b.end(), std::back_inserter(common));
    const std::string what = a.text() + " and " + b.text();
    EXPECT_EQ(num_shared(shape, a, b), std::ssize(common)) << what;
    EXPECT_EQ(first_shared(shape, a, b), common.empty() ? -1 : common[0]) << what;
    EXPECT_EQ(contains(shape, a, b), common == of_b) << what;
    if (a.sizes.size() == b.sizes.size()) {
      const auto shared = intersect(a, b);
      EXPECT_EQ(shared.has_value(), !common.empty()) << what;
      if (shared) {
        EXPECT_EQ(elements_of(shape, *shared), common) << what;
      }
    }
    std::vector<int64_t> visited;
    SharedRun last{-1, -1, 0};
    for_each_shared_run(shape, a, b, [&](const SharedRun& run) {
      EXPECT_FALSE(run.a == last.a + last.count && run.b == last.b + last.count) << what << ": two runs, not one";
      for (int64_t i = 0; i < run.count; ++i) {
        EXPECT_EQ(of_a.at(run.a + i), of_b.at(run.b + i)) << what;
        visited.push_back(of_a.at(run.a + i));
      }
      last = run;
    });
    EXPECT_EQ(visited, common) << what;
    if (HasFailure()) FAIL() << "round " << round;
  }
}

TEST(Region, CutsARangeIntoFewBoxes) {
  for (const Shape& shape : kShapes) {
    if (shape.empty()) continue;
    const int64_t numel = Region{Shape(shape.size(), 0), shape}.numel();
    for (int64_t begin = 0; begin <= numel; ++begin) {
      for (int64_t end = begin; end <= numel; ++end) {
        std::vector<int64_t> held, expected;
        const auto boxes = boxes_of(shape, begin, end);
        for (const Region& box : boxes) {
          ASSERT_TRUE(fits(box, shape)) << box.text();
          for (int64_t element : elements_of(shape, box)) held.push_back(element);
        }
        for (int64_t element = begin; element < end; ++element) expected.push_back(element);
        ASSERT_EQ(held, expected) << begin << " " << end;
        ASSERT_LE(boxes.size(), 2 * shape.size() - 1) << begin << " " << end;
      }
    }
  }
}

TEST(Region, FindsTheFirstElementsThatNoOtherHolds) {
  std::mt19937 random(3);
  int covered = 0;
  for (int round = 0; round < 3000; ++round) {
    const Shape& shape = kShapes[draw(random, std::ssize(kShapes))];
    const Region wanted = random_region(random, shape);
    std::vector<Region> regions;
    std::set<int64_t> held;
    for (int64_t i = draw(random, 6); i > 0; --i) {
      regions.push_back(random_region(random, shape));
      for (int64_t element : elements_of(shape, regions.back())) held.insert(element);
    }
    std::vector<int64_t> missing;
    for (int64_t element : elements_of(shape, wanted)) {
      if (held.count(element) == 0) missing.push_back(element);
    }
    const auto found = first_uncovered(shape, wanted, regions);
    ASSERT_EQ(found.has_value(), !missing.empty()) << wanted.text();
    covered += found ? 0 : 1;
    if (!found) continue;
    const auto elements = elements_of(shape, *found);
    ASSERT_FALSE(elements.empty());
    ASSERT_LE(elements.size(), missing.size());
    EXPECT_TRUE(std::equal(elements.begin(), elements.end(), missing.begin())) << wanted.text() << found->text();
  }
  EXPECT_GT(covered, 100);
}

}  // namespace
}  // namespace deeptide::checkpoint
