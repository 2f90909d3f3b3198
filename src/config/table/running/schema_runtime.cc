// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The table's section "deeptide", which DeepSpeed does not have.
#include "config/table/binding.h"
#include "config/table/schema_sections.h"

namespace deeptide::config {

namespace {

std::vector<Key> memory_keys() {
  return {
      flag("tune_allocator", true, "Keep the pages of large CPU tensors instead of faulting them in again.")
          .into(&RuntimeConfig::tune_allocator),
      integer("device_memory_cap", 0,
              "Most bytes that the engine itself takes on a rank; its error says what frees memory. 0: no limit.")
          .at_least(0)
          .into(&RuntimeConfig::device_memory_cap),
      placement_section(),
      flag("packed_states", false,
           "bf16: masters take 2 bytes instead of 4, since their upper half is the parameter. Changes no number while "
           "only the engine writes parameters; one that the program writes becomes its own master, to the last bit "
           "that bf16 has.")
          .into(&RuntimeConfig::packed_states),
      choice<DataType>("moment_dtype", DataType::fp32, {{"fp32", DataType::fp32}, {"bf16", DataType::bf16}},
                       "Data type of optimizer states other than masters; bf16 is rounded stochastically, by a hash of "
                       "seed, step and element, so that their means are exact and runs repeat.")
          .into(&RuntimeConfig::moment_dtype),
      integer("unit_size", 0, "Most elements per unit; 0: one repeated block.")
          .at_least(0)
          .into(&RuntimeConfig::unit_size),
      integer("seed", 0, "Seed of the engine's random numbers (`moment_dtype`) and of the data order.")
          .at_least(0)
          .into(&RuntimeConfig::seed),
  };
}

std::vector<Key> exchange_keys() {
  return {
      number("comm_timeout", 1800.0, "Seconds after which a wait on a peer is an error.")
          .above(0)
          .into(&RuntimeConfig::comm_timeout_s),
      number("error_grace", 30.0,
             "Seconds that the others wait for a rank that caught an error of the engine, until its next call.")
          .above(0)
          .into(&RuntimeConfig::error_grace_s),
      choice<Reduction>("reduction", Reduction::ordered,
                        {{"ordered", Reduction::ordered}, {"transport", Reduction::transport}},
                        "ordered: sum gradients in one order, by pairs of ranks, so that a run repeats bit for bit; "
                        "transport: in the transport's order.")
          .into(&RuntimeConfig::reduction),
      choice<QuantizedGradients>(
          "quantized_gradients", {},
          {{"off", QuantizedGradients::off}, {"int8", QuantizedGradients::int8}, {"int4", QuantizedGradients::int4}},
          "Gradients of a model on CPUs travel in whole numbers of 8 or 4 bits, with one scale per 128 elements; an "
          "element is rounded by at most 1/254 or 1/14 of the largest of its block. Ranks that share a host's memory "
          "send nothing.")
          .derives("int4 with zero_quantized_gradients, else off")
          .into(&RuntimeConfig::quantized_gradients),
      flag("quantized_error_feedback", false,
           "What rounding takes from a rank's gradients is added to its next ones, with quantized_gradients: 4 bytes "
           "per trained parameter and rank.")
          .into(&RuntimeConfig::quantized_error_feedback),
      choice<ReduceThread>("reduce_thread", ReduceThread::automatic,
                           {{"auto", ReduceThread::automatic}, {"on", ReduceThread::on}, {"off", ReduceThread::off}},
                           "Sum gradients on a separate thread during backward; auto: if a core is idle.")
          .into(&RuntimeConfig::reduce_thread),
  };
}

std::vector<Key> run_keys() {
  return {
      flag(
          "overlap_publish", {},
          "Stages 1 and 2 over several hosts: step() returns while the new parameters are on their way; operators, and "
          "Python's numpy(), data_ptr() and the like, wait for those that they use. Native code that reads memory by "
          "address meets an error until then.")
          .derives("true on CPUs of several hosts")
          .into(&RuntimeConfig::overlap_publish),
      flag("shared_memory", true, "Ranks of one host share memory; false: they communicate as if on different hosts.")
          .into(&RuntimeConfig::shared_memory),
      choice<OnSkipped>("on_skipped", OnSkipped::skip,
                        {{"skip", OnSkipped::skip}, {"raise", OnSkipped::raise}, {"rewind", OnSkipped::rewind}},
                        "After `skipped_limit` steps in a row without finite gradients. skip: go on; raise: "
                        "NonFiniteError; rewind: return to a state kept in memory, which costs as much as "
                        "masters and moments.")
          .into(&RuntimeConfig::on_skipped),
      integer("skipped_limit", 10,
              "Steps skipped in a row, but those that a lower loss scale may mend, before `on_skipped` acts.")
          .at_least(1)
          .into(&RuntimeConfig::skipped_limit),
      integer("rewind_interval", 100, "Applied steps between two states kept for `on_skipped` \"rewind\".")
          .at_least(1)
          .into(&RuntimeConfig::rewind_interval),
      integer("drift_interval", 0, "Applied steps between two comparisons of what every rank has a copy of; 0: none.")
          .at_least(0)
          .into(&RuntimeConfig::drift_interval),
      choice<OnDrift>("on_drift", OnDrift::warn,
                      {{"warn", OnDrift::warn}, {"sync", OnDrift::sync}, {"stop", OnDrift::stop}},
                      "If copies differ. warn: name the first; sync: all take rank 0's; stop: DriftError.")
          .into(&RuntimeConfig::on_drift),
      flag("keep_grad", false,
           "Stages 0-2: .grad holds the whole reduced gradient from a step's last backward until step(), which "
           "takes what the program changed. Costs a gather per step and a copy of the gradients; backward is "
           "then collective.")
          .into(&RuntimeConfig::keep_grad),
  };
}

}  // namespace

std::vector<Key> runtime_sections() {
  std::vector<Key> keys = exchange_keys();
  for (Key& key : run_keys()) keys.push_back(std::move(key));
  for (Key& key : memory_keys()) keys.push_back(std::move(key));
  for (Key& key : own_monitor_sections()) keys.push_back(std::move(key));
  return {section("deeptide", "Deeptide's own settings; DeepSpeed has none of them.", std::move(keys))};
}

}  // namespace deeptide::config
