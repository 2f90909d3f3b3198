// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Schedules and samplers of what a step leaves out, and the index files that they read.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "deeptide/binding.h"
#include "deeptide/curriculum_sampler.h"
#include "deeptide/indexed_dataset.h"
#include "deeptide/length_batches.h"
#include "deeptide/packing.h"

namespace deeptide::python {
namespace {

void bind_schedules(py::module_& module) {
  py::class_<CurriculumSchedule>(module, "CurriculumSchedule", "How difficult the samples of a step may be.")
      .def_static("from_config", &CurriculumSchedule::from_config, py::arg("config"))
      .def_static("from_text", &CurriculumSchedule::from_text, py::arg("section"),
                  py::arg("origin") = "curriculum_learning")
      .def("at", &CurriculumSchedule::at, py::arg("step"))
      .def("update", &CurriculumSchedule::update, py::arg("step"))
      .def("set_function", &CurriculumSchedule::set_function, py::arg("function"))
      .def_property_readonly("is_custom", &CurriculumSchedule::is_custom)
      .def_property_readonly("min_difficulty", &CurriculumSchedule::min_difficulty)
      .def_property_readonly("max_difficulty", &CurriculumSchedule::max_difficulty)
      .def("set_current", &CurriculumSchedule::set_current, py::arg("difficulty"))
      .def_property_readonly("current", &CurriculumSchedule::current);
  py::class_<RandomLtdSchedule>(module, "RandomLtdSchedule", "How many tokens the layers of random-LTD keep.")
      .def_static("from_config", &RandomLtdSchedule::from_config, py::arg("config"), py::arg("global_batch"))
      .def("at", &RandomLtdSchedule::at, py::arg("step"))
      .def("update", &RandomLtdSchedule::update, py::arg("step"))
      .def("layer_tokens_after", &RandomLtdSchedule::layer_tokens_after, py::arg("steps"), NoGil())
      .def_property_readonly("max_length", [](const RandomLtdSchedule& s) { return s.numbers().max_length; })
      .def_property_readonly("min_length", [](const RandomLtdSchedule& s) { return s.numbers().min_length; })
      .def_property_readonly("dropping_layers", [](const RandomLtdSchedule& s) { return s.numbers().dropping_layers; })
      .def(
          "set_position",
          [](RandomLtdSchedule& s, int64_t step, int64_t length, int64_t layer_tokens) {
            s.set_position({.step = step, .length = length, .layer_tokens = layer_tokens});
          },
          py::arg("step"), py::arg("length"), py::arg("layer_tokens"))
      .def_property_readonly("position", [](const RandomLtdSchedule& s) {
        const auto at = s.position();
        return std::tuple(at.step, at.length, at.layer_tokens);
      });
  py::class_<ProgressiveLayerDrop>(module, "LayerDropSchedule",
                                   "The share of layers that progressive layer drop keeps.")
      .def(py::init<double, double>(), py::arg("theta") = 0.5, py::arg("gamma") = 0.001)
      .def_static("from_config", &ProgressiveLayerDrop::from_config, py::arg("config"))
      .def("update", &ProgressiveLayerDrop::update, py::arg("step"))
      .def_static("keep_probability", &ProgressiveLayerDrop::keep_probability, py::arg("layer"), py::arg("num_layers"),
                  py::arg("share"))
      .def("drops", &ProgressiveLayerDrop::drops, py::arg("layer"), py::arg("num_layers"))
      .def_property_readonly("theta", &ProgressiveLayerDrop::theta)
      .def_property_readonly("gamma", &ProgressiveLayerDrop::gamma)
      .def("set_current", &ProgressiveLayerDrop::set_current, py::arg("share"))
      .def_property_readonly("current", &ProgressiveLayerDrop::current);
}

using SamplerPlace = std::tuple<int64_t, int64_t, int64_t>;

void bind_sampler(py::module_& module) {
  py::class_<CurriculumSampler>(module, "CurriculumSampler", "Draws a rank's samples in the order of their difficulty.")
      .def(py::init([](const std::string& section, int64_t num_samples, int64_t micro_batch, int64_t accumulation,
                       int rank, int world_size, bool drop_last) {
             return CurriculumSampler(section, num_samples,
                                      {.micro_batch = micro_batch,
                                       .accumulation = accumulation,
                                       .rank = rank,
                                       .world_size = world_size,
                                       .drop_last = drop_last});
           }),
           py::arg("section"), py::arg("num_samples"), py::kw_only(), py::arg("micro_batch") = 1,
           py::arg("accumulation") = 1, py::arg("rank") = 0, py::arg("world_size") = 1, py::arg("drop_last") = true)
      .def("next", &CurriculumSampler::next)
      .def("total_samples", &CurriculumSampler::total_samples)
      .def("position",
           [](const CurriculumSampler& sampler) {
             const auto at = sampler.position();
             return SamplerPlace(at.step, at.offset, at.consumed);
           })
      .def(
          "state",
          [](const CurriculumSampler& sampler, const SamplerPlace& at) {
            return sampler.state({.step = std::get<0>(at), .offset = std::get<1>(at), .consumed = std::get<2>(at)});
          },
          py::arg("position"))
      .def("load_state", &CurriculumSampler::load_state, py::arg("state"))
      .def("set_function", &CurriculumSampler::set_function, py::arg("metric"), py::arg("function"))
      .def("difficulties", &CurriculumSampler::difficulties);
}

py::bytes bytes_of(std::span<const std::byte> bytes) {
  return py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

void bind_files(py::module_& module) {
  py::class_<IndexedDataset>(module, "IndexedDataset", "Rows of integers in NAME.bin and NAME.idx, mapped.")
      .def(py::init<const std::string&>(), py::arg("name"))
      .def("__len__", &IndexedDataset::num_rows)
      .def_property_readonly("type_code", [](const IndexedDataset& rows) { return static_cast<int>(rows.type()); })
      .def("lengths", [](const IndexedDataset& rows) { return bytes_of(rows.lengths_bytes()); })
      .def("documents", &IndexedDataset::documents)
      .def(
          "bytes", [](const IndexedDataset& rows, int64_t row) { return bytes_of(rows.bytes(row)); }, py::arg("row"));
  py::class_<IndexedDatasetWriter>(module, "IndexedDatasetWriter", "Writes NAME.bin and NAME.idx, row by row.")
      .def(py::init([](const std::string& name, int type_code) {
             if (type_code < 1 || type_code > 8) throw ConfigError("indexed dataset: type code, expected 1 to 8");
             return IndexedDatasetWriter(name, static_cast<RowType>(type_code));
           }),
           py::arg("name"), py::arg("type_code"))
      .def(
          "add_bytes",
          [](IndexedDatasetWriter& writer, const py::bytes& row) {
            const std::string_view view(row);
            writer.add_bytes(std::as_bytes(std::span(view.data(), view.size())));
          },
          py::arg("row"))
      .def("end_document", &IndexedDatasetWriter::end_document)
      .def("append", &IndexedDatasetWriter::append, py::arg("name"))
      .def("finish", &IndexedDatasetWriter::finish);
  module.def(
      "smallest_row_type", [](int64_t low, int64_t high) { return static_cast<int>(smallest_row_type(low, high)); },
      py::arg("low"), py::arg("high"));
}

RateScaling scaling_of(const std::string& name) {
  if (name == "linear") return RateScaling::linear;
  if (name == "sqrt") return RateScaling::sqrt;
  if (name == "none") return RateScaling::none;
  throw ConfigError("scaling of the rate: got '" + name + "', expected linear, sqrt or none");
}

void bind_batches(py::module_& module) {
  module.def(
      "pack_lengths",
      [](const std::vector<int64_t>& lengths, int64_t row_length) { return pack_lengths(lengths, row_length); },
      py::arg("lengths"), py::arg("row_length"));
  module.def(
      "batches_by_length",
      [](const std::vector<int64_t>& lengths, const std::vector<int64_t>& order, int64_t max_tokens,
         int64_t min_batch_size, std::optional<int64_t> max_batch_size, int64_t micro_batches, bool same_size) {
        auto batches = batches_by_length(lengths, order,
                                         {.max_tokens = max_tokens,
                                          .min_batch_size = min_batch_size,
                                          .max_batch_size = max_batch_size,
                                          .micro_batches_per_batch = micro_batches,
                                          .same_size = same_size});
        return std::tuple(std::move(batches.micro_batches), std::move(batches.batch_sizes), std::move(batches.longest),
                          std::move(batches.left_out));
      },
      py::arg("lengths"), py::arg("order"), py::arg("max_tokens"), py::arg("min_batch_size"), py::arg("max_batch_size"),
      py::arg("micro_batches_per_batch"), py::arg("same_size"));
  module.def(
      "scaled_rate",
      [](double rate, int64_t base, int64_t batch, const std::string& scaling) {
        return scaled_rate(rate, base, batch, scaling_of(scaling));
      },
      py::arg("rate"), py::arg("base"), py::arg("batch"), py::arg("scaling"));
}

}  // namespace

void bind_curriculum(py::module_& module) {
  module.def("config_section", &binding::section_text, py::arg("config"), py::arg("path"));
  bind_schedules(module);
  bind_sampler(module);
  bind_files(module);
  bind_batches(module);
}

}  // namespace deeptide::python
