// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Binds layouts of block-sparse attention, checks of layers, the section of compression and eigenvalues; operators come
// through torch.ops.
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <array>
#include <utility>
#include <vector>

#include "bindings.h"
#include "deeptide/binding.h"
#include "deeptide/compression.h"
#include "deeptide/sparse_attention.h"
#include "deeptide/transformer_layer.h"

namespace deeptide::python {

namespace {

py::typing::Dict<py::str, py::object> section_of(const Config& config) {
  const SparsityConfig& from = config.sparse_attention();
  constexpr std::array kModes = {"dense", "fixed", "variable", "bigbird", "bslongformer", "local_sliding_window"};
  py::typing::Dict<py::str, py::object> section;
  section["mode"] = kModes.at(static_cast<size_t>(from.mode));
  section["block"] = from.block;
  section["different_layout_per_head"] = from.different_layout_per_head;
  section["num_local_blocks"] = from.num_local_blocks;
  section["num_global_blocks"] = from.num_global_blocks;
  section["attention"] = from.attention == AttentionDirection::unidirectional ? "unidirectional" : "bidirectional";
  section["horizontal_global_attention"] = from.horizontal_global_attention;
  section["num_different_global_patterns"] = from.num_different_global_patterns;
  section["num_random_blocks"] = from.num_random_blocks;
  section["local_window_blocks"] = from.local_window_blocks;
  section["global_block_indices"] = from.global_block_indices;
  section["global_block_end_indices"] = from.global_block_end_indices;
  section["num_sliding_window_blocks"] = from.num_sliding_window_blocks;
  return section;
}

}  // namespace

void bind_ops(py::module_& module) {
  module.def("sparse_attention_section", &section_of, py::arg("config"));
  module.def(
      "check_sparsity", [](const Config& config) { ops::check_sparsity(config.sparse_attention()); },
      py::arg("config"));
  module.def(
      "sparse_layout",
      [](const Config& config, int64_t num_heads, int64_t sequence_length, const ops::RandomSample& sample) {
        return ops::sparse_layout(config.sparse_attention(), num_heads, sequence_length, sample);
      },
      py::arg("config"), py::arg("num_heads"), py::arg("sequence_length"), py::arg("sample"));
  module.def("compression_section", &binding::compression_section, py::arg("config"));
  module.def("compression_groups", &binding::compression_groups, py::arg("config"));
  module.def(
      "largest_eigenvalue",
      [](const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& gradients, int64_t max_iter,
         double tol, double stability, double scale) {
        const Eigenvalue found = largest_eigenvalue(
            parameters, gradients, {.max_iter = max_iter, .tol = tol, .stability = stability, .scale = scale});
        return std::pair(found.value, found.iterations);
      },
      py::arg("parameters"), py::arg("gradients"), py::arg("max_iter"), py::arg("tol"), py::arg("stability"),
      py::arg("scale"), NoGil());
  module.def(
      "check_transformer_layer",
      [](int64_t hidden_size, int64_t heads, double attn_dropout_ratio, double hidden_dropout_ratio,
         int64_t num_hidden_layers, double initializer_range, bool adjust_init_range) {
        check({.hidden_size = hidden_size,
               .heads = heads,
               .attn_dropout_ratio = attn_dropout_ratio,
               .hidden_dropout_ratio = hidden_dropout_ratio,
               .num_hidden_layers = num_hidden_layers,
               .initializer_range = initializer_range,
               .adjust_init_range = adjust_init_range});
      },
      py::arg("hidden_size"), py::arg("heads"), py::arg("attn_dropout_ratio"), py::arg("hidden_dropout_ratio"),
      py::arg("num_hidden_layers"), py::arg("initializer_range"), py::arg("adjust_init_range"));
}

}  // namespace deeptide::python
