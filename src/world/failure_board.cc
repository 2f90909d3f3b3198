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

constexpr auto kGrace = 2 * kPollFailures + std::chrono::milliseconds(50);  // for the others' answers

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

void FailureBoard::report_failure(const std::string& text) noexcept { report(text, /*in_good_order=*/false); }

void FailureBoard::report_end(const std::string& text) noexcept { report(text, /*in_good_order=*/true); }

void FailureBoard::report(const std::string& text, bool in_good_order) {
  if (size_ == 1) return;
  try {
    std::string own = "rank " + std::to_string(rank_) + " " + text;
    bool unexplained = false;
    {
      std::lock_guard lock(mutex_);
      if (!cause_.empty()) own += ", having seen: " + cause_;
      in_good_order = in_good_order && cause_.empty();
      unexplained = unexplained_;
    }
    if (unexplained) store_->set(prefix_ + "/unexplained", to_bytes("yes"));
    if (!in_good_order) store_->set(prefix_ + "/broken", to_bytes("yes"));
    store_->set(prefix_ + "/failed", to_bytes(own));
    store_->set(prefix_ + "/news", to_bytes("yes"));
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

std::optional<std::string> FailureBoard::failure(const std::string& own_place) noexcept {
  try {
    if (!store_->check({prefix_ + "/news"})) return std::nullopt;  // all that a poll costs while all is well
    if (!own_place.empty()) store_->set(key("place", rank_), to_bytes(own_place));
    auto report = read_if_there(*store_, prefix_ + "/failed");
    if (!report || !store_->check({prefix_ + "/unexplained"})) return report;
    // That rank may have looked before others reported; of them only those that ended it are still silent.
    const std::string missing = read_reports().missing;
    if (!missing.empty()) *report += "; by now no report from rank " + missing;
    return report;
  } catch (const std::exception& error) {
    return "the store is unreachable (" + first_line(error) + "); rank 0 has probably ended";
  }
}

bool FailureBoard::is_failure() noexcept {
  try {
    return store_->check({prefix_ + "/broken"});
  } catch (const std::exception&) {
    return true;
  }
}

/// Of the other ranks.
FailureBoard::Reports FailureBoard::read_reports() {
  Reports reports;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    const auto place = read_if_there(*store_, key("place", r));
    if (place) {
      reports.places += "; rank " + std::to_string(r) + ": " + *place;
    } else {
      reports.missing += (reports.missing.empty() ? "" : ", ") + std::to_string(r);
    }
  }
  return reports;
}

std::string FailureBoard::diagnose(const std::string& own_place) noexcept {
  try {
    store_->set(key("place", rank_), to_bytes(own_place));
    store_->set(prefix_ + "/news", to_bytes("yes"));
    std::this_thread::sleep_for(kGrace);
    const Reports reports = read_reports();
    if (reports.missing.empty()) return "every rank is waiting" + reports.places;
    {
      std::lock_guard lock(mutex_);
      if (cause_.empty()) unexplained_ = true;
    }
    return "no report from rank " + reports.missing + reports.places;
  } catch (const std::exception&) {
    return "the store is unreachable; rank 0 has probably ended";
  }
}

}  // namespace deeptide::world
