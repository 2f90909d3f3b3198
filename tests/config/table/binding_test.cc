// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// For every key of the table that has an effect: it fills its field, with its default and with what the text gives.
#include "config/table/binding.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <stdexcept>

#include "config/table_cases.h"
#include "deeptide/errors.h"

namespace deeptide::config {
namespace {

/// The fields of `text` that the key and its siblings fill, each as JSON by the key's path.
std::map<std::string, JsonValue> fields_of(const std::string& text) {
  const Config config = Config::from_text(text, "ds_config.json");
  std::map<std::string, JsonValue> fields;
  for (const TableCase& c : all_leaves()) {
    if (!c.key->binding) continue;
    const bool scheduled = c.variant && c.sections.front()->name == "scheduler";
    const std::string type = scheduled ? c.variant->types.front() : "";
    if (scheduled && type != scheduler_type(config.scheduler())) continue;
    fields[c.path()] = c.key->binding->read(*c.key, config.sections());
  }
  return fields;
}

/// A text with the key's section and the required siblings, but without the key.
std::string text_without(const TableCase& c) {
  const Key* required = nullptr;
  if (c.variant) {
    for (const Key& key : c.variant->keys) {
      if (key.must_be_given && &key != c.key) required = &key;
    }
  }
  if (required) return TableCase{required, c.sections, c.variant}.text("5");
  return c.variant ? c.text("\"auto\"") : "{}";
}

/// The default: of the table, or of the sibling from which the key derives.
const JsonValue& default_of(const TableCase& c) {
  if (c.key->sibling.empty()) return c.key->fallback;
  for (const Key& key : c.variant->keys) {
    if (key.name == c.key->sibling) return key.fallback;
  }
  throw std::logic_error(c.path() + " derives from '" + c.key->sibling + "', which is not beside it");
}

/// A value as its field has it: folders become absolute, since a program may change its own before they are used.
JsonValue in_field(const Key& key, JsonValue value) {
  static const std::set<std::string> kPaths{"nvme_path", "output_path", "output_file", "folder", "folders"};
  if (!kPaths.contains(key.name)) return value;
  for (JsonValue& item : value.items) item = in_field(key, item);
  if (!value.is(JsonKind::string) || value.string.empty()) return value;
  return JsonValue(std::string_view(std::filesystem::absolute(value.string).string()));
}

/// `value`, or the usual spelling of the same enumerator.
JsonValue usual_spelling(const Key& key, const JsonValue& value) {
  const size_t choice = find_choice(key, value.string);
  if (!value.is(JsonKind::string) || choice >= key.enumerators.size()) return value;
  const auto first = std::find(key.enumerators.begin(), key.enumerators.end(), key.enumerators[choice]);
  return JsonValue(std::string_view(key.choices[first - key.enumerators.begin()]));
}

TEST(Binding, ExistsForEveryHonouredKeyThatNoOtherCodeReads) {
  for (const TableCase& c : all_leaves()) {
    if (c.key->status != Status::honoured) continue;
    EXPECT_NE(c.key->binding.has_value(), !c.key->reader.empty())
        << c.path() << ": add .into(&Section::field) to its line in the table, or .read_by(\"…\") and no field";
  }
}

TEST(Binding, FillsTheFieldWithTheTablesDefault) {
  int checked = 0;
  for (const TableCase& c : all_leaves()) {
    if (!c.key->binding || c.key->must_be_given) continue;
    const auto fields = fields_of(text_without(c));
    ASSERT_TRUE(fields.count(c.path())) << c.path();
    EXPECT_TRUE(same_content(fields.at(c.path()), in_field(*c.key, default_of(c))))
        << c.path() << " became " << to_text(fields.at(c.path())) << ", expected "
        << to_text(in_field(*c.key, default_of(c)));
    ++checked;
  }
  EXPECT_GT(checked, 60);
}

TEST(Binding, FillsTheFieldWithWhatTheTextGivesAndNoOther) {
  int checked = 0;
  for (const TableCase& c : all_leaves()) {
    if (!c.key->binding || c.key->status != Status::honoured || depends_on_another(*c.key)) continue;
    std::vector<std::string> values;
    for (const std::string& name : c.key->choices) {
      const auto& later = c.key->later_choices;
      if (std::find(later.begin(), later.end(), name) == later.end()) values.push_back("\"" + name + "\"");
    }
    if (values.empty()) values.push_back(other_value(*c.key));
    const auto before = c.key->must_be_given ? fields_of(c.text("5")) : fields_of(text_without(c));
    for (const std::string& value : values) {
      const auto fields = fields_of(c.text(value));
      JsonValue given = value == "\"auto\"" ? default_of(c) : usual_spelling(*c.key, parse_json(value, "value"));
      if (c.key->or_single && !given.is(JsonKind::array)) given = parse_json("[" + value + "]", "value");
      for (const auto& [path, field] : fields) {
        const bool own = path == c.path();
        const Key* sibling = nullptr;
        if (c.variant) {
          for (const Key& key : c.variant->keys) {
            if (!key.sibling.empty() && key.sibling == c.key->name && path.ends_with("." + key.name)) sibling = &key;
          }
        }
        const JsonValue expected = own || sibling ? in_field(*c.key, given) : before.at(path);
        EXPECT_TRUE(same_content(field, expected)) << c.path() << " = " << value << " made " << path << " "
                                                   << to_text(field) << ", expected " << to_text(expected);
      }
    }
    ++checked;
  }
  EXPECT_GT(checked, 60);
}

TEST(Binding, ChoosesTheStructOfEachScheduleByItsType) {
  for (const Variant& variant : find_key("scheduler.params")->variants) {
    const TableCase c{&variant.keys.front(), {find_key("scheduler"), find_key("scheduler.params")}, &variant};
    const JsonValue given = c.key->must_be_given ? JsonValue(int64_t{5}) : c.key->fallback;
    const Config config = Config::from_text(c.text(to_text(given)), "ds_config.json");
    EXPECT_EQ(scheduler_type(config.scheduler()), variant.types.front());
  }
}

TEST(Binding, RefusesAFieldOfAnotherType) {
  EXPECT_THROW(flag("x", true, "").into(&ZeroConfig::stage), std::logic_error);
  EXPECT_THROW(integer("x", 1, "").into(&ZeroConfig::overlap_comm), std::logic_error);
  EXPECT_THROW(number("x", 1, "").into(&ZeroConfig::max_live_parameters), std::logic_error);
  EXPECT_THROW(list("x", Kind::number, {}, "").into(&ElasticityConfig::micro_batch_sizes), std::logic_error);
  EXPECT_THROW(choice("x", "a", {"a"}, "").into(&RuntimeConfig::reduction), std::logic_error);
  EXPECT_THROW(choice<GradientOp>("x", {}, {{"mean", GradientOp::mean}}, "").into(&RuntimeConfig::reduction),
               std::logic_error);
  EXPECT_NO_THROW(choice<DataType>("x", {}, {{"a", DataType::bf16}}, "").into(&PrecisionConfig::communication_dtype));
}

}  // namespace
}  // namespace deeptide::config
