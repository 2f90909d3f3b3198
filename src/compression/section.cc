// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Joins groups with their shared parameters and checks what the table of keys cannot.
#include "compression/section.h"

#include <utility>

#include "base/libraries/format.h"
#include "config/section.h"
#include "deeptide/binding.h"
#include "deeptide/errors.h"

namespace deeptide::compression {
namespace {

constexpr const char* kOlder = "quantize_training";
constexpr const char* kTechniques[] = {kWeights,       "sparse_pruning",  "row_pruning",
                                       "head_pruning", "channel_pruning", kInputs};

Json read(const Config& config, const char* path) {
  return read_json<Json>(to_text(config::section_with_defaults(config, path)));
}

bool is_on(const Json& part) { return part.at("shared_parameters").at("enabled").get<bool>(); }

Json in_newer_form(const Json& older) {
  const Json &schedule = older.at("quantize_schedule"), &how = older.at("quantize_algo");
  Json params = older.at("quantize_bits");
  params["quantization_period"] = schedule.at("quantize_period");
  Json result;
  result["shared_parameters"] = {{"enabled", true},
                                 {"schedule_offset", schedule.at("schedule_offset")},
                                 {"quantize_groups", older.at("quantize_groups")},
                                 {"quantize_verbose", older.at("quantize_verbose")},
                                 {"quantization_type", how.at("q_type")},
                                 {"rounding", how.at("rounding")},
                                 {"quantize_weight_in_forward", false},
                                 {"fp16_mixed_quantize", older.at("fp16_mixed_quantize")}};
  result["different_groups"][kOlder] = {{"params", params}, {"modules", Json::array({"*"})}};
  return result;
}

void check_bits(const Group& group) {
  const Json& params = group.params;
  const auto start = params.at("start_bits").get<int64_t>(), target = params.at("target_bits").get<int64_t>();
  const std::string shared = std::string(kSection) + ".weight_quantization.shared_parameters";
  if (target > start) {
    throw ConfigError(format_text("{}.params.target_bits: {} exceeds start_bits, {}; bits fall, so give a lower one",
                                  group.path, target, start));
  }
  if (target <= 2 && params.at("quantization_type") != "symmetric") {
    throw ConfigError(
        format_text("{}.quantization_type: \"asymmetric\" has no {} bits; set it to \"symmetric\"", shared, target));
  }
  if (target <= 2 && params.at("rounding") != "nearest") {
    throw ConfigError(format_text("{}.rounding: \"stochastic\" has no {} bits; set it to \"nearest\"", shared, target));
  }
  if (params.at("quantize_weight_in_forward").get<bool>() &&
      params.at("fp16_mixed_quantize").at("enabled").get<bool>()) {
    throw ConfigError(shared +
                      ".fp16_mixed_quantize.enabled: true has no effect with quantize_weight_in_forward; set one of "
                      "them to false");
  }
}

void check_heads(const Json& params) {
  const std::string shared = std::string(kSection) + ".head_pruning.shared_parameters";
  if (params.at("method") != "topk") {
    throw ConfigError(format_text("{}.method: got {}, expected \"topk\": heads have scores", shared,
                                  write_json(params.at("method"))));
  }
  if (!params.contains("num_heads") || params.at("num_heads").is_null()) {
    throw ConfigError(shared + ".num_heads: is missing; give the heads of a layer");
  }
}

/// The group's related modules. Errors: ConfigError where they do not fit it.
std::vector<std::vector<std::string>> related_of(const Json& group, const Group& of) {
  const auto found = group.find("related_modules");
  if (found == group.end() || found->empty()) return {};
  if (of.technique == kWeights || of.technique == kInputs || of.technique == "sparse_pruning") {
    throw ConfigError(format_text("{}.related_modules: {} changes no shapes; leave it out", of.path, of.technique));
  }
  if (found->size() != of.modules.size()) {
    throw ConfigError(format_text("{}.related_modules: got {} entries, expected one for each of modules, {}", of.path,
                                  found->size(), of.modules.size()));
  }
  std::vector<std::vector<std::string>> related;
  for (const Json& entry : *found) {
    bool fits = entry.is_array();
    for (const Json& pattern : entry) fits = fits && pattern.is_string();
    if (!fits) {
      throw ConfigError(
          format_text("{}.related_modules: got the entry {}, expected a list of patterns", of.path, write_json(entry)));
    }
    related.push_back(entry.get<std::vector<std::string>>());
  }
  return related;
}

Group group_of(const std::string& technique, const std::string& name, const Json& shared, const Json& group) {
  Group found{.technique = technique,
              .name = name,
              .path = name == kOlder ? kOlder : format_text("{}.{}.different_groups.{}", kSection, technique, name),
              .params = shared,
              .modules = group.at("modules").get<std::vector<std::string>>(),
              .related = {}};
  const Json& own = group.at("params");
  for (const auto& [key, value] : own.items()) {
    if (!value.is_null()) found.params[key] = value;
  }
  std::vector<const char*> needed = {"dense_ratio"};
  if (technique == kWeights) needed = {"start_bits", "target_bits"};
  if (technique == kInputs) needed = {"bits"};
  for (const char* key : needed) {
    if (own.contains(key) && !own.at(key).is_null()) continue;
    throw ConfigError(format_text("{}.params.{}: is missing; give it", found.path, key));
  }
  if (technique == kWeights) check_bits(found);
  if (technique == "head_pruning") check_heads(found.params);
  if (technique == kInputs && found.params.at("bits") != 4 && found.params.at("bits") != 8) {
    throw ConfigError(
        format_text("{}.params.bits: got {}, expected 4 or 8", found.path, write_json(found.params.at("bits"))));
  }
  found.related = related_of(group, found);
  return found;
}

}  // namespace

Json section_of(const Config& config) {
  Json section = read(config, kSection);
  const Json older = read(config, kOlder);
  if (!older.at("enabled").get<bool>()) return section;
  if (is_on(section.at(kWeights))) {
    throw ConfigError(
        format_text("{}.enabled: true, and {}.weight_quantization is on; turn one of them off", kOlder, kSection));
  }
  section[kWeights] = in_newer_form(older);
  return section;
}

std::optional<Json> eigenvalue_section(const Config& config) {
  const Json older = read(config, kOlder);
  const Json& part = older.at("eigenvalue");
  return older.at("enabled").get<bool>() && part.at("enabled").get<bool>() ? std::optional(part) : std::nullopt;
}

std::vector<Group> groups_of(const Json& section) {
  std::vector<Group> found;
  for (const std::string technique : kTechniques) {
    const Json& part = section.at(technique);
    if (!is_on(part)) continue;
    const Json& groups = part.at("different_groups");
    if (groups.empty()) {
      throw ConfigError(format_text("{}.{}.different_groups: names no group; name at least one", kSection, technique));
    }
    for (const auto& [name, group] : groups.items()) {
      found.push_back(group_of(technique, name, part.at("shared_parameters"), group));
    }
  }
  return found;
}

}  // namespace deeptide::compression

namespace deeptide::binding {

std::string compression_section(const Config& config) { return write_json(compression::section_of(config)); }

std::string compression_groups(const Config& config) {
  auto all = compression::Json::array();
  for (const compression::Group& group : compression::groups_of(compression::section_of(config))) {
    all.push_back({{"technique", group.technique},
                   {"name", group.name},
                   {"path", group.path},
                   {"params", group.params},
                   {"modules", group.modules},
                   {"related", group.related}});
  }
  return write_json(all);
}

}  // namespace deeptide::binding
