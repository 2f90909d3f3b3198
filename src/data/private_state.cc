// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Finds entries by JSON pointers below one key; states of the schedules are among them.
#include "data/private_state.h"

#include <utility>

#include "deeptide/curriculum.h"

namespace deeptide::data {
namespace {

Json parse_object(const std::string& text) {
  Json value = try_read_json<Json>(text);
  if (!value.is_object()) {
    throw ConfigError("the client state is '" + text.substr(0, 40) + "', expected a JSON object");
  }
  return value;
}

Json::json_pointer place_of(const std::string& path) {
  return Json::json_pointer("/__deeptide__/" + path);  // as _engine/checkpoint.py names them
}

}  // namespace

std::string add_private(const std::string& client_state_json, const std::string& path, Json entry) {
  Json state = parse_object(client_state_json);
  state[place_of(path)] = std::move(entry);
  return write_json(state);
}

bool take_private(const std::string& client_state_json, const std::string& path,
                  const std::function<void(const Json&)>& take) {
  const Json state = parse_object(client_state_json);
  if (!state.contains(place_of(path))) return false;
  try {
    take(state.at(place_of(path)));
  } catch (const Json::exception& error) {
    throw ConfigError("the client state's " + path + " cannot be read: " + error.what());
  }
  return true;
}

}  // namespace deeptide::data

namespace deeptide {

using data::Json;

std::string RandomLtdSchedule::add_state(const std::string& client_state_json) const {
  return data::add_private(client_state_json, "less_work/tokens",
                           {position_.step, position_.length, position_.layer_tokens});
}

bool RandomLtdSchedule::take_state(const std::string& client_state_json) {
  return data::take_private(client_state_json, "less_work/tokens", [this](const Json& saved) {
    position_ = {saved.at(0).get<int64_t>(), saved.at(1).get<int64_t>(), saved.at(2).get<int64_t>()};
  });
}

std::string ProgressiveLayerDrop::add_state(const std::string& client_state_json) const {
  return data::add_private(client_state_json, "less_work/layers", current_);
}

bool ProgressiveLayerDrop::take_state(const std::string& client_state_json) {
  return data::take_private(client_state_json, "less_work/layers",
                            [this](const Json& saved) { current_ = saved.get<double>(); });
}

}  // namespace deeptide
