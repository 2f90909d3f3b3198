// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Builds every schedule that a configuration asks for, and drops it again: what it lacks is an error at the start.
#include "data/sections.h"

#include <string>

#include "config/section.h"
#include "data/section_reader.h"
#include "deeptide/curriculum.h"

namespace deeptide::data {
namespace {

bool is_on(const SectionReader& section) {
  const JsonMember* enabled = section.value().find("enabled");
  return enabled && enabled->value.is(JsonKind::boolean) && enabled->value.boolean;
}

/// DeepSpeed reads the inner switch alone, readers all of them: they must say the same.
void check_around(const SectionReader& section, const SectionReader& around) {
  if (is_on(around)) return;
  section.fail("enabled",
               "true inside a section that is off, which DeepSpeed overlooks; set \"enabled\" of every "
               "section around it to true as well, or this to false");
}

void check_metric(const SectionReader& metric, const std::string& name) {
  CurriculumSchedule::from_text(to_text(metric.value()), name);
  const std::string type = metric.word("difficulty_type");
  if (metric.word("clustering_type") == "single_cluster") return;
  static_cast<void>(metric.word("index_to_sample_path"));
  if (type == "value") static_cast<void>(metric.word("index_to_metric_path"));
}

void check_curriculum(const SectionReader& section) {
  const JsonValue& metrics = section.below("curriculum_metrics").value();
  for (const JsonMember& entry : metrics.members) {
    const std::string name = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics." + entry.key;
    check_metric({entry.value, name}, name);
  }
  if (metrics.members.empty()) section.fail("curriculum_metrics", "names no metric; name at least one");
}

void check_batching(const SectionReader& section) {
  static_cast<void>(section.integer("max_tokens"));
  if (!section.has("max_batch_size") || section.integer("min_batch_size") <= section.integer("max_batch_size")) return;
  section.fail("min_batch_size", std::to_string(section.integer("min_batch_size")) + " exceeds max_batch_size, " +
                                     std::to_string(section.integer("max_batch_size")) + "; give a lower one");
}

void check_routing(const SectionReader& section, const Config& config) {
  RandomLtdSchedule::from_config(config, 1);
  static_cast<void>(section.word("model_type"));
  static_cast<void>(section.word("hidden_state_order"));
  const auto layers = static_cast<int64_t>(section.integers("random_ltd_layer_id").size());
  if (layers == section.integer("random_ltd_layer_num")) return;
  section.fail("random_ltd_layer_id", "names " + std::to_string(layers) + " layers, expected random_ltd_layer_num, " +
                                          std::to_string(section.integer("random_ltd_layer_num")));
}

}  // namespace

void check_sections(const Config& config) {
  const JsonValue legacy = config::section_with_defaults(config, "curriculum_learning");
  if (is_on({legacy, "curriculum_learning"})) CurriculumSchedule::from_config(config);
  const JsonValue efficiency = config::section_with_defaults(config, "data_efficiency");
  const SectionReader outer(efficiency, "data_efficiency");
  const SectionReader sampling = outer.below("data_sampling");
  const SectionReader routing = outer.below("data_routing");
  const auto when_on = [&](const SectionReader& around, const char* name, const auto& check) {
    const SectionReader section = around.below(name);
    if (!is_on(section)) return;
    check_around(section, outer);
    check_around(section, around);
    check(section);
  };
  when_on(sampling, "curriculum_learning", check_curriculum);
  when_on(sampling, "dynamic_batching", check_batching);
  when_on(routing, "random_ltd", [&](const SectionReader& section) { check_routing(section, config); });
}

}  // namespace deeptide::data
