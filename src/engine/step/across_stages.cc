// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Each rank asks those of the other stages that have its batches: a stage's own ranks know the same already.
#include "engine/step/across_stages.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <set>
#include <sstream>

#include "comm/texts.h"

namespace deeptide::engine {

namespace {

struct Blame {
  static constexpr size_t kNameBytes = 240;  // a longer name is cut

  int32_t rank = -1;
  bool in_forward = false;
  bool is_known = false;
  std::array<char, kNameBytes> parameter{};
};

}  // namespace

void check_stages_train(Stages& stages, int64_t num_trained, const std::string& trained_by) {
  const auto all = stages.exchange(num_trained, {"start", "asking the other stages for trained parameters"});
  TORCH_CHECK_VALUE(std::ranges::any_of(all, [](int64_t each) { return each > 0; }),
                    "the model has no trainable parameters (requires_grad is false on all of each of its ", all.size(),
                    " stages, or no optimizer group has them), but ", trained_by, " configures an optimizer");
}

StageTotals over_stages(Stages& stages, const StageTotals& own) {
  StageTotals all;
  for (const StageTotals& each :
       stages.exchange(own, {"step", "agreeing on the gradient norm with the other stages"})) {
    all.squares += each.squares;
    if (!std::isnan(each.loss)) all.loss = each.loss;
  }
  return all;
}

void agree_on_blame(Stages& stages, StepOutcome& outcome) {
  Blame own{.rank = outcome.rank, .in_forward = outcome.phase == "forward", .is_known = !outcome.parameter.empty()};
  std::strncpy(own.parameter.data(), outcome.parameter.c_str(), Blame::kNameBytes - 1);
  const auto all = stages.exchange(own, {"step", "telling the other stages which gradient is not finite"});
  const auto found = std::find_if(all.rbegin(), all.rend(), [](const Blame& blame) { return blame.is_known; });
  if (found == all.rend()) return;
  outcome.parameter = found->parameter.data();
  outcome.rank = found->rank;
  outcome.phase = found->rank < 0 ? "" : found->in_forward ? "forward" : "backward";
}

bool any_stage(Stages& stages, bool failed, const char* what) {
  const auto all = stages.exchange(static_cast<uint8_t>(failed), {"checkpoint", what});
  return std::any_of(all.begin(), all.end(), [](uint8_t each) { return each != 0; });
}

std::vector<std::string> texts_of_stages(Stages& stages, const std::string& own, const char* what) {
  return comm::exchange_texts(stages, own, {"checkpoint", what});
}

void leave_to_later_stages(Stages& stages, std::vector<NamedTensor>& buffers) {
  std::string own;
  for (const NamedTensor& buffer : buffers) own += buffer.name + "\n";
  const auto texts = texts_of_stages(stages, own, "comparing buffers with the other stages");
  std::set<std::string> later;
  for (auto stage = static_cast<size_t>(stages.index()) + 1; stage < texts.size(); ++stage) {
    std::istringstream lines(texts[stage]);
    for (std::string name; std::getline(lines, name);) later.insert(name);
  }
  std::erase_if(buffers, [&](const NamedTensor& buffer) { return later.count(buffer.name) != 0; });
}

}  // namespace deeptide::engine
