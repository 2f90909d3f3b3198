// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Keeps failure reports in the world's store.
#include "world/failure_board.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "base/libraries/format.h"
#include "base/text.h"

namespace deeptide::world {

using std::chrono::milliseconds;

namespace {

constexpr auto kAnswers = 2 * kPollFailures + milliseconds(50);  // for the others' answers
constexpr milliseconds kLook{10};
constexpr char kStoreLost[] = "rank 0 has probably ended, perhaps because another rank did: see its error";
constexpr char kTakenBack[] = "-";  // in an error's place
// Keys of all engines: a rank that waits in one of them tells where, and when, once a rank asks in another.
constexpr char kElsewhereWanted[] = "deeptide/elsewhere/wanted";
constexpr char kElsewhere[] = "deeptide/elsewhere/";

constexpr int64_t kFresh = 30;  // seconds: an older answer is of an earlier question, or of an earlier attempt

/// By rank, since ranks may be threads.
struct Engines {
  std::mutex mutex;
  std::map<int, int64_t> made, alive;
};

/// Never destroyed: engines may outlive static objects.
Engines& engines() {
  static auto* const all = new Engines;
  return *all;
}

int64_t seconds_now() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string with_time(const std::string& place) { return std::to_string(seconds_now()) + " " + place; }

/// The place, if it was told lately.
std::optional<std::string> fresh_place(const std::optional<std::string>& told) {
  if (!told || seconds_now() - std::strtoll(told->c_str(), nullptr, 10) > kFresh) return std::nullopt;
  return told->substr(told->find(' ') + 1);
}

c10::intrusive_ptr<c10d::Store> below_prefixes(const c10::intrusive_ptr<c10d::Store>& store) {
  auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
  return prefixed == nullptr ? store : prefixed->getUnderlyingNonPrefixStore();
}

/// Keeps the message of an error, without the stack trace that torch's have.
std::string first_line(const std::string& text) { return text.substr(0, std::min<size_t>(text.find('\n'), 200)); }

std::optional<std::string> read_if_there(c10d::Store& store, const std::string& key) {
  if (!store.check({key})) return std::nullopt;
  return to_text(store.get(key));
}

}  // namespace

FailureBoard::FailureBoard(const World& world, const std::string& prefix, milliseconds grace,
                           const std::optional<Mesh>& mesh)
    : store_(world.store),
      prefix_(prefix),
      rank_(world.rank),
      size_(world.size),
      mesh_(mesh.value_or(Mesh::data_parallel(world.size))),
      grace_(grace),
      process_(::getpid()),
      common_(below_prefixes(world.store)) {}

bool FailureBoard::has_listeners() const { return size_ > 1 && ::getpid() == process_; }

FailureBoard::~FailureBoard() {
  const std::lock_guard lock(engines().mutex);
  if (!engine_.empty()) --engines().alive[rank_];
}

void FailureBoard::name_engine(const std::string& model) {
  const std::lock_guard lock(engines().mutex);
  ++engines().alive[rank_];
  engine_ = format_text("engine {}{}, ", ++engines().made[rank_], model.empty() ? "" : " (" + model + ")");
}

std::string FailureBoard::engine() const {
  const std::lock_guard lock(engines().mutex);
  return engines().alive[rank_] > 1 ? engine_ : "";
}

std::string FailureBoard::key(const std::string& kind, int64_t number) const {
  return prefix_ + "/" + kind + "/" + std::to_string(number);
}

void FailureBoard::report_failure(const std::string& text) noexcept { report(text, /*in_good_order=*/false); }

void FailureBoard::report_end(const std::string& text) noexcept { report(text, /*in_good_order=*/true); }

void FailureBoard::report(const std::string& text, bool in_good_order) {
  if (!has_listeners()) return;
  try {
    std::string own = name(rank_) + " " + text;
    bool unexplained = false;
    {
      std::lock_guard lock(mutex_);
      if (!error_.empty()) own = error_ + ", and " + text;
      if (!cause_.empty()) own += ", having seen: " + cause_;
      in_good_order = in_good_order && cause_.empty();
      unexplained = unexplained_;
    }
    if (unexplained) store_->set(prefix_ + "/unexplained", to_bytes("yes"));
    if (!in_good_order) store_->set(prefix_ + "/broken", to_bytes("yes"));
    store_->set(prefix_ + "/failed", to_bytes(own));
    store_->set(prefix_ + "/places", to_bytes("wanted"));
    store_->set(prefix_ + "/news", to_bytes("yes"));
    store_->set(key("place", rank_), to_bytes(text));
    store_->set(key("ended", rank_), to_bytes("yes"));
  } catch (const std::exception&) {
    // The store's host is gone too. The peers detect that by their own timeouts.
  }
}

void FailureBoard::report_error(const std::string& event, const std::string& text) noexcept {
  if (!has_listeners()) return;
  try {
    std::unique_lock lock(mutex_);
    if (!cause_.empty()) {
      lock.unlock();
      return report(event, /*in_good_order=*/false);
    }
    error_ = name(rank_) + " " + event;
    if (const std::string line = first_line(text); !line.empty()) error_ += ": " + line;
    if (!has_error_) error_number_ = store_->add(prefix_ + "/errors", 1);
    has_error_ = true;
    store_->set(key("error", error_number_), to_bytes(error_));
    store_->set(prefix_ + "/news", to_bytes("yes"));
  } catch (const std::exception&) {
    // The store may be gone, as in report.
  }
}

void FailureBoard::withdraw_error() noexcept {
  if (!has_error_ || !has_listeners()) return;
  try {
    const std::lock_guard lock(mutex_);
    has_error_ = false;
    error_.clear();
    store_->set(key("error", error_number_), to_bytes(kTakenBack));
  } catch (const std::exception&) {
    // The store may be gone, as in report.
  }
}

void FailureBoard::report_lost_step(const std::string& why) noexcept {
  if (!has_listeners()) return;
  try {
    has_lost_step_ = true;
    store_->set(key("lost", rank_), to_bytes(name(rank_) + " " + first_line(why)));
    store_->set(prefix_ + "/news", to_bytes("yes"));
  } catch (const std::exception&) {
    // The store may be gone, as in report.
  }
}

void FailureBoard::withdraw_lost_step() noexcept {
  if (!has_lost_step_.exchange(false) || !has_listeners()) return;
  try {
    store_->set(key("lost", rank_), to_bytes(kTakenBack));
  } catch (const std::exception&) {
    // The store may be gone, as in report.
  }
}

std::optional<std::string> FailureBoard::lost_step(const std::vector<int>& ranks) noexcept {
  try {
    if (!store_->check({prefix_ + "/news"})) return std::nullopt;
    const std::lock_guard lock(mutex_);
    for (const int rank : ranks) {
      if (rank == rank_) continue;
      const auto report = read_if_there(*store_, key("lost", rank));
      if (!report || *report == kTakenBack) {
        lost_seen_.erase(rank);
        continue;
      }
      const auto now = std::chrono::steady_clock::now();
      if (now - lost_seen_.emplace(rank, now).first->second >= grace_) {
        return *report + ", in the middle of a step, and will not send what this rank waits for";
      }
    }
  } catch (const std::exception&) {
    // The store may be gone: others say so.
  }
  return std::nullopt;
}

void FailureBoard::wait_for_ends(milliseconds limit) noexcept {
  const auto end = std::chrono::steady_clock::now() + limit;
  const auto have_ended = [&] {
    for (int rank = 0; rank < size_; ++rank) {
      if (rank != rank_ && !has_ended(rank)) return false;
    }
    return true;
  };
  try {
    while (std::chrono::steady_clock::now() < end && !have_ended()) std::this_thread::sleep_for(kLook);
  } catch (const std::exception&) {
    // There is nobody left to wait for.
  }
}

/// Reads other ranks' errors. They are numbered in the order in which they were raised: what was taken back is read
/// once.
std::optional<std::string> FailureBoard::earliest_error(milliseconds grace) {
  const std::lock_guard lock(mutex_);
  const int64_t last = store_->add(prefix_ + "/errors", 0);
  for (int64_t number = first_open_; number <= last; ++number) {
    if (has_error_ && number == error_number_) continue;
    const auto error = read_if_there(*store_, key("error", number));
    if (!error) continue;  // under way
    if (*error == kTakenBack) {
      first_seen_.erase(number);
      if (number == first_open_) ++first_open_;
      continue;
    }
    const auto now = std::chrono::steady_clock::now();
    if (now - first_seen_.emplace(number, now).first->second >= grace) return error;
  }
  return std::nullopt;
}

std::optional<std::string> FailureBoard::error() noexcept {
  try {
    if (!store_->check({prefix_ + "/news"})) return std::nullopt;
    return earliest_error(milliseconds(0));
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

bool FailureBoard::has_ended(int rank) { return store_->check({key("ended", rank)}); }

void FailureBoard::note_cause(const std::string& cause) noexcept {
  constexpr size_t kLongest = 400;
  std::lock_guard lock(mutex_);
  if (cause_.empty()) cause_ = cause.substr(0, kLongest);
}

std::optional<std::string> FailureBoard::failure(const std::string& own_place) noexcept {
  try {
    answer_other_engines(own_place);
    if (!store_->check({prefix_ + "/news"})) return std::nullopt;  // all that a poll costs while all is well
    const bool wanted = !own_place.empty() && store_->check({prefix_ + "/places"});
    if (wanted) store_->set(key("place", rank_), to_bytes(own_place));
    auto report = read_if_there(*store_, prefix_ + "/failed");
    if (!report || !store_->check({prefix_ + "/broken"})) {
      // A rank that ended in good order keeps nobody waiting.
      if (const auto error = earliest_error(grace_)) {
        return *error + format_text(", and has not gone on within {:g} s (\"deeptide\": {{\"error_grace\": seconds}})",
                                    std::chrono::duration<double>(grace_).count());
      }
    }
    if (!report || !store_->check({prefix_ + "/unexplained"})) return report;
    // That rank may have looked before others reported; of them only those that ended it are still silent.
    const std::string missing = read_reports().missing;
    if (!missing.empty()) *report += "; by now no report from rank " + missing;
    return report;
  } catch (const std::exception& error) {
    return "the store is unreachable (" + first_line(error.what()) + "); " + kStoreLost;
  }
}

std::optional<std::string> FailureBoard::failure_among(const std::vector<int>& ranks,
                                                       const std::string& own_place) noexcept {
  auto report = failure(own_place);
  if (!report || is_failure() || std::ssize(ranks) == size_) return report;
  try {
    for (const int rank : ranks) {
      if (rank == rank_ || !has_ended(rank)) continue;
      return name(rank) + " " + to_text(store_->get(key("place", rank)));
    }
  } catch (const std::exception&) {
    return report;  // the store ends
  }
  return std::nullopt;
}

bool FailureBoard::is_failure() noexcept {
  try {
    return store_->check({prefix_ + "/broken"}) || earliest_error(grace_);
  } catch (const std::exception&) {
    return true;
  }
}

void FailureBoard::answer_other_engines(const std::string& own_place) {
  if (own_place.empty() || !common_->check({kElsewhereWanted})) return;
  common_->set(kElsewhere + std::to_string(rank_), to_bytes(with_time(own_place)));
}

/// Reads other ranks' reports.
FailureBoard::Reports FailureBoard::read_reports(const FindProcess& find_process) {
  Reports reports;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    const auto place = read_if_there(*store_, key("place", r));
    if (place) {
      reports.places += "; " + name(r) + ": " + *place;
    } else if (const auto elsewhere = fresh_place(read_if_there(*common_, kElsewhere + std::to_string(r)))) {
      reports.places += "; " + name(r) + " is in another engine and " + *elsewhere;
    } else {
      reports.missing += (reports.missing.empty() ? "" : ", ") + std::to_string(r) + mesh_.place(r);
      if (const auto process = find_process ? find_process(r) : std::nullopt) {
        reports.missing += format_text(" (alive as process {}: it computes, or its program waits elsewhere)", *process);
      }
    }
  }
  return reports;
}

bool FailureBoard::is_reachable() noexcept {
  try {
    store_->check({prefix_ + "/news"});
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

std::string FailureBoard::diagnose(const std::string& own_place, const FindCause& find_cause,
                                   const FindProcess& find_process) noexcept {
  const auto end = std::chrono::steady_clock::now() + kAnswers;
  std::optional<std::string> known;
  const auto find = [&] {
    while (find_cause && !known && !(known = find_cause()) && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(kLook);
    }
  };
  try {
    store_->set(key("place", rank_), to_bytes(own_place));
    store_->set(prefix_ + "/places", to_bytes("wanted"));
    common_->set(kElsewhere + std::to_string(rank_), to_bytes(with_time(own_place)));
    common_->set(kElsewhereWanted, to_bytes("yes"));
    store_->set(prefix_ + "/news", to_bytes("yes"));
    find();
    const std::string cause = prefix_ + "/cause";
    if (known && !store_->check({cause})) store_->set(cause, to_bytes(*known));
    std::this_thread::sleep_until(end);
    if (const auto first = read_if_there(*store_, cause)) return *first;
    const Reports reports = read_reports(find_process);
    if (reports.missing.empty()) return "every rank is waiting" + reports.places;
    {
      std::lock_guard lock(mutex_);
      if (cause_.empty()) unexplained_ = true;
    }
    return "no report from rank " + reports.missing + reports.places;
  } catch (const std::exception&) {
    find();
    return known ? *known : std::string("the store is unreachable; ") + kStoreLost;
  }
}

}  // namespace deeptide::world
