// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The table's checkpoints: checkpoint, nebula, datastates_ckpt.
#include <utility>

#include "config/table/binding.h"
#include "config/table/schema_sections.h"

namespace deeptide::config {
namespace {

constexpr const char* kOneWriter = "there is one writer here, and it writes in large aligned requests";

Key writer_section() {
  return section("writer", "DeepSpeed's file writers.",
                 {
                     choice("type", "FAST", {"MOCK", "PYTHON", "FAST"}, "Which one.").ignoring_case().never(kOneWriter),
                     integer("io_buffer_size", 67'108'864,
                             "Bytes of memory through which a rank's shard passes to its file, in blocks of 8 MiB.")
                         .at_least(1)
                         .into(&CheckpointConfig::buffer_bytes),
                     flag("io_buffer_double", true, "Two buffers.").never(kOneWriter),
                     flag("show_statistics", false, "Print its speed.").never("every save beside training is told"),
                     choice("data_parallel", {}, {"REPLICA", "SOCKET", "MACHINE"}, "Who writes.")
                         .ignoring_case()
                         .never("every rank writes its own part"),
                     flag("decoupled", false, "As `async` of the section above.").into(&CheckpointConfig::decoupled),
                     integer("io_multiplier", 1, "Writers for each file.").at_least(1).never(kOneWriter),
                 });
}

std::vector<Key> saving_keys() {
  return {
      flag("async", false,
           "save_checkpoint returns at once, and a thread writes while training goes on; `blocking` of a call "
           "overrides it.")
          .into(&CheckpointConfig::background),
      integer("snapshot_bytes", 0,
              "Most memory of a rank for state that a step changes before a save beside it has written it; 0: its part "
              "of a quarter of what the host has available.")
          .at_least(0)
          .into(&CheckpointConfig::snapshot_bytes),
      flag("bf16_moments", false,
           "Save optimizer states of fp32 in bf16, rounded to nearest; masters stay. What resumes is no longer the run "
           "bit for bit.")
          .into(&CheckpointConfig::bf16_moments),
      number("loss_tolerance", 0.0,
             "step() refuses the first loss after a load, on rank 0, if it differs from the last before the save by "
             "more than this share of it; 0: any will do. Sees losses that engine.backward() got.")
          .at_least(0)
          .into(&CheckpointConfig::loss_tolerance),
      choice<SaveContents>(
          "contents", SaveContents::all,
          {{"all", SaveContents::all}, {"trainable", SaveContents::trainable}, {"weights", SaveContents::weights}},
          "What a checkpoint has: `all`, which resumes exactly; `trainable`, without frozen parameters, which a load "
          "leaves as they are; `weights`, without the optimizer's states, for `load_optimizer_states=False`.")
          .into(&CheckpointConfig::contents),
      flag(
          "verify", true,
          "A load into an engine that has taken a step, or has loaded before, first compares all that it will read "
          "with the hashes of the save, each rank its share: a damaged checkpoint then changes nothing. Others compare "
          "blocks as they are read, all of them also; after such an error the engine steps only once it has loaded "
          "another checkpoint. False: always as they are read.")
          .into(&CheckpointConfig::verify),
      list("folders", Kind::word, words({}),
           "Folders, such as one on each drive, over which each rank's shard is cut in equal parts that are written at "
           "once; save_checkpoint's folder has the manifest, and links to them. Empty: shards lie there.")
          .into(&CheckpointConfig::folders),
      integer("keep_last", 0,
              "Checkpoints of the default tags (\"global_step<n>\") that stay in a folder, those of the largest steps; "
              "a save removes the others. 0: all.")
          .at_least(0)
          .into(&CheckpointConfig::keep_last),
      integer("keep_every", 0, "With `keep_last`: checkpoints whose step is a multiple of it stay too; 0: none.")
          .at_least(0)
          .into(&CheckpointConfig::keep_every),
  };
}

}  // namespace

Key preemption_section() {
  return section(
      "on_preempt", "What a run does that a scheduler asks to go.",
      {
          word(
              "folder", "",
              "Save here and end, once any rank gets one of `signals`: all ranks agree on the step. Empty: signals act "
              "as ever.")
              .into(&CheckpointConfig::preempt_folder),
          list("signals", Kind::word, words({"SIGTERM", "SIGUSR1"}), "By which: of SIGTERM, SIGUSR1 and SIGUSR2.")
              .into(&CheckpointConfig::preempt_signals),
          number(
              "deadline", 60.0,
              "Seconds from the signal until the checkpoint must stand. A rank that has not come to a step when half "
              "of it is over, since it evaluates, saves where it is.")
              .above(0)
              .into(&CheckpointConfig::preempt_deadline_s),
          integer("exit_code", 75, "With which the program ends then: it asks to be run again (EX_TEMPFAIL).")
              .between(1, 255)
              .into(&CheckpointConfig::preempt_exit_code),
      });
}

std::vector<Key> checkpoint_sections() {
  Key checkpoints =
      section("checkpoint", "How checkpoints are written and read.",
              {
                  choice("tag_validation", "Warn", {"Warn", "Ignore", "Fail"}, "When ranks' tags differ.")
                      .ignoring_case()
                      .never("a save whose ranks give different tags fails on every rank"),
                  flag("load_universal", false,
                       "A load without a tag takes the checkpoint that `latest_universal` names. Without the key, "
                       "every checkpoint loads for any number of ranks too.")
                      .into(&CheckpointConfig::load_universal),
                  flag("use_node_local_storage", false,
                       "The folder is another one on each host, as on its own drive: each keeps what its ranks write, "
                       "with the whole table of contents. A load reads what is there, and asks the hosts that have the "
                       "rest for it. All hosts' files in one folder are a checkpoint like any other.")
                      .into(&CheckpointConfig::node_local),
                  section("parallel_write", "Writing by several ranks.",
                          {flag("pipeline_stage", false, "Pipeline stages write their parts.")
                               .never("every rank writes its own part")}),
                  flag("checkpoint_serialization", true, "Use torch.save.").never("the format here is safetensors"),
                  writer_section(),
              });
  checkpoints.keys.push_back(preemption_section());
  for (Key& key : saving_keys()) checkpoints.keys.push_back(std::move(key));
  return {
      std::move(checkpoints),
      section("nebula", "Azure's checkpoint service.",
              {
                  enabled(),
                  word("nebula_load_path", {}, "Load from here."),
                  flag("enable_nebula_load", true, "Load through it."),
                  word("persistent_storage_path", {}, "Store here."),
                  integer("persistent_time_interval", 100, "Seconds between copies.").at_least(1),
                  integer("num_of_version_in_retention", 2, "Versions kept.").at_least(1),
              })
          .switched_by("enabled")
          .later(),
      section("datastates_ckpt", "The DataStates checkpoint engine.",
              {number("host_cache_size", {}, "Its cache in host memory.").above(0)})
          .leaves_open()
          .when_present()
          .later(),
  };
}

}  // namespace deeptide::config
