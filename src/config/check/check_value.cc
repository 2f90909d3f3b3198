// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Checks one value against its key: type, range, choices, status.
#include "config/check/check_value.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "config/check/suggest.h"

namespace deeptide::config {
namespace {

bool in_range(const Key& key, double value) {
  if (key.lowest && (value < *key.lowest || (key.lowest_excluded && value == *key.lowest))) return false;
  return !key.highest || value < *key.highest || (!key.highest_excluded && value == *key.highest);
}

bool is_integer(const JsonValue& value) {
  if (value.is(JsonKind::integer)) return true;
  // Accept 5e8, which parses as a float, but nothing from 2^63 on: it does not fit 64 bits.
  return value.is(JsonKind::number) && value.number == std::floor(value.number) && std::abs(value.number) < 0x1p63;
}

bool suits(const Key& key, Kind kind, const JsonValue& value) {
  switch (kind) {
    case Kind::boolean:
      return value.is(JsonKind::boolean);
    case Kind::integer:
      return is_integer(value) && in_range(key, value.number);
    case Kind::number:
      return (value.is(JsonKind::integer) || value.is(JsonKind::number)) && in_range(key, value.number);
    case Kind::word:
      return value.is(JsonKind::string);
    default:
      return true;
  }
}

bool suits_list(const Key& key, const JsonValue& value) {
  if (key.or_single && suits(key, key.element, value)) return true;
  return value.is(JsonKind::array) && (key.length == 0 || value.items.size() == key.length) &&
         std::all_of(value.items.begin(), value.items.end(),
                     [&](const JsonValue& item) { return suits(key, key.element, item); });
}

bool contains(const std::vector<std::string>& names, const std::string& name, bool any_case) {
  return std::any_of(names.begin(), names.end(), [&](const std::string& n) { return same_word(n, name, any_case); });
}

std::string off_values(const Key& key) {
  if (!key.off.empty()) return "set it to " + shown_value(key.off.front()) + " or remove it";
  if (key.fallback.is(JsonKind::null)) return "remove it";
  return "set it to " + shown_value(key.fallback) + " or remove it";
}

/// Returns the cure for a class of torch's that this table lacks; empty for other words.
std::string way_of_torchs(const Key& key, const std::string& word) {
  static const std::set<std::string> optimizers = {"Adadelta", "Adafactor", "Adamax", "ASGD",
                                                   "NAdam",    "RAdam",     "Rprop"};
  static const std::set<std::string> schedules = {"LambdaLR",
                                                  "MultiplicativeLR",
                                                  "StepLR",
                                                  "MultiStepLR",
                                                  "ConstantLR",
                                                  "LinearLR",
                                                  "PolynomialLR",
                                                  "ExponentialLR",
                                                  "CosineAnnealingLR",
                                                  "CyclicLR",
                                                  "OneCycleLR",
                                                  "SequentialLR",
                                                  "CosineAnnealingWarmRestarts",
                                                  "ReduceLROnPlateau"};
  if (key.name != "type") return "";
  if (optimizers.contains(word)) {
    return "\"" + word + "\" is torch's: give it as initialize(optimizer=lambda parameters: torch.optim." + word +
           "(parameters, …)) and leave the section out";
  }
  if (schedules.contains(word)) {
    return "\"" + word +
           "\" is torch's: give it as initialize(lr_scheduler=lambda optimizer: torch.optim.lr_scheduler." + word +
           "(optimizer, …)) and leave the section out";
  }
  return "";
}

}  // namespace

std::string shown_value(const JsonValue& value) {
  constexpr size_t kLongest = 60;
  std::string text = to_text(value);
  return text.size() > kLongest ? text.substr(0, kLongest) + "…" : text;
}

std::string type_problem(const Key& key, const JsonValue& value) {
  if (key.list_later && value.is(JsonKind::array)) return "per-group lists are not supported yet; give one number";
  if (key.kind == Kind::list ? !suits_list(key, value) : !suits(key, key.kind, value)) {
    return "expected " + describe_expected(key) + ", got " + shown_value(value);
  }
  if (key.choices.empty() || contains(key.choices, value.string, key.any_case)) return "";
  if (const std::string way = way_of_torchs(key, value.string); !way.empty()) return way;
  const std::string meant = nearest(value.string, key.choices);
  return "expected " + describe_expected(key) + ", got " + shown_value(value) +
         (meant.empty() ? "" : "; did you mean \"" + meant + "\"?");
}

std::string not_yet_text(const std::string& reason, const std::string& value, const std::string& cure) {
  return value + " is not supported yet" + (reason.empty() ? "" : " (" + reason + ")") + "; " + cure;
}

std::string status_problem(const Key& key, const JsonValue& value) {
  if (contains(key.later_choices, value.string, key.any_case)) {
    std::string cure;
    for (const std::string& name : key.choices) {
      if (!contains(key.later_choices, name, false)) cure += (cure.empty() ? "choose \"" : " or \"") + name + "\"";
    }
    return not_yet_text(key.later_reason, shown_value(value), cure);
  }
  if (key.status != Status::later || is_off(key, value)) return "";
  return not_yet_text(key.reason, shown_value(value), off_values(key));
}

bool is_off(const Key& key, const JsonValue& value) {
  const auto same = [&](const JsonValue& accepted) {
    if (accepted.is(JsonKind::string) && value.is(JsonKind::string)) {
      return same_word(accepted.string, value.string, key.any_case);
    }
    return same_content(accepted, value);
  };
  return same(key.fallback) || std::any_of(key.off.begin(), key.off.end(), same);
}

}  // namespace deeptide::config
