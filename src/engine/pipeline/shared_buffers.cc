// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Compares buffers of modules that several stages use before and after a forward.
#include "engine/pipeline/shared_buffers.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include "base/libraries/format.h"

namespace deeptide::engine {

void SharedBuffers::keep() {
  const at::NoGradGuard no_grad;
  kept_.clear();
  for (const PipelineModule::Tie& tie : model_.ties()) {
    for (const auto& item : tie.module->named_buffers()) {
      if (!item.value().defined()) continue;
      kept_.push_back({"tied_modules." + tie.key + "." + item.key(), item.value(), item.value().clone(), tie.stages});
    }
  }
}

void SharedBuffers::check() const {
  for (const Kept& kept : kept_) {
    TORCH_CHECK_VALUE(at::equal(kept.buffer, kept.value), "'", kept.name, "' is written in forward, and stages ",
                      join_text(kept.stages, ", "),
                      " use its module: each stage would have a buffer of its own, and the running statistics of "
                      "neither would be those of the uncut model. Give each stage's layers a module of their own, or "
                      "put them into one stage, as by PipelineOptions::bounds");
  }
}

}  // namespace deeptide::engine
