// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Checks every key of the table, by one generated check a key.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "config/check/check_value.h"
#include "config/table_cases.h"
#include "deeptide/config.h"

namespace deeptide::config {
namespace {

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// The type itself, alone beside "params", has its own meaning of every value.
bool is_type(const TableCase& c) { return c.path() == "optimizer.type" || c.path() == "scheduler.type"; }

bool refused(Status status) { return status == Status::later; }

// The value that switches one of its sections.
bool is_switch(const TableCase& c) {
  std::string path = c.key->name;
  for (auto section = c.sections.rbegin(); section != c.sections.rend(); ++section) {
    if ((*section)->switch_path == path) return true;
    path = (*section)->name + "." + path;
  }
  return false;
}

bool is_planned(const Key& section) {
  return section.status == Status::later && (!section.switch_path.empty() || section.on_when_present);
}

// Below a section that is not supported yet, and off in a plain text, anything may stand; its own switch is checked.
bool may_hold_anything(const TableCase& c) {
  for (size_t i = 0; i < c.sections.size(); ++i) {
    if (!is_planned(*c.sections[i])) continue;
    std::string path;
    for (size_t k = i + 1; k < c.sections.size(); ++k) path += c.sections[k]->name + ".";
    return path + c.key->name != c.sections[i]->switch_path;
  }
  return false;
}

// A section that is on when present is refused whatever it holds.
bool below_a_refused_presence(const TableCase& c) {
  return std::any_of(c.sections.begin(), c.sections.end(),
                     [](const Key* section) { return section->on_when_present && refused(section->status); });
}

bool inside_later_variant(const TableCase& c) { return c.variant && c.variant->later; }

TEST(Table, HasEveryKeyOnce) {
  std::set<std::string> seen;
  for (const TableCase& c : all_leaves()) {
    const std::string type = c.variant ? c.variant->types.front() : "";
    EXPECT_TRUE(seen.insert(type + " " + c.path()).second) << c.path();
    EXPECT_FALSE(c.key->doc.empty()) << c.path();
    EXPECT_TRUE(c.key->status != Status::never || !c.key->reason.empty()) << c.path() << ": why has it no effect?";
  }
  EXPECT_GT(seen.size(), 400u);
}

TEST(Table, AcceptsTheDefaultOfEveryKey) {
  for (const TableCase& c : all_leaves()) {
    if (c.key->must_be_given || inside_later_variant(c) || below_a_refused_presence(c)) continue;
    EXPECT_EQ(error_of(c.text(to_text(c.key->fallback))), "") << c.text(to_text(c.key->fallback));
    EXPECT_TRUE(c.key->fallback.is(JsonKind::null) || type_problem(*c.key, c.key->fallback).empty()) << c.path();
  }
}

TEST(Table, RefusesNullWhereThereIsADefault) {
  for (const TableCase& c : all_leaves()) {
    if (c.key->fallback.is(JsonKind::null) || c.key->nullable || may_hold_anything(c)) continue;
    EXPECT_TRUE(has(error_of(c.text("null")), "ds_config.json:3: " + c.path() + ": expected ")) << c.path();
  }
}

TEST(Table, RefusesWrongTypesAndRangesOfEveryKeyWithItsLine) {
  for (const TableCase& c : all_leaves()) {
    if (may_hold_anything(c)) continue;
    for (const std::string& value : wrong_values(*c.key)) {
      const std::string error = error_of(c.text(value));
      EXPECT_TRUE(has(error, "ds_config.json:3: " + c.path() + ": expected ")) << error << "\n" << c.text(value);
    }
  }
  for (const TableCase& c : all_sections()) {
    if (may_hold_anything(c)) continue;
    for (const std::string& value : wrong_values(*c.key)) {
      const std::string error = error_of(c.text(value));
      EXPECT_TRUE(has(error, ":3: " + c.path() + ": expected an object")) << error;
    }
  }
}

TEST(Table, AcceptsAutoForEveryKeyAndTellsWhatItBecame) {
  for (const TableCase& c : all_leaves()) {
    if (inside_later_variant(c) || below_a_refused_presence(c)) continue;
    const std::string text = c.text("\"auto\"");
    if (c.key->must_be_given) {
      EXPECT_TRUE(has(error_of(text), c.path() + ": \"auto\" cannot be derived here")) << text;
      continue;
    }
    ASSERT_EQ(error_of(text), "") << text;
    const auto decisions = Config::from_text(text).decisions();
    const auto told = std::count_if(decisions.begin(), decisions.end(), [&](const std::string& line) {
      return line.rfind(c.path() + ": \"auto\" became ", 0) == 0;
    });
    EXPECT_EQ(told, 1) << text;
  }
}

TEST(Table, AcceptsAnotherValueOfEveryKeyThatIsHonoured) {
  for (const TableCase& c : all_leaves()) {
    if (refused(c.key->status) || inside_later_variant(c) || is_type(c)) continue;
    if (depends_on_another(*c.key) || !c.key->later_choices.empty()) continue;
    const std::string value = other_value(*c.key);
    // One word has no other than its default.
    if (value.empty() && c.key->choices.size() == 1) continue;
    ASSERT_NE(value, "") << c.path();
    EXPECT_EQ(error_of(c.text(value)), "") << c.text(value);
  }
}

TEST(Table, RefusesEveryKeyThatCannotBeHadWithItsReason) {
  int checked = 0;
  for (const TableCase& c : all_leaves()) {
    if (!refused(c.key->status)) continue;
    const std::string value = other_value(*c.key);
    if (c.key->kind == Kind::anything) continue;
    // One word has no other than its default.
    if (value.empty()) {
      EXPECT_EQ(c.key->choices.size(), 1u) << c.path();
      continue;
    }
    const std::string error = error_of(c.text(value, true));
    EXPECT_TRUE(has(error, "is not supported yet")) << c.text(value, true);
    const bool alone = c.sections.empty();
    if (alone) {
      EXPECT_TRUE(has(error, "ds_config.json:3: " + c.path() + ": ")) << error;
      EXPECT_TRUE(has(error, c.key->reason)) << error;
    }
    ++checked;
  }
  EXPECT_GT(checked, 80);
}

TEST(Table, AcceptsEveryKeyWithoutEffectAndTellsItsName) {
  int checked = 0;
  for (const TableCase& c : all_leaves()) {
    const std::string value = other_value(*c.key);
    if (c.key->status != Status::never || may_hold_anything(c) || inside_later_variant(c) || value.empty()) continue;
    const std::string text = c.text(value, true);
    ASSERT_EQ(error_of(text), "") << text;
    // A section without effect stands for all of its keys.
    std::string told, path;
    for (const Key* section : c.sections) {
      path += (path.empty() ? "" : ".") + section->name;
      if (told.empty() && section->status == Status::never) told = path;
    }
    if (told.empty()) told = c.path();
    const auto decisions = Config::from_text(text).decisions();
    EXPECT_EQ(std::count(decisions.begin(), decisions.end(),
                         "no effect here: " + told + " (docs/config.md gives the reasons)"),
              1)
        << text;
    ++checked;
  }
  EXPECT_GT(checked, 50);
}

TEST(Table, SaysNothingOfKeysWithoutEffectThatAskForNothing) {
  for (const TableCase& c : all_leaves()) {
    if (c.key->status != Status::never || may_hold_anything(c) || inside_later_variant(c)) continue;
    if (c.key->fallback.is(JsonKind::null)) continue;
    const auto decisions = Config::from_text(c.text(to_text(c.key->fallback), false)).decisions();
    EXPECT_TRUE(std::none_of(decisions.begin(), decisions.end(), [](const std::string& line) {
      return has(line, "no effect here");
    })) << c.path();
  }
}

TEST(Table, LetsAPlannedSectionThatIsOffHoldAnything) {
  int checked = 0;
  for (const TableCase& c : all_leaves()) {
    if (!may_hold_anything(c) || below_a_refused_presence(c)) continue;
    for (const std::string& value : wrong_values(*c.key)) {
      EXPECT_EQ(error_of(c.text(value, false)), "") << c.text(value, false);
      ++checked;
    }
  }
  EXPECT_GT(checked, 200);
}

TEST(Table, TakesKeysThatAreComments) {
  for (const char* name : {"_comment", "//", "//why"}) {
    EXPECT_EQ(error_of(std::string("{\"") + name + "\": \"for the small machines\"}"), "");
    EXPECT_EQ(error_of(std::string("{\"zero\": {\"") + name + "\": {\"any\": 1}, \"stage\": 1}}"), "");
  }
}

TEST(Table, RefusesLaterChoices) {
  for (const TableCase& c : all_leaves()) {
    for (const std::string& name : c.key->later_choices) {
      const std::string error = error_of(c.text("\"" + name + "\"", true));
      const std::string why = c.key->later_reason.empty() ? "" : " (" + c.key->later_reason + ")";
      EXPECT_TRUE(has(error, ": " + c.path() + ": \"" + name + "\" is not supported yet" + why + "; choose ")) << error;
    }
  }
}

TEST(Table, LetsASectionThatIsOffSayAnything) {
  int checked = 0;
  for (const TableCase& c : all_leaves()) {
    const bool below_a_switch = std::any_of(c.sections.begin(), c.sections.end(),
                                            [](const Key* section) { return !section->switch_path.empty(); });
    const std::string value = other_value(*c.key);
    if (!below_a_switch || is_switch(c) || below_a_refused_presence(c) || value.empty() ||
        c.key->kind == Kind::anything)
      continue;
    EXPECT_EQ(error_of(c.text(value, false)), "") << c.text(value, false);
    ++checked;
  }
  EXPECT_GT(checked, 100);
}

TEST(Table, SuggestsEveryKeyForASlipInIt) {
  for (const TableCase& c : all_leaves()) {
    const bool open = (!c.sections.empty() && c.sections.back()->open) || (c.variant && c.variant->open);
    if (open) continue;
    const std::string error = error_of(c.text(c.key->name + "x", "1", false));
    const size_t cut = c.path().rfind('.');
    const std::string path = cut == std::string::npos ? "" : c.path().substr(0, cut + 1);
    EXPECT_TRUE(has(error, ":3: " + path + c.key->name + "x: unknown key; did you mean '" + c.key->name + "'?"))
        << error;
  }
}

TEST(Table, RefusesUnknownKeysInEverySection) {
  for (const TableCase& c : all_sections()) {
    if (c.key->open || !c.key->variants.empty() || c.key->kind == Kind::dictionary) continue;
    const std::string error = error_of(c.text("{\n\"qqqqqqqqqqqqqqqqqqqq\": 1}"));
    EXPECT_TRUE(has(error, ":4: " + c.path() + ".qqqqqqqqqqqqqqqqqqqq: unknown key")) << error;
  }
}

TEST(Table, KnowsOtherNamesAndRefusesBothAtOnce) {
  std::vector<TableCase> cases = all_leaves();
  const std::vector<TableCase> sections = all_sections();
  cases.insert(cases.end(), sections.begin(), sections.end());
  int checked = 0;
  for (const TableCase& c : cases) {
    const bool section = c.key->kind == Kind::section;
    const std::string value = section ? "{}" : to_text(c.key->fallback);
    for (const std::string& other : c.key->other_names) {
      EXPECT_EQ(error_of(c.text(other, value, false)), "") << other;
      const std::string both = error_of(c.text(other, value + ", \"" + c.key->name + "\": " + value, false));
      EXPECT_TRUE(has(both, "another name of '" + c.key->name + "', which is given on line 3")) << both;
      ++checked;
    }
  }
  EXPECT_GT(checked, 10);
}

}  // namespace
}  // namespace deeptide::config
