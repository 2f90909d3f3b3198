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
    walk_keys(schema(), nullptr, root, {}, false);
    return std::move(values_);
  }

 private:
  // Walks all keys of a section whose text is `object`, absent ones included. Muted: checks names and types only.
  void walk_keys(const Key& section, const Variant* variant, const JsonValue& object, const Position& at, bool muted) {
    std::vector<std::string> known;
    for (const Key& key : section.keys) walk_key(key, object, at, muted, known);
    if (variant) {
      for (const Key& key : variant->keys) walk_key(key, object, at, muted, known);
    }
    if (section.open || (variant && variant->open)) return;
    for (const JsonMember& member : object.members) {
      if (std::find(known.begin(), known.end(), member.key) != known.end()) continue;
      problems_.add(member.line, at.below("", &member).shown, "unknown key" + suggest(member.key, known));
    }
  }

  void walk_key(const Key& key, const JsonValue& object, const Position& at, bool muted,
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
      walk_section(key, object, member, here, muted);
    } else if (key.kind == Kind::dictionary) {
      walk_dictionary(key, member, here, muted);
    } else {
      walk_leaf(key, member, here, muted);
    }
  }

  void walk_section(const Key& key, const JsonValue& parent, const JsonMember* member, const Position& at, bool muted) {
    static const JsonValue kAbsent;
    const JsonValue* object = leaves_default(member) ? &kAbsent : &member->value;
    if (member && is_auto(member->value)) decisions_.push_back(at.shown + ": \"auto\" became absent");
    const bool as_flag = key.or_boolean && object->is(JsonKind::boolean);
    if (object != &kAbsent && !object->is(JsonKind::object) && !as_flag) {
      problems_.add(at.line, at.shown, "expected " + describe_expected(key) + ", got " + shown_value(*object));
      object = &kAbsent;
    }
    const Variant* variant = nullptr;
    if (!key.variants.empty() && !choose_variant(key, parent, *object, at, variant)) return;
    walk_keys(key, variant, as_flag ? kAbsent : *object, at, mute_children(key, *object, at, muted));
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

  // Mutes the keys of a section that is off. A section that is on but not supported is one problem, not one per key.
  bool mute_children(const Key& key, const JsonValue& object, const Position& at, bool muted) {
    if (muted || !object.is(JsonKind::object)) return muted;
    const bool refused = key.status == Status::later || key.status == Status::never;
    if (key.on_when_present) {
      if (refused) problems_.add(at.line, at.shown, status_text(key.status, key.reason, "this section", "remove it"));
      return refused;
    }
    if (key.switch_path.empty()) return false;
    const JsonMember* found = find_path(object, key.switch_path);
    const bool on = found && found->value.kind == key.switch_off.kind && !is_auto(found->value) &&
                    !same_content(found->value, key.switch_off);
    if (!on || !refused) return !on;
    problems_.add(found->line, at.shown + "." + key.switch_path,
                  status_text(key.status, key.reason, shown_value(found->value),
                              "set it to " + shown_value(key.switch_off) + " or remove the section"));
    return true;
  }

  // Reads true and false as 1 and 0 of the section's first key.
  void record_flag(const Key& key, const JsonValue& value, const Position& at) {
    static const JsonValue kOff(int64_t{0}), kOn(int64_t{1});
    const Key& first = key.keys.front();
    values_.record(at.path + "." + first.name, {&first, value.boolean ? &kOn : &kOff, at.line, at.shown, false});
    decisions_.push_back(at.shown + ": " + shown_value(value) + " means " + first.name + " " +
                         (value.boolean ? "1" : "0"));
  }

  void walk_dictionary(const Key& key, const JsonMember* member, const Position& at, bool muted) {
    if (member && is_auto(member->value)) decisions_.push_back(at.shown + ": \"auto\" became absent");
    if (leaves_default(member)) return;
    if (!member->value.is(JsonKind::object)) {
      problems_.add(at.line, at.shown, "expected " + describe_expected(key) + ", got " + shown_value(member->value));
      return;
    }
    for (const JsonMember& entry : member->value.members) {
      const Position here = at.below(entry.key, &entry);
      if (entry.value.is(JsonKind::object)) {
        walk_keys(key, nullptr, entry.value, here, muted);
      } else {
        problems_.add(here.line, here.shown, "expected an object, got " + shown_value(entry.value));
      }
    }
  }

  void walk_leaf(const Key& key, const JsonMember* member, const Position& at, bool muted) {
    Entry entry{&key, nullptr, at.line, at.shown, false};
    if (leaves_default(member)) {
      entry.automatic = member && is_auto(member->value);
      if (entry.automatic) decide(key, at);
      if (key.must_be_given && !muted) {
        problems_.add(at.line, at.shown,
                      entry.automatic ? "\"auto\" cannot be derived here; expected " + describe_expected(key)
                                      : "missing; expected " + describe_expected(key));
      }
      const bool null_for_a_default = member && !entry.automatic && !key.fallback.is(JsonKind::null);
      if (null_for_a_default) problems_.add(at.line, at.shown, "expected " + describe_expected(key) + ", got null");
      values_.record(at.path, std::move(entry));
      return;
    }
    std::string problem = type_problem(key, member->value);
    if (problem.empty()) {
      entry.value = &member->value;
      if (!muted) problem = status_problem(key, member->value);
    }
    if (!problem.empty()) problems_.add(at.line, at.shown, problem);
    values_.record(at.path, std::move(entry));
  }

  void decide(const Key& key, const Position& at) {
    if (key.must_be_given) return;
    std::string became = shown_value(key.fallback);
    if (key.fallback.is(JsonKind::null)) became = key.derived.empty() ? "absent" : key.derived;
    // The table lists sections before those that derive from them, so their values are known here.
    if (values_.has(key.auto_path)) became = shown_value(values_.value(key.auto_path)) + " (" + key.auto_path + ")";
    decisions_.push_back(at.shown + ": \"auto\" became " + became);
  }

  Problems& problems_;
  std::vector<std::string>& decisions_;
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
