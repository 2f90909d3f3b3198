// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Gives an engine a schedule of compression to keep.
#include "deeptide/compression.h"

#include "engine/engine_impl.h"

namespace deeptide {

void Compression::follow(Engine& engine) {
  engine::Stepper& stepper = *EngineAccess::impl_of(engine).stepper;
  TORCH_CHECK_VALUE(!stepper.compression() || stepper.compression().get() == this,
                    "Compression::follow: the engine keeps another model's schedule; make one engine for each model");
  share_masks([&](const at::Tensor& mask, int source) { engine.broadcast(mask, source); });
  stepper.set_compression(shared_from_this());
}

}  // namespace deeptide
