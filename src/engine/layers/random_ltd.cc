// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Calls a layer with a part of its tokens and puts what it made of them back.
#include "deeptide/random_ltd.h"

#include <algorithm>
#include <string>

#include "config/section.h"
#include "data/section_reader.h"

namespace deeptide {

using at::Tensor;

RandomLtd RandomLtd::from_config(const Config& config, int64_t global_batch) {
  const std::string path = "data_efficiency.data_routing.random_ltd";
  const JsonValue value = config::section_with_defaults(config, path);
  const data::SectionReader section(value, path);
  RandomLtdSchedule schedule = RandomLtdSchedule::from_config(config, global_batch);
  std::vector<int64_t> layers = section.integers("random_ltd_layer_id");
  if (std::ssize(layers) != schedule.numbers().dropping_layers) {
    section.fail("random_ltd_layer_id", "names " + std::to_string(layers.size()) +
                                            " layers, expected random_ltd_layer_num, " +
                                            std::to_string(schedule.numbers().dropping_layers));
  }
  return {std::move(schedule),
          {.layers = std::move(layers),
           .is_encoder = section.word("model_type") == "encoder",
           .batch_first = section.word("hidden_state_order") == "batch_seq_dim"}};
}

Tensor RandomLtd::run(int64_t number, const Layer& layer, const Tensor& hidden, bool is_training,
                      const std::optional<Tensor>& mask) const {
  const bool is_batch_first = options_.batch_first;
  const int64_t batch = hidden.size(is_batch_first ? 0 : 1), length = hidden.size(is_batch_first ? 1 : 0);
  const int64_t kept = schedule_.position().length;
  const bool drops = std::ranges::find(options_.layers, number) != options_.layers.end();
  const Tensor whole = mask.value_or(Tensor());
  if (!is_training || !drops || kept >= length) return layer({hidden, whole, {}});
  // Each layer draws by itself, so that a recomputation of one layer finds torch's generator where it was.
  const Tensor indices = ops::sample_tokens(kept, length, batch, 1, hidden.device())[0];
  const Tensor part_mask = whole.defined() ? ops::mask_of_kept(whole, indices, length, options_.is_encoder) : Tensor();
  const Tensor part = layer({ops::gather_tokens(hidden, indices, is_batch_first), part_mask, indices});
  return ops::scatter_tokens(hidden, part, indices, is_batch_first);
}

}  // namespace deeptide
