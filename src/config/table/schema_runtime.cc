// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The table's section of Deeptide's own.
#include "config/table/schema_sections.h"

namespace deeptide::config {

std::vector<Key> runtime_sections() {
  return {
      section("deeptide", "Deeptide's own settings; DeepSpeed has none of them.",
              {
                  number("comm_timeout", 1800.0, "Seconds after which a wait on a peer is an error.").above(0),
                  choice("reduction", "ordered", {"ordered", "transport"},
                         "ordered: gradients are summed in rank order, so a run repeats bit for bit; transport: as the "
                         "transport does it."),
                  choice("reduce_thread", "auto", {"auto", "on", "off"},
                         "Sum gradients on a thread of its own while backward goes on; auto: where a core is idle."),
                  flag("shared_memory", true, "Ranks of one host share memory; false: they talk as if apart."),
                  flag("tune_allocator", true, "Keep large CPU tensors' pages instead of faulting them anew."),
                  integer("unit_size", 0, "Elements of a unit at most; 0: one repeated block.").at_least(0),
                  integer("seed", 0, "Seed of the engine's randomness and of the data order.").at_least(0),
              })};
}

}  // namespace deeptide::config
