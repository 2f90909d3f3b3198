// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Compares accesses by vector clocks, taken when tasks are enqueued: findings do not depend on timing.
#include "simulated/machine/order.h"

#include <algorithm>
#include <sstream>

namespace deeptide::simulated {
namespace {

bool overlap(const Access& access, const Use& use) { return access.begin < use.end && use.begin < access.end; }

std::string range(size_t begin, size_t end) {
  return "bytes [" + std::to_string(begin) + ", " + std::to_string(end) + ")";
}

std::string verb(bool write) { return write ? " writes " : " reads "; }

std::string earlier(const Access& access) {
  return "'" + access.task + "' on stream " + std::to_string(access.stream) + verb(access.write);
}

const Access* find_conflict(const Use& use, const Clock& now) {
  for (const Access& access : use.block->accesses) {
    if (overlap(access, use) && (access.write || use.write) && !is_before(access, now)) return &access;
  }
  return nullptr;
}

}  // namespace

void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

bool is_before(const Access& access, const Clock& clock) {
  const auto stream = static_cast<size_t>(access.stream);
  return stream < clock.size() && access.tick <= clock[stream];
}

std::optional<std::string> conflict(const Use& use, const std::string& task, int stream, const Clock& now) {
  const Access* access = find_conflict(use, now);
  if (access == nullptr) return {};
  std::ostringstream text;
  text << "order error: '" << task << "' on stream " << stream << verb(use.write) << range(use.begin, use.end)
       << " of a " << use.block->describe() << " that " << earlier(*access) << "(" << range(access->begin, access->end)
       << "); stream " << stream << " does not wait for it";
  return text.str();
}

std::optional<std::string> host_conflict(const Use& use, const std::string& who, const Clock& host) {
  const Access* access = find_conflict(use, host);
  if (access == nullptr) return {};
  return "order error: the host (" + who + ")" + verb(use.write) + "a " + use.block->describe() + " that " +
         earlier(*access) + "; the host has not waited for it";
}

std::optional<std::string> free_conflict(const Block& block, const Clock& home, const Clock& host, bool& pending) {
  pending = false;
  for (const Access& access : block.accesses) {
    if (access.stream == block.home || is_before(access, host) || is_before(access, home)) continue;
    if (block.recorded.count(access.stream) > 0) {
      pending = true;
      continue;
    }
    return "order error: a " + block.describe() + " of stream " + std::to_string(block.home) +
           " was freed before a use: " + earlier(access) + "it, and neither record_stream nor a wait of stream " +
           std::to_string(block.home) + " orders that before its next owner's use";
  }
  return {};
}

void note(const Use& use, const std::string& task, int stream, uint64_t tick) {
  std::erase_if(use.block->accesses, [&](const Access& access) {
    // A read implies only its own stream's earlier reads.
    const bool implied = use.write || (!access.write && access.stream == stream);
    return implied && use.begin <= access.begin && access.end <= use.end;
  });
  use.block->accesses.push_back({use.begin, use.end, use.write, stream, tick, task});
}

void forget_done(Block& block, const Clock& host) {
  std::erase_if(block.accesses, [&](const Access& access) { return is_before(access, host); });
}

}  // namespace deeptide::simulated
