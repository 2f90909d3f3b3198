// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Compares digests first; only ranks that differ send their lines.
#include "engine/bind/agreement.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "base/libraries/format.h"
#include "base/libraries/nlohmann.h"
#include "base/sha256.h"
#include "deeptide/version.h"

namespace deeptide::engine {

using at::Tensor;
using nlohmann::json;

namespace {

/// Keys that change no number and no order of collectives: reports, and places that hosts may have under other names.
constexpr const char* kPerRank[] = {
    "/steps_per_print", "/wall_clock_breakdown", "/dump_state",      "/memory_breakdown", "/tensorboard/", "/wandb/",
    "/comet/",          "/csv_monitor/",         "/flops_profiler/", "/comms_logger/",    "/aio/"};

bool may_differ(const std::string& key) {
  const bool listed = std::any_of(std::begin(kPerRank), std::end(kPerRank),
                                  [&](const char* prefix) { return key.compare(0, std::strlen(prefix), prefix) == 0; });
  return listed || key.find("_path") != std::string::npos;
}

void add_config(const Config& config, std::vector<std::string>& terms) {
  const json parsed = try_read_json(config.text(), /*comments=*/true);
  if (parsed.is_discarded()) return terms.push_back("configuration " + config.text());
  const json leaves = parsed.flatten();
  for (const auto& [key, value] : leaves.items()) {
    if (!may_differ(key)) terms.push_back("configuration key " + key + ": " + write_json(value));
  }
}

/// Text of `bytes` from the tensor, up to the first zero byte.
std::vector<std::string> lines_of(const Tensor& row) {
  std::vector<std::string> lines(1);
  const auto* data = row.const_data_ptr<uint8_t>();
  for (int64_t i = 0; i < row.numel() && data[i] != 0; ++i) {
    if (data[i] == '\n') {
      lines.emplace_back();
    } else {
      lines.back() += static_cast<char>(data[i]);
    }
  }
  return lines;
}

std::string first_difference(const std::vector<std::string>& one, const std::vector<std::string>& other,
                             const std::string& one_rank, const std::string& other_rank, const std::string& cure) {
  size_t i = 0;
  while (i < one.size() && i < other.size() && one[i] == other[i]) ++i;
  const auto at = [&](const std::vector<std::string>& lines) -> std::string {
    return i < lines.size() && !lines[i].empty() ? lines[i] : "nothing more";
  };
  return "the ranks differ in what must be equal: " + one_rank + " has " + at(one) + "; " + other_rank + " has " +
         at(other) + ". " + cure;
}

/// Collective. Returns the row (bytes,) of each rank.
Tensor gather_rows(comm::Group& control, const Tensor& own, const comm::Site& site) {
  Tensor rows = at::empty({control.size() * own.numel()}, own.options());
  auto pending = control.all_gather(rows, own);
  control.wait(pending, site);
  return rows.view({control.size(), own.numel()});
}

std::string joined(const std::vector<std::string>& terms) {
  std::string text;
  for (const std::string& term : terms) text += (text.empty() ? "" : "\n") + term;
  return text;
}

}  // namespace

std::vector<std::string> terms_of(const ModelDescription& model, const std::vector<ParameterGroup>& groups,
                                  const Config& config) {
  std::vector<std::string> terms{"deeptide " DEEPTIDE_VERSION};
  add_config(config, terms);
  std::map<std::string, size_t> group_of;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const std::string& name : groups[g].parameters) group_of[name] = g;
  }
  std::map<std::pair<const void*, int64_t>, std::string> first_name;  // by storage and offset
  for (const auto& [name, tensor] : model.parameters) {
    if (!tensor.defined() || !tensor.has_storage()) continue;  // an error of its own
    const auto place =
        std::make_pair(static_cast<const void*>(tensor.storage().unsafeGetStorageImpl()), tensor.storage_offset());
    const std::string& tied_to = tensor.numel() > 0 ? first_name.emplace(place, name).first->second : name;
    const auto group = group_of.find(name);
    terms.push_back(format_text("parameter '{}' of shape [{}], {}, {}{}{}", name, join_text(tensor.sizes(), ", "),
                                c10::toString(tensor.scalar_type()), tensor.requires_grad() ? "trainable" : "frozen",
                                group == group_of.end() ? "" : format_text(", in group {}", group->second),
                                tied_to == name ? "" : format_text(", tied to '{}'", tied_to)));
  }
  for (size_t g = 0; g < groups.size(); ++g) {
    const Hyperparameters& hyper = groups[g].hyperparameters;
    if (!hyper.optimizer()) continue;
    std::string text = format_text("optimizer group {} ({})", g, hyper.optimizer()->name);
    for (const auto& info : hyper.optimizer()->hyperparameters) {
      text += format_text(" {}={}", info.name, hyper.get(info.name));
    }
    terms.push_back(text);
  }
  return terms;
}

void check_agreement(comm::Group& control, const std::vector<std::string>& own, const comm::Site& site,
                     const std::string& cure) {
  if (control.size() == 1) return;
  const std::string text = joined(own);
  const auto digest = sha256(text);
  const auto size = static_cast<int64_t>(text.size());
  Tensor mine = at::zeros({static_cast<int64_t>(digest.size() + sizeof size)}, at::kByte);
  std::memcpy(mine.mutable_data_ptr(), digest.data(), digest.size());
  std::memcpy(static_cast<char*>(mine.mutable_data_ptr()) + digest.size(), &size, sizeof size);
  const Tensor all = gather_rows(control, mine, site);
  int64_t largest = 0;
  int other = 0;
  for (int r = 0; r < control.size(); ++r) {
    const auto* row = static_cast<const char*>(all[r].const_data_ptr());
    int64_t theirs = 0;
    std::memcpy(&theirs, row + digest.size(), sizeof theirs);
    largest = std::max(largest, theirs);
    const bool differs = std::memcmp(row, all[0].const_data_ptr(), digest.size()) != 0;
    if (differs && other == 0) other = r;
  }
  if (other == 0) return;
  Tensor padded = at::zeros({largest + 1}, at::kByte);
  std::memcpy(padded.mutable_data_ptr(), text.data(), text.size());
  const Tensor texts = gather_rows(control, padded, site);
  const auto& ranks = control.team().ranks();
  throw ConfigError(first_difference(lines_of(texts[0]), lines_of(texts[other]), control.name_of(ranks[0]),
                                     control.name_of(ranks[other]), cure));
}

uint64_t digest_of(const std::vector<std::string>& terms) {
  if (terms.empty()) return 0;
  const auto digest = sha256(joined(terms));
  uint64_t number = 0;
  std::memcpy(&number, digest.data(), sizeof number);
  return number;
}

uint64_t digest_of(const std::vector<Hyperparameters>& groups) {
  uint64_t digest = 0x9e3779b97f4a7c15;  // any odd start; each value is mixed as splitmix64 does
  for (const Hyperparameters& hyper : groups) {
    const size_t count = hyper.optimizer() ? hyper.optimizer()->hyperparameters.size() : 0;
    for (size_t i = 0; i < count; ++i) {
      uint64_t bits = 0;
      const double value = hyper[i];
      std::memcpy(&bits, &value, sizeof bits);
      digest = (digest ^ bits) * 0xbf58476d1ce4e5b9;
      digest ^= digest >> 29;
    }
  }
  return digest;
}

}  // namespace deeptide::engine
