// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// "Did you mean": the known key nearest to an unknown one.
#include "config/check/suggest.h"

#include <algorithm>
#include <numeric>
#include <set>

namespace deeptide::config {
namespace {

constexpr size_t kLongestName = 200;  // a longer name is no misspelling, and the distance takes quadratic time
constexpr size_t kMostPlaces = 3;
constexpr size_t kMostListed = 12;

struct Place {
  std::string name;
  std::string section;  // "" at the top level
  std::string type;     // of a section whose keys depend on its type
};

void collect(const Key& section, const std::string& path, const std::string& type, const std::vector<Key>& keys,
             std::vector<Place>& places) {
  for (const Key& key : keys) {
    places.push_back({key.name, path, type});
    for (const std::string& other : key.other_names) places.push_back({other, path, type});
    const std::string below = path.empty() ? key.name : path + "." + key.name;
    const bool named = key.kind == Kind::dictionary;
    collect(key, named ? below + ".<name>" : below, "", key.keys, places);
    for (const Variant& variant : key.variants) {
      std::string types;
      for (const std::string& name : variant.types) types += (types.empty() ? "" : "/") + name;
      collect(key, below, types, variant.keys, places);
    }
  }
}

const std::vector<Place>& all_places() {
  static const std::vector<Place> places = [] {
    std::vector<Place> found;
    collect(schema(), "", "", schema().keys, found);
    return found;
  }();
  return places;
}

std::string quoted_list(const std::set<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "'" : ", '") + name + "'";
  return text;
}

// Lists the sections that have a key of exactly this name; empty when they are too many to help.
std::set<std::string> other_places(std::string_view name) {
  std::set<std::string> exact, sections;
  for (const Place& place : all_places()) {
    if (place.name != name) continue;
    const std::string section = place.section.empty() ? "the top level" : place.section;
    sections.insert(section);
    exact.insert(place.type.empty() ? section : section + " of type " + place.type);
  }
  if (exact.size() <= kMostPlaces) return exact;
  return sections.size() <= kMostPlaces ? sections : std::set<std::string>();
}

// Finds a key with the same prefix: "stage3_foo" is near those that begin with "stage3_".
std::string same_family(std::string_view name, const std::vector<std::string>& candidates) {
  const size_t prefix = name.find('_');
  if (prefix == std::string_view::npos || prefix < 3) return "";
  std::string best;
  for (const std::string& candidate : candidates) {
    if (candidate.compare(0, prefix + 1, name.substr(0, prefix + 1)) != 0) continue;
    if (best.empty() || edit_distance(name, candidate) < edit_distance(name, best)) best = candidate;
  }
  return best;
}

// Finds a key of another section that differs by at most two slips.
std::string slip_elsewhere(std::string_view name) {
  if (name.size() < 5) return "";
  for (size_t slips : {1, 2}) {
    for (const Place& place : all_places()) {
      if (edit_distance(name, place.name) == slips) {
        return place.section.empty() ? place.name : place.section + "." + place.name;
      }
    }
  }
  return "";
}

}  // namespace

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> before(b.size() + 1), above(b.size() + 1), row(b.size() + 1);
  std::iota(above.begin(), above.end(), 0);
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replace = above[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, replace});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) row[j] = std::min(row[j], before[j - 2] + 1);
    }
    before = above;
    above = row;
  }
  return above[b.size()];
}

std::string nearest(std::string_view name, const std::vector<std::string>& candidates) {
  if (name.size() > kLongestName) return "";
  std::string best;
  size_t least = std::max<size_t>(2, name.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    const size_t distance = edit_distance(name, candidate);
    // A word whose letters all change is a different word, however short.
    if (distance < least && distance < candidate.size()) {
      least = distance;
      best = candidate;
    }
  }
  return best;
}

std::string suggest(std::string_view name, const std::vector<std::string>& siblings, std::string_view section) {
  if (name.size() > kLongestName) return "";
  const std::set<std::string> places = other_places(name);
  if (places.contains(std::string(section))) {  // for many other types
    return "; this type has no such key, but " + quoted_list({siblings.begin(), siblings.end()});
  }
  if (!places.empty()) return "; it belongs under " + quoted_list(places);
  std::string meant = nearest(name, siblings);
  if (meant.empty()) meant = slip_elsewhere(name);
  if (meant.empty()) meant = same_family(name, siblings);
  if (!meant.empty()) return "; did you mean '" + meant + "'?";
  if (siblings.empty() || siblings.size() > kMostListed) return "; docs/config.md lists the known ones";
  return "; known here: " + quoted_list({siblings.begin(), siblings.end()});
}

}  // namespace deeptide::config
