// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Keeps failure reports in the world's store.
#include "world/failure_board.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "base/text.h"

namespace deeptide::world {
namespace {

constexpr auto kGrace =
    std::chrono::milliseconds(300);  // lets ranks that time out together write before any rank reads

/// Keeps the message of a torch store error, without its stack trace.
std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, std::min<size_t>(text.find('\n'), 200));
}

std::optional<std::string> read_if_there(c10d::Store& store, const std::string& key) {
  if (!store.check({key})) return std::nullopt;
  return to_text(store.get(key));
}

}  // namespace

FailureBoard::FailureBoard(const World& world, const std::string& prefix)
    : store_(world.store), prefix_(prefix), rank_(world.rank), size_(world.size) {}

std::string FailureBoard::key(const std::string& kind, int rank) const {
  return prefix_ + "/" + kind + "/" + std::to_string(rank);
}

void FailureBoard::report_failure(const std::string& text) noexcept {
  if (size_ == 1) return;
  try {
    std::string own = "rank " + std::to_string(rank_) + " " + text;
    {
      std::lock_guard lock(mutex_);
      if (!cause_.empty()) own += ", having seen: " + cause_;
    }
    store_->set(prefix_ + "/failed", to_bytes(own));
    store_->set(key("place", rank_), to_bytes(text));
  } catch (const std::exception&) {
    // The store's host is gone too. The peers detect that by their own timeouts.
  }
}

void FailureBoard::note_cause(const std::string& cause) noexcept {
  constexpr size_t kLongest = 400;
  std::lock_guard lock(mutex_);
  if (cause_.empty()) cause_ = cause.substr(0, kLongest);
}

std::optional<std::string> FailureBoard::failure() noexcept {
  try {
    return read_if_there(*store_, prefix_ + "/failed");
  } catch (const std::exception& error) {
    return "the store is unreachable (" + first_line(error) + "); rank 0 has probably ended";
  }
}

std::string FailureBoard::diagnose(const std::string& own_place) noexcept {
  try {
    store_->set(key("place", rank_), to_bytes(own_place));
    std::this_thread::sleep_for(kGrace);
    std::string missing, placed;
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      const auto place = read_if_there(*store_, key("place", r));
      if (place) {
        placed += "; rank " + std::to_string(r) + ": " + *place;
      } else {
        missing += (missing.empty() ? "" : ", ") + std::to_string(r);
      }
    }
    if (missing.empty()) return "every rank is waiting" + placed;
    return "no report from rank " + missing + placed;
  } catch (const std::exception&) {
    return "the store is unreachable; rank 0 has probably ended";
  }
}

}  // namespace deeptide::world
