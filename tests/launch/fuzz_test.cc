// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Everything that reads what others wrote, fed with mutations: an answer that holds what it must, or a UsageError.
// DEEPTIDE_FUZZ_SECONDS sets how long (default 2 s each); the seed of a failure is in its message.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <random>

#include "base/slurm_lists.h"
#include "launch/output/failure_report.h"
#include "launch/plan/exports.h"
#include "launch/plan/hostfile.h"
#include "launch/plan/options.h"
#include "launch/process/memory_kills.h"
#include "launch/system/shell.h"
#include "launch/system/usage_error.h"
#include "launch/watch/hang_report.h"
#include "launch/watch/state_exchange.h"
#include "launch/wire/frame.h"
#include "launch/wire/messages.h"

namespace deeptide::launch {
namespace {

using Random = std::mt19937;

double fuzz_seconds() {
  const char* text = std::getenv("DEEPTIDE_FUZZ_SECONDS");
  return text ? std::atof(text) : 2.0;
}

std::string mutate(std::string text, const std::vector<std::string>& words, Random& random) {
  for (int changes = static_cast<int>(random() % 8); changes-- > 0;) {
    const size_t at = text.empty() ? 0 : random() % (text.size() + 1);
    switch (random() % 4) {
      case 0:
        text.insert(at, words[random() % words.size()]);
        break;
      case 1:
        text.insert(at, 1, static_cast<char>(random()));
        break;
      case 2:
        text.erase(at, random() % 5);
        break;
      default:
        if (at < text.size()) text[at] = static_cast<char>(random());
    }
  }
  return text;
}

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines(1);
  for (char c : text) {
    if (c == '\n') {
      lines.emplace_back();
    } else {
      lines.back() += c;
    }
  }
  return lines;
}

void fuzz(const std::vector<std::string>& words, const std::function<void(const std::string&, Random&)>& target) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(fuzz_seconds());
  size_t runs = 0;
  for (unsigned seed = 0; std::chrono::steady_clock::now() < end; ++seed, ++runs) {
    Random random(seed);
    const std::string text = mutate(words[random() % words.size()], words, random);
    try {
      target(text, random);
    } catch (const UsageError&) {
    } catch (const std::exception& error) {
      FAIL() << "seed " << seed << ": " << error.what();
    }
  }
  EXPECT_GT(runs, 100u);
}

TEST(Fuzz, Hostfile) {
  fuzz({"a slots=2\n", "b slots=10 # x\nc slots=1\n", "slots=", "\r\n", "max_slots=3", "99999999999999999999", "-"},
       [](const std::string& text, Random&) {
         for (const Host& host : parse_hostfile(text, "f")) {
           ASSERT_FALSE(host.name.empty());
           ASSERT_NE(host.name[0], '-');
           ASSERT_GE(host.slots.size(), 1u);
         }
       });
}

TEST(Fuzz, IncludeAndExclude) {
  const auto hosts = parse_hostfile("a slots=2\nb slots=4\nfe80::1 slots=2\n", "f");
  fuzz({"a", "b:0-3", "a:0,1@b:2", "@", ":", ",", "-", "fe80::1:0", "9999999999"},
       [&](const std::string& text, Random& random) {
         HostFilter filter;
         (random() % 2 ? filter.include : filter.exclude) = text;
         const auto left = filter_hosts(hosts, filter);
         ASSERT_GE(num_slots(left), 1);
         ASSERT_LE(num_slots(left), 8);
       });
}

TEST(Fuzz, ShellWords) {
  fuzz({"a 'b c' \"d\"", "'", "\"", "\\", "$x", " "}, [](const std::string& text, Random&) {
    ASSERT_EQ(shell_split(shell_quote(text), "x"), std::vector<std::string>{text});
    const auto words = shell_split(text, "x");
    ASSERT_EQ(shell_split(shell_join(words), "x"), words);
  });
}

TEST(Fuzz, VariableFiles) {
  fuzz({"A=b\n", "export X='y'\n", "=", "#", "export ", "\""}, [](const std::string& text, Random&) {
    for (const auto& [name, value] : parse_env_file(text, "f")) ASSERT_FALSE(name.empty());
  });
}

