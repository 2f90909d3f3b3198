// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One flag for the process, set by the signals' handler.
#include "engine/run/preemption.h"

#include <csignal>
#include <map>
#include <mutex>

#include "base/log.h"

namespace deeptide::engine {
namespace {

using std::chrono::steady_clock;

constexpr const char* kKey = "preempted";
constexpr std::chrono::seconds kLookEvery{1};

volatile std::sig_atomic_t g_signal = 0;  // that arrived

std::mutex g_signals;
std::map<int, int> g_users;                  // engines that want a signal
std::map<int, struct sigaction> g_previous;  // of those signals

void note_signal(int signal) { g_signal = signal; }

int number_of(const std::string& name) {
  if (name == "SIGTERM") return SIGTERM;
  if (name == "SIGUSR1") return SIGUSR1;
  if (name == "SIGUSR2") return SIGUSR2;
  throw ConfigError("checkpoint.on_preempt.signals: got '" + name + "', expected SIGTERM, SIGUSR1 or SIGUSR2");
}

void take(int signal) {
  const std::lock_guard lock(g_signals);
  if (g_users[signal]++ > 0) return;
  struct sigaction ours = {};
  ours.sa_handler = note_signal;
  ours.sa_flags = SA_RESTART;
  ::sigaction(signal, &ours, &g_previous[signal]);
}

void give_back(int signal) {
  const std::lock_guard lock(g_signals);
  if (--g_users[signal] == 0) ::sigaction(signal, &g_previous[signal], nullptr);
}

}  // namespace

Preemption::Preemption(Channels& channels, const CheckpointConfig& config) : channels_(channels), config_(config) {
  if (!config.handles_preemption()) return;
  for (const std::string& name : config.preempt_signals) signals_.push_back(number_of(name));
  for (const int signal : signals_) take(signal);
}

Preemption::~Preemption() {
  for (const int signal : signals_) give_back(signal);
  if (agreed_) g_signal = 0;
}

bool Preemption::is_asked() {
  if (signals_.empty()) return false;
  if (g_signal != 0 && !asked_) {
    asked_ = true;
    asked_at_ = steady_clock::now();
    log(LogLevel::warning, channels_.mesh().name(channels_.world().rank) + " got signal " +
                               std::to_string(static_cast<int>(g_signal)) + ": all ranks save to " +
                               config_.preempt_folder + " and end");
    look();  // at once: this rank may be about to wait for one that evaluates
  }
  return asked_;
}

/// Ranks that evaluate alone, or that got no signal, hear of it here.
void Preemption::look() {
  const auto now = steady_clock::now();
  if (told_ || (!asked_ && now - looked_at_ < kLookEvery)) return;
  looked_at_ = now;
  try {
    const auto& store = channels_.world().store;
    if (is_asked()) {
      store->set(kKey, std::vector<uint8_t>{1});
      told_ = true;
    } else if (store->check({kKey})) {
      asked_ = told_ = true;
      asked_at_ = now;
    }
  } catch (const std::exception&) {  // the store has ended, and with it the run
  }
}

bool Preemption::is_pressing() {
  if (signals_.empty() || agreed_) return false;
  look();
  const auto half = std::chrono::duration<double>(config_.preempt_deadline_s / 2);
  return asked_ && steady_clock::now() - asked_at_ >= half;
}

}  // namespace deeptide::engine
