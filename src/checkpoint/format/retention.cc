// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Removes checkpoints that are no longer wanted.
#include "checkpoint/format/retention.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <optional>
#include <string>
#include <string_view>

#include "checkpoint/format/contents.h"
#include "checkpoint/format/file_io.h"
#include "checkpoint/format/part_folders.h"
#include "deeptide/errors.h"

namespace deeptide::checkpoint {
namespace {

constexpr std::string_view kTag = "global_step";

std::optional<int64_t> step_of(std::string_view tag) {
  if (!tag.starts_with(kTag)) return std::nullopt;
  tag.remove_prefix(kTag.size());
  int64_t step = 0;
  const auto [end, error] = std::from_chars(tag.data(), tag.data() + tag.size(), step);
  const bool is_step = error == std::errc() && end == tag.data() + tag.size() && step >= 0;
  return is_step ? std::optional(step) : std::nullopt;
}

/// The tag of a growing folder "<tag>.<nonce>.tmp"; empty: the name is none.
std::string growing_tag(const std::string& name) {
  const size_t dot = name.find('.');
  if (dot == std::string::npos || !step_of(std::string_view(name).substr(0, dot))) return "";
  return name.substr(0, dot);
}

}  // namespace

std::vector<std::string> superfluous(const std::vector<SavedStep>& saved, const Retention& retention,
                                     const std::vector<std::string>& kept) {
  std::vector<std::string> tags;
  for (int64_t i = 0; retention.keep_last > 0 && i + retention.keep_last < std::ssize(saved); ++i) {
    const auto& [step, tag] = saved[i];
    const bool stays = retention.keep_every > 0 && step % retention.keep_every == 0;
    if (!stays && std::find(kept.begin(), kept.end(), tag) == kept.end()) tags.push_back(tag);
  }
  return tags;
}

void remove_checkpoint(const std::string& directory, const std::string& tag) {
  const std::string aside = growing_path({directory, tag, draw_nonce()});
  move_path(folder_path(directory, tag), aside);
  remove_with_parts(aside);
  if (exists(aside)) fail("remove", aside, EACCES);
}

void retain(const SaveTarget& target, const Retention& retention) try {
  if (retention.keep_last <= 0) return;
  std::vector<SavedStep> saved;
  for (const std::string& name : list_folder(target.directory)) {
    if (const auto step = step_of(name)) {
      if (exists(folder_path(target.directory, name) + "/" + kManifestName)) saved.push_back({*step, name});
    } else if (const std::string tag = growing_tag(name); !tag.empty()) {
      remove_other_saves({target.directory, tag, tag == target.tag ? target.nonce : draw_nonce(), target.folders});
    }
  }
  std::sort(saved.begin(), saved.end(), [](const SavedStep& a, const SavedStep& b) { return a.step < b.step; });
  for (const std::string& tag : superfluous(saved, retention, {target.tag, latest_tag(target.directory)})) {
    try {
      remove_checkpoint(target.directory, tag);
    } catch (const CheckpointError&) {  // one that cannot go does not keep the others
    }
  }
} catch (const CheckpointError&) {  // the checkpoint stands, and so does what was to go
}

}  // namespace deeptide::checkpoint