TEST(Fuzz, CommandLine) {
  fuzz({"--num_gpus\n2\ntrain.py", "-H\nx\n", "--include=a:0", "--launcher\nssh\n", "--grace\n", "1e9", "-q\n", "\n"},
       [](const std::string& text, Random&) {
         const std::vector<std::string> words = split_lines(text);
         const auto options = parse_options(words);
         ASSERT_TRUE(!options || !options->command.empty());  // none: --help or --version came about
       });
}

TEST(Fuzz, Frames) {
  const std::string frame = encode({FrameKind::output, 3, "hello"});
  fuzz({std::string(kPreamble) + frame, frame, encode({FrameKind::hello, -1, "{}"}), "\n"},
       [](const std::string& text, Random& random) {
         FrameReader reader(random() % 2);
         try {
           for (size_t at = 0; at < text.size();) {
             const size_t piece = 1 + random() % 9;
             reader.feed(std::string_view(text).substr(at, piece));
             at += piece;
             while (reader.next()) continue;
           }
         } catch (const std::runtime_error&) {  // out of step: the launcher gives the host up
         }
       });
}

TEST(Fuzz, WholeFramesComeOutAsTheyWentInHoweverTheStreamIsCut) {
  fuzz({"hello", "\n", std::string(300, 'x'), std::string(kPreamble)}, [](const std::string& text, Random& random) {
    std::vector<Frame> sent, received;
    std::string stream;
    for (int frames = static_cast<int>(random() % 5); frames-- > 0;) {
      const auto kind = static_cast<FrameKind>(random() % (static_cast<unsigned>(FrameKind::beat) + 1));
      sent.push_back({kind, static_cast<int32_t>(random() % 9) - 1, text.substr(0, random() % (text.size() + 1))});
      stream += encode(sent.back());
    }
    const bool preamble = random() % 2;
    if (preamble) stream.insert(0, "motd" + std::string(kPreamble));
    FrameReader reader(preamble);
    for (size_t at = 0, piece = 0; at < stream.size(); at += piece) {
      piece = 1 + random() % 40;
      reader.feed(std::string_view(stream).substr(at, piece));
      while (auto frame = reader.next()) received.push_back(std::move(*frame));
    }
    ASSERT_EQ(received, sent);
  });
}

/// A payload that was understood means what its own encoding means.
template <typename Message>
void expect_stable(const std::string& text) {
  std::string understood;
  try {
    understood = encode(decode<Message>(text));
  } catch (const std::exception&) {  // the agent refuses, the launcher gives the host up
    return;
  }
  ASSERT_EQ(encode(decode<Message>(understood)), understood);
}

TEST(Fuzz, Payloads) {
  AgentJob job;
  job.options.command = {"x", "\xff"};
  RankState state;
  state.phase = "backward";
  state.newest["gathers"] = {7, "all-gather"};
  state.waiting = CollectiveState{"all-gather", "gathers", "backward", "h.1", "h.1.w", 7, 4096, 8, 12.5};
  const std::vector<std::string> seeds{encode(job),
                                       encode(RankExit{}),
                                       encode(StateAnswer{1, {state}}),
                                       encode(StateQuestion{1, {2}}),
                                       "{",
                                       "\"",
                                       "null",
                                       "-1",
                                       "1e999"};
  fuzz(seeds, [](const std::string& text, Random&) {
    expect_stable<AgentJob>(text);
    expect_stable<RankExit>(text);
    expect_stable<StateQuestion>(text);
    expect_stable<StateAnswer>(text);
    try {
      hang_report(decode<StateAnswer>(text).states);
    } catch (const std::exception&) {
    }
  });
}

TEST(Fuzz, RanksLastWords) {
  fuzz(
      {"Traceback (most recent call last):", "    x()", "ValueError: y", "  what():  z", "terminate called ", ":", " "},
      [](const std::string& text, Random&) {
        const auto cut = split_lines(text);
        const std::deque<std::string> lines(cut.begin(), cut.end());
        if (const auto error = last_error(lines)) {
          ASSERT_TRUE(std::any_of(cut.begin(), cut.end(), [&](const std::string& line) {
            return line.find(*error) != std::string::npos;
          })) << *error;
        }
        ASSERT_GE(resident_at_kill(text, 1), -1);
        tasks_of_node(text, 1);
      });
}

}  // namespace
}  // namespace deeptide::launch
