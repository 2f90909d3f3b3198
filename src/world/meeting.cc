// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Uses three keys of the store: hello, sign in, welcome.
#include "world/meeting.h"

#include <limits.h>
#include <unistd.h>

#include <sstream>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "base/sha256.h"
#include "base/text.h"
#include "world/store_wait.h"

using c10d::Store;
using std::chrono::milliseconds;

namespace deeptide::world {
namespace {

const std::string kHello = "deeptide/hello";
const std::string kWelcome = "deeptide/welcome";
constexpr const char* kCheckPort = "check that no other job uses this address and port";
const std::string kOpen = "open";  // replaces a proof if there is no token

std::string key_of(int rank) { return "deeptide/rank/" + std::to_string(rank); }

std::string own_name() {
  char host[HOST_NAME_MAX + 1] = {};
  ::gethostname(host, sizeof host - 1);
  return std::string(host) + ":" + std::to_string(::getpid());
}

class Meeting {
 public:
  Meeting(Store& store, int rank, int size, const std::string& token, milliseconds timeout)
      : store_(store), rank_(rank), size_(size), token_(token), timeout_(timeout) {}

  /// In a second meeting, a process finds its own first hello.
  void say_hello() {
    nonce_ = random_hex(16);
    const std::string hello = std::to_string(size_) + " " + nonce_ + " " + proof("hello");
    understand(to_text(store_.compareSet(kHello, {}, to_bytes(hello))));
  }

  void hear_hello() { understand(wait_for(kHello, "rank 0 did not answer")); }

  void sign_in() {
    const std::string own = own_name() + " " + proof(key_of(rank_));
    const std::string written = to_text(store_.compareSet(key_of(rank_), {}, to_bytes(own)));
    if (written == own) return;
    throw ConfigError("two processes claim rank " + std::to_string(rank_) + ": " +
                      written.substr(0, written.find(' ')) + " and " + own_name() +
                      "; give each process its own rank, and " + kCheckPort);
  }

  /// Rank 0 checks every rank's proof before any rank continues.
  void welcome_all() {
    std::vector<std::string> keys;
    for (int rank = 0; rank < size_; ++rank) keys.push_back(key_of(rank));
    try {
      wait_for_keys(store_, keys, timeout_);
    } catch (const c10::Error&) {
      throw CommError("rank 0 waited " + seconds() + " s for the others to sign in; missing: rank " + missing(keys));
    }
    const auto signatures = store_.multiGet(keys);
    for (int rank = 0; rank < size_; ++rank) {
      std::istringstream words(to_text(signatures[rank]));
      std::string name, given;
      words >> name >> given;
      if (equal_in_constant_time(given, proof(keys[rank]))) continue;
      const std::string text = "rank " + std::to_string(rank) + " (" + name +
                               ") did not prove the job's token and is "
                               "refused; its DEEPTIDE_JOB_TOKEN differs from rank 0's";
      store_.set(kWelcome, to_bytes(text));
      throw CommError(text);
    }
    store_.set(kWelcome, to_bytes(proof("welcome")));
  }

  void be_welcomed() {
    const std::string given = wait_for(kWelcome, "rank 0 did not confirm that all ranks have arrived");
    if (!equal_in_constant_time(given, proof("welcome"))) throw CommError(given.substr(0, 300));
  }

  std::string prefix() const { return proof("keys"); }

 private:
  std::string proof(const std::string& purpose) const {
    return token_.empty() ? kOpen : hmac_sha256_hex(token_, purpose + "/" + std::to_string(size_) + "/" + nonce_);
  }

  void understand(const std::string& hello) {
    std::istringstream words(hello);
    int size = 0;
    std::string given;
    words >> size >> nonce_ >> given;
    const std::string own = "rank " + std::to_string(rank_) + " (this process)";
    const std::string cure = std::string("; pass DEEPTIDE_JOB_TOKEN to every rank, and ") + kCheckPort;
    if (token_.empty() && given != kOpen)
      throw CommError("rank 0 expects the job's token, but " + own + " has none" + cure);
    if (!token_.empty() && given == kOpen) throw CommError(own + " holds a job's token, but rank 0 has none" + cure);
    if (size != size_) {
      throw ConfigError(own + " was started in a world of " + std::to_string(size_) + ", but rank 0 in one of " +
                        std::to_string(size) + "; start all ranks with the same launcher, and " + kCheckPort);
    }
    if (!equal_in_constant_time(given, proof("hello"))) {
      throw CommError(own + " and rank 0 hold different job tokens" + cure);
    }
  }

  std::string wait_for(const std::string& key, const std::string& complaint) {
    try {
      wait_for_keys(store_, {key}, timeout_);
    } catch (const c10::Error&) {
      throw CommError("rank " + std::to_string(rank_) + " reached the store, but " + complaint + " within " +
                      seconds() + " s; does this address belong to this job's Deeptide store?");
    }
    return to_text(store_.get(key));
  }

  std::string missing(const std::vector<std::string>& keys) {
    constexpr int kShown = 20;
    std::string text;
    int count = 0;
    for (int rank = 0; rank < size_; ++rank) {
      if (store_.check({keys[rank]}) || ++count > kShown) continue;
      text += (text.empty() ? "" : ", ") + std::to_string(rank);
    }
    return count > kShown ? text + " and " + std::to_string(count - kShown) + " more" : text;
  }

  std::string seconds() const { return std::to_string(timeout_.count() / 1000); }

  Store& store_;
  int rank_, size_;
  const std::string& token_;
  milliseconds timeout_;
  std::string nonce_;
};

}  // namespace

c10::intrusive_ptr<Store> meet(const c10::intrusive_ptr<Store>& store, int rank, int size, const std::string& token,
                               milliseconds timeout) {
  Meeting meeting(*store, rank, size, token, timeout);
  rank == 0 ? meeting.say_hello() : meeting.hear_hello();
  meeting.sign_in();
  if (token.empty()) return store;
  rank == 0 ? meeting.welcome_all() : meeting.be_welcomed();
  return c10::make_intrusive<c10d::PrefixStore>(meeting.prefix(), store);
}

}  // namespace deeptide::world
