// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Checks a parsed text against the table: names, types, ranges and statuses at every depth.
#include "config/check/validate.h"

#include <algorithm>

#include "config/check/check_value.h"
#include "config/check/suggest.h"
#include "deeptide/errors.h"

namespace deeptide::config {
namespace {

// A place in the walk: its path in the table, its path as the user spelt it, and the line that errors name.
struct Position {
  std::string path;
  std::string shown;
  int line = 1;

  Position below(const std::string& name, const JsonMember* member) const {
    const auto join = [](const std::string& a, const std::string& b) { return a.empty() ? b : a + "." + b; };
    return {join(path, name), join(shown, member ? member->key : name), member ? member->line : line};
  }
};

/// The depth of a check of a section's keys: everything, all but their status, or their names alone.
enum class Check : uint8_t { all, types, names };

/// JSON has no comments, so people write them as keys; editors find a text's schema under "$schema".
bool is_comment(std::string_view name) { return name.starts_with('_') || name.starts_with("//") || name == "$schema"; }

bool is_auto(const JsonValue& value) { return value.is(JsonKind::string) && value.string == "auto"; }

bool leaves_default(const JsonMember* member) {
  return !member || member->value.is(JsonKind::null) || is_auto(member->value);
}

const JsonMember* find_path(const JsonValue& object, std::string_view path) {
  const size_t dot = path.find('.');
  const JsonMember* member = object.find(path.substr(0, dot));
  if (!member || dot == std::string_view::npos) return member;
  return member->value.is(JsonKind::object) ? find_path(member->value, path.substr(dot + 1)) : nullptr;
}

class Walk {
 public:
  Walk(Problems& problems, std::vector<std::string>& decisions) : problems_(problems), decisions_(decisions) {}

  Values run(const JsonValue& root) {
    walk_keys(schema(), nullptr, root, {}, Check::all);
    note_harmless();
    return std::move(values_);
  }

 private:
  // Walks all keys of a section whose text is `object`, absent ones included.
  void walk_keys(const Key& section, const Variant* variant, const JsonValue& object, const Position& at, Check check) {
    std::vector<std::string> known;
    for (const Key& key : section.keys) walk_key(key, object, at, check, known);
    if (variant) {
      for (const Key& key : variant->keys) walk_key(key, object, at, check, known);
    }
    if (section.open || (variant && variant->open)) return;
    for (const JsonMember& member : object.members) {
      if (is_comment(member.key) || std::find(known.begin(), known.end(), member.key) != known.end()) continue;
      problems_.add(member.line, at.below("", &member).shown, "unknown key" + suggest(member.key, known, at.path));
    }
  }

  void walk_key(const Key& key, const JsonValue& object, const Position& at, Check check,
                std::vector<std::string>& known) {
    const JsonMember* member = object.find(key.name);
    known.push_back(key.name);
    for (const std::string& other : key.other_names) {
      known.push_back(other);
      const JsonMember* also = object.find(other);
      if (member && also) {
        problems_.add(also->line, at.below("", also).shown,
                      "this is another name of '" + member->key + "', which is given on line " +
                          std::to_string(member->line) + "; keep one of them");
      } else if (also) {
        member = also;
      }
    }
    const Position here = at.below(key.name, member);
    if (key.kind == Kind::section) {
      const size_t before = harmless_.size();
      walk_section(key, object, member, here, check);
      if (key.status == Status::never && harmless_.size() > before) {  // one name for all of its keys
        harmless_.resize(before);
        harmless_.push_back(here.shown);
      }
    } else if (key.kind == Kind::dictionary) {
      walk_dictionary(key, member, here, check);
    } else {
      walk_leaf(key, member, here, check);
    }
  }

  void walk_section(const Key& key, const JsonValue& parent, const JsonMember* member, const Position& at,
                    Check check) {
    static const JsonValue kAbsent;
    const JsonValue* object = leaves_default(member) ? &kAbsent : &member->value;
    if (member && is_auto(member->value)) decisions_.push_back(at.shown + ": \"auto\" became absent");
    const bool as_flag = key.or_boolean && object->is(JsonKind::boolean);
    const bool as_first = key.or_first && (object->is(JsonKind::integer) || object->is(JsonKind::number));
    if (object != &kAbsent && !object->is(JsonKind::object) && !as_flag && !as_first) {
      if (check != Check::names) {
        problems_.add(at.line, at.shown, "expected " + describe_expected(key) + ", got " + shown_value(*object));
      }
      object = &kAbsent;
    }
    const Variant* variant = nullptr;
    if (!key.variants.empty() && !choose_variant(key, parent, *object, at, variant)) return;
    walk_keys(key, variant, as_flag || as_first ? kAbsent : *object, at, check_of_children(key, *object, at, check));
    if (as_first)
      walk_leaf(key.keys.front(), member, {at.path + "." + key.keys.front().name, at.shown, at.line}, check);
    if (as_flag) record_flag(key, *object, at);
  }

  // Finds the keys that the sibling "type" adds; returns false when the type itself is wrong or missing.
  bool choose_variant(const Key& key, const JsonValue& parent, const JsonValue& object, const Position& at,
                      const Variant*& variant) {
    const JsonMember* type = parent.find("type");
    if (leaves_default(type)) {
      if (object.members.empty()) return false;
      problems_.add(at.line, at.shown, "the sibling key 'type' is missing; add it or remove the section");
      return false;
    }
    variant = find_variant(key, type->value.string);
    return variant != nullptr;
  }

