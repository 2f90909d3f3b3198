// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Opens, answers and confirms an attempt with one key each.
#include "world/attempt.h"

#include <limits.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "base/interrupt.h"
#include "base/sha256.h"
#include "base/text.h"
#include "world/store_wait.h"

using c10d::Store;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

namespace deeptide::world {
namespace {

const std::string kOpened = "deeptide/attempt";  // the name of rank 0's process

std::string answer_key(const std::string& attempt, int rank) {
  return kOpened + "/" + attempt + "/rank/" + std::to_string(rank);
}

/// Its value: the processes that take part, one line per rank.
std::string complete_key(const std::string& attempt) { return kOpened + "/" + attempt + "/complete"; }

/// Whether the complete attempt has this process as this rank. One that ended before the rank answered does not: the
/// rank may not even have been part of its world.
bool takes_part(Store& store, const std::string& attempt, int rank, const std::string& process) {
  const auto processes = split(to_text(store.get(complete_key(attempt))), '\n');
  return rank < static_cast<int>(processes.size()) && processes[static_cast<size_t>(rank)] == process;
}

std::string seconds(milliseconds time) { return std::to_string(time.count() / 1000) + " s"; }

void open_attempt(Store& store, int size, milliseconds timeout, const std::string& process) {
  store.set(kOpened, to_bytes(process));
  std::string processes = process;
  for (int rank = 1; rank < size; ++rank) {
    try {
      wait_for_keys(store, {answer_key(process, rank)}, timeout);
    } catch (const c10::Error& error) {
      throw CommError("rank 0 waited " + seconds(timeout) + " for rank " + std::to_string(rank) +
                      " to join this attempt of the job: " + std::string(error.what()).substr(0, 200) +
                      ". Check that all ranks have been started.");
    }
    processes += "\n" + to_text(store.get(answer_key(process, rank)));
  }
  store.set(complete_key(process), to_bytes(processes));
}

/// An attempt that this rank's predecessor answered is over: waits for the next. Returns the attempt that is complete.
std::string answer_attempt(Store& store, int rank, milliseconds timeout, const std::string& process) {
  const auto end = steady_clock::now() + timeout;
  std::string attempt, answered;
  auto nap = kShortestNap;
  for (;;) {
    if (store.check({kOpened})) attempt = to_text(store.get(kOpened));
    if (!attempt.empty()) answered = to_text(store.compareSet(answer_key(attempt, rank), {}, to_bytes(process)));
    const bool complete = answered == process && store.check({complete_key(attempt)});
    if (complete && takes_part(store, attempt, rank, process)) return attempt;
    if (steady_clock::now() > end) break;
    check_interrupts();
    std::this_thread::sleep_for(nap);
    nap = std::min(2 * nap, kLongestNap);
  }
  if (!answered.empty() && answered != process) {
    throw ConfigError("two processes claim rank " + std::to_string(rank) + ": " + answered + " and " + process +
                      ", and rank 0 opened no other attempt of the job within " + seconds(timeout) +
                      "; each needs a rank of its own, or another job holds this address and port");
  }
  throw CommError("rank " + std::to_string(rank) + " reached the agent's store, but " +
                  (attempt.empty() ? "rank 0 did not come" : "not all ranks came") + " within " + seconds(timeout) +
                  ". Check that all ranks have been started.");
}

}  // namespace

std::string process_name() {
  static const std::string nonce = random_hex(8);  // a forked child has its parent's, but another number
  char host[HOST_NAME_MAX + 1] = {};
  ::gethostname(host, sizeof host - 1);
  return std::string(host) + ":" + std::to_string(::getpid()) + ":" + nonce;
}

c10::intrusive_ptr<Store> join_attempt(const c10::intrusive_ptr<Store>& store, int rank, int size, milliseconds timeout,
                                       const std::string& process) {
  std::string attempt = process;
  if (rank == 0) {
    open_attempt(*store, size, timeout, process);
  } else {
    attempt = answer_attempt(*store, rank, timeout, process);
  }
  return c10::make_intrusive<c10d::PrefixStore>(kOpened + "/" + attempt, store);
}

}  // namespace deeptide::world
