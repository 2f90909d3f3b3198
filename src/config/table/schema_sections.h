// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The parts of the table, one file per function (Key) or group of sections (std::vector<Key>).
#pragma once

#include <string_view>
#include <utility>
#include <vector>

#include "config/table/schema.h"

namespace deeptide::config {

/// The spellings of data types, for choice<DataType>.
std::vector<std::pair<std::string_view, DataType>> data_types();

std::vector<Key> top_level_keys();
std::vector<Key> optimizer_sections();
std::vector<Key> scheduler_sections();
std::vector<Key> precision_sections();
std::vector<Key> zero_sections();
Key offload_param_section();
Key offload_optimizer_section();
Key placement_section();
Key zenflow_section();
std::vector<Key> activation_sections();
std::vector<Key> monitor_sections();
/// Those of the section "deeptide".
std::vector<Key> own_monitor_sections();
std::vector<Key> compression_sections();
std::vector<Key> data_sections();
std::vector<Key> tuning_sections();
std::vector<Key> checkpoint_sections();
std::vector<Key> parallel_sections();
std::vector<Key> compile_sections();
std::vector<Key> runtime_sections();

}  // namespace deeptide::config
