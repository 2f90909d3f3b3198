// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// From a key of the table to the field that it fills, and back: Key::into for every type that a field may have.
#pragma once

#include <concepts>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <variant>
#include <vector>

#include "config/table/schema.h"

namespace deeptide::config {

/// A choice whose field is an enumeration: each spelling with its enumerator, the usual spelling of each first.
template <class Enum>
Key choice(std::string name, std::optional<Enum> fallback,
           const std::vector<std::pair<std::string_view, Enum>>& choices, std::string doc) {
  Key key = word(std::move(name), std::nullopt, std::move(doc));
  key.enumeration = &typeid(Enum);
  for (const auto& [spelling, enumerator] : choices) {
    key.choices.emplace_back(spelling);
    key.enumerators.push_back(static_cast<int64_t>(enumerator));
    if (fallback == enumerator && key.fallback.is(JsonKind::null)) key.fallback = JsonValue(spelling);
  }
  return key;
}

namespace detail {

template <class Enum>
concept Enumeration = std::is_enum_v<Enum>;

/// The requirements of a field of type T on its key; empty optionals and lists have the same type as full ones.
template <class T>
struct FieldType {
  static constexpr bool kEnumeration = std::is_enum_v<T>;
  static constexpr Kind kKind = std::is_same_v<T, bool>     ? Kind::boolean
                                : std::is_integral_v<T>     ? Kind::integer
                                : std::is_same_v<T, double> ? Kind::number
                                                            : Kind::word;
  static bool suits(const Key& key, Kind kind) {
    const bool same_enumeration = key.enumeration ? *key.enumeration == typeid(T) : !kEnumeration;
    return kind == kKind && same_enumeration;
  }
};

template <class T>
struct FieldType<std::optional<T>> : FieldType<T> {};

template <class T>
struct FieldType<std::vector<T>> {
  static bool suits(const Key& key, Kind kind) { return kind == Kind::list && FieldType<T>::suits(key, key.element); }
};

inline void assign(const Key&, const JsonValue& value, bool& field) { field = value.boolean; }
inline void assign(const Key&, const JsonValue& value, double& field) { field = value.number; }
inline void assign(const Key&, const JsonValue& value, std::string& field) { field = value.string; }

template <std::integral T>
void assign(const Key&, const JsonValue& value, T& field) {
  field = static_cast<T>(as_integer(value));
}

template <Enumeration T>
void assign(const Key& key, const JsonValue& value, T& field) {
  field = static_cast<T>(key.enumerators.at(find_choice(key, value.string)));
}

template <class T>
void assign(const Key& key, const JsonValue& value, std::vector<T>& field);

template <class T>
void assign(const Key& key, const JsonValue& value, std::optional<T>& field) {
  field.reset();
  if (!value.is(JsonKind::null)) assign(key, value, field.emplace());
}

template <class T>
void assign(const Key& key, const JsonValue& value, std::vector<T>& field) {
  field.clear();
  if (key.or_single && !value.is(JsonKind::array) && !value.is(JsonKind::null))
    return assign(key, value, field.emplace_back());
  for (const JsonValue& item : value.items) assign(key, item, field.emplace_back());
}

inline JsonValue content(const Key&, bool field) { return JsonValue(field); }
inline JsonValue content(const Key&, double field) { return JsonValue(field); }
inline JsonValue content(const Key&, const std::string& field) { return JsonValue(std::string_view(field)); }

template <std::integral T>
JsonValue content(const Key&, T field) {
  return JsonValue(static_cast<int64_t>(field));
}

template <Enumeration T>
JsonValue content(const Key& key, T field) {
  for (size_t i = 0; i < key.choices.size(); ++i) {
    if (key.enumerators[i] == static_cast<int64_t>(field)) return JsonValue(std::string_view(key.choices[i]));
  }
  return {};
}

template <class T>
JsonValue content(const Key& key, const std::vector<T>& field);

template <class T>
JsonValue content(const Key& key, const std::optional<T>& field) {
  return field ? content(key, *field) : JsonValue();
}

template <class T>
JsonValue content(const Key& key, const std::vector<T>& field) {
  if (field.empty() && key.fallback.is(JsonKind::null)) return {};
  JsonValue list;
  list.kind = JsonKind::array;
  for (const T& item : field) list.items.push_back(content(key, item));
  return list;
}

template <class T, class Any>
inline constexpr bool kIsAlternative = false;
template <class T, class... Alternatives>
inline constexpr bool kIsAlternative<T, std::variant<Alternatives...>> = (std::is_same_v<T, Alternatives> || ...);

/// The section of that type. The keys of a schedule's type choose the alternative that holds them.
template <class Section>
Section& section_of(Config::Sections& sections) {
  if constexpr (kIsAlternative<Section, SchedulerConfig>) {
    auto& scheduler = std::get<SchedulerConfig>(sections);
    if (!std::holds_alternative<Section>(scheduler)) scheduler.emplace<Section>();
    return std::get<Section>(scheduler);
  } else {
    return std::get<Section>(sections);
  }
}

/// The section of that type, or null for a schedule that was not chosen.
template <class Section>
const Section* find_section(const Config::Sections& sections) {
  if constexpr (kIsAlternative<Section, SchedulerConfig>) {
    return std::get_if<Section>(&std::get<SchedulerConfig>(sections));
  } else {
    return &std::get<Section>(sections);
  }
}

}  // namespace detail

template <class Section, class Field>
Key Key::into(Field Section::*field) && {
  if (!detail::FieldType<Field>::suits(*this, kind)) {
    throw std::logic_error("the table binds '" + name + "' to a field of another type");
  }
  binding = Binding{[field](const Key& key, const JsonValue& value, Config::Sections& sections) {
                      detail::assign(key, value, detail::section_of<Section>(sections).*field);
                    },
                    [field](const Key& key, const Config::Sections& sections) {
                      const Section* section = detail::find_section<Section>(sections);
                      return section ? detail::content(key, section->*field) : JsonValue();
                    }};
  return std::move(*this);
}

}  // namespace deeptide::config