  // A section that is off may ask for anything; one that is not supported yet may moreover hold anything. One that is
  // on but not supported is one problem, not one per key.
  Check check_of_children(const Key& key, const JsonValue& object, const Position& at, Check check) {
    if (check != Check::all || !object.is(JsonKind::object)) return check;
    const bool refused = key.status == Status::later;
    if (key.on_when_present) {
      if (refused) problems_.add(at.line, at.shown, not_yet_text(key.reason, "this section", "remove it"));
      return refused ? Check::names : check;
    }
    if (key.switch_path.empty()) return check;
    const JsonMember* found = find_path(object, key.switch_path);
    const Key* leaf = find_key(at.path + "." + key.switch_path);
    const bool absent = !found || is_auto(found->value);
    const bool fits = absent || (leaf && type_problem(*leaf, found->value).empty());
    const bool on = fits && !absent && !same_content(found->value, key.switch_off);
    if (!refused) return on ? Check::all : Check::types;
    if (on) {
      problems_.add(found->line, at.shown + "." + key.switch_path,
                    not_yet_text(key.reason, shown_value(found->value),
                                 "set it to " + shown_value(key.switch_off) + " or remove the section"));
    }
    // A switch that says neither yes nor no is an error of its own.
    return fits ? Check::names : Check::types;
  }

  // Reads true and false as 1 and 0 of the section's first key.
  void record_flag(const Key& key, const JsonValue& value, const Position& at) {
    static const JsonValue kOff(int64_t{0}), kOn(int64_t{1});
    const Key& first = key.keys.front();
    values_.record(at.path + "." + first.name, {&first, value.boolean ? &kOn : &kOff, at.line, at.shown, false});
    decisions_.push_back(at.shown + ": " + shown_value(value) + " means " + first.name + " " +
                         (value.boolean ? "1" : "0"));
  }

  void walk_dictionary(const Key& key, const JsonMember* member, const Position& at, Check check) {
    if (member && is_auto(member->value)) decisions_.push_back(at.shown + ": \"auto\" became absent");
    if (leaves_default(member)) return;
    if (!member->value.is(JsonKind::object)) {
      if (check != Check::names) {
        problems_.add(at.line, at.shown, "expected " + describe_expected(key) + ", got " + shown_value(member->value));
      }
      return;
    }
    for (const JsonMember& entry : member->value.members) {
      const Position here = at.below(entry.key, &entry);
      if (entry.value.is(JsonKind::object)) {
        walk_keys(key, nullptr, entry.value, here, check);
      } else if (check != Check::names) {
        problems_.add(here.line, here.shown, "expected an object, got " + shown_value(entry.value));
      }
    }
  }

  void walk_leaf(const Key& key, const JsonMember* member, const Position& at, Check check) {
    Entry entry{&key, nullptr, at.line, at.shown, false};
    if (check == Check::names || leaves_default(member)) {
      entry.automatic = member && is_auto(member->value);
      if (entry.automatic) decide(key, at);
      if (key.must_be_given && check == Check::all) {
        problems_.add(at.line, at.shown,
                      entry.automatic ? "\"auto\" cannot be derived here; expected " + describe_expected(key)
                                      : "missing; expected " + describe_expected(key));
      }
      const bool null_for_a_default =
          check != Check::names && member && !entry.automatic && !key.fallback.is(JsonKind::null) && !key.nullable;
      if (null_for_a_default) problems_.add(at.line, at.shown, "expected " + describe_expected(key) + ", got null");
      values_.record(at.path, std::move(entry));
      return;
    }
    std::string problem = type_problem(key, member->value);
    if (problem.empty()) {
      entry.value = &member->value;
      if (check == Check::all) problem = status_problem(key, member->value);
    }
    if (!problem.empty()) problems_.add(at.line, at.shown, problem);
    if (check == Check::all && key.status == Status::never && !is_off(key, member->value)) {
      harmless_.push_back(at.shown);
    }
    values_.record(at.path, std::move(entry));
  }

  void decide(const Key& key, const Position& at) {
    if (key.must_be_given) return;
    std::string became = shown_value(key.fallback);
    if (key.fallback.is(JsonKind::null)) became = key.derived.empty() ? "absent" : key.derived;
    if (!key.automatic.empty()) became = key.automatic;
    // The table lists sections before those that derive from them, so their values are known here.
    if (values_.has(key.auto_path)) became = shown_value(values_.value(key.auto_path)) + " (" + key.auto_path + ")";
    decisions_.push_back(at.shown + ": \"auto\" became " + became);
  }

  void note_harmless() {
    std::string names;
    for (const std::string& path : harmless_) names += (names.empty() ? "" : ", ") + path;
    if (!names.empty()) decisions_.push_back("no effect here: " + names + " (docs/config.md gives the reasons)");
  }

  Problems& problems_;
  std::vector<std::string>& decisions_;
  std::vector<std::string> harmless_;  // given, and without effect here
  Values values_;
};

}  // namespace

void Problems::add(int line, const std::string& path, const std::string& what) {
  found_.emplace_back(line, origin_ + ":" + std::to_string(line) + ": " + path + ": " + what);
}

void Problems::raise() const {
  if (found_.empty()) return;
  std::vector<std::pair<int, std::string>> sorted = found_;
  std::stable_sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::string text;
  for (const auto& [line, problem] : sorted) text += (text.empty() ? "" : "\n") + problem;
  throw ConfigError(text);
}

Values validate(const JsonValue& root, Problems& problems, std::vector<std::string>& decisions) {
  return Walk(problems, decisions).run(root);
}

}  // namespace deeptide::config
