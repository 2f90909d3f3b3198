// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs `deeptide checkpoint export`.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <map>

#include "deeptide/checkpoint.h"
#include "launch/commands/files/checkpoint_commands.h"
#include "launch/commands/files/checkpoint_output.h"
#include "launch/system/command_line.h"

namespace deeptide::launch {
namespace {

const std::map<std::string, ExportFormat> kFormats{{"safetensors", ExportFormat::safetensors},
                                                   {"state_dict", ExportFormat::state_dict},
                                                   {"universal", ExportFormat::universal},
                                                   {"dcp", ExportFormat::dcp}};

}  // namespace

int run_checkpoint_export(const Arguments& arguments) {
  CLI::App app("Writes a checkpoint for other programs, tensor by tensor.", "deeptide checkpoint export");
  std::string folder, out, tag, format = "safetensors";
  ExportOptions options;
  app.add_option("folder", folder, "Folder that save_checkpoint was given, or a checkpoint in it")->required();
  app.add_option("out", out, "Folder to write to")->required();
  app.add_option("-t,--tag", tag, "Tag of the checkpoint; the latest without one");
  app.add_option("-f,--format", format,
                 "safetensors (Transformers), state_dict (torch.load), universal (DeepSpeed), dcp (torch's distributed "
                 "checkpoint); the last two hold optimizer states as well")
      ->check(CLI::IsMember(kFormats))
      ->option_text("NAME=safetensors");
  app.add_option("--dtype", options.dtype, "fp32, bf16 or fp16; as saved without it")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
  app.add_option("--max_shard_size", options.max_shard_size, "Most bytes of a file, such as 5GB or 500MiB")
      ->option_text("SIZE=5GB");
  app.add_flag("--exclude_frozen", options.exclude_frozen, "Leave out parameters that were not trained");
  if (const auto code = parse_arguments(app, arguments)) return *code;
  options.format = kFormats.at(format);
  for (const std::string& name :
       export_checkpoint(CheckpointReader(folder, tag), out, options, progress_bar("export"))) {
    std::printf("%s/%s\n", out.c_str(), name.c_str());
  }
  return 0;
}

}  // namespace deeptide::launch
