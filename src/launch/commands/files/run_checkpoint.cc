// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs `deeptide checkpoint`: lists, shows, verifies, compares, exports, imports and prunes checkpoints.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>

#include "deeptide/checkpoint.h"
#include "launch/commands/commands.h"
#include "launch/commands/files/checkpoint_commands.h"
#include "launch/commands/files/checkpoint_output.h"
#include "launch/machine/python_module.h"
#include "launch/system/command_line.h"
#include "launch/system/usage_error.h"

namespace deeptide::launch {
namespace {

constexpr const char* kFolder = "Folder that save_checkpoint was given, or a checkpoint in it";
constexpr const char* kTag = "Tag of the checkpoint; the latest without one";

/// The cure for a folder without checkpoints: it may be the one above theirs.
std::string where_they_are(const std::string& folder) {
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.is_directory() && !list_checkpoints(entry.path()).empty()) {
      return "its folder '" + entry.path().filename().string() + "' has some: deeptide checkpoint ls " +
             entry.path().string();
    }
  }
  return "give the folder that save_checkpoint was given";
}

int run_ls(const Arguments& arguments) {
  CLI::App app("Lists the checkpoints in a folder.", "deeptide checkpoint ls");
  std::string folder;
  bool json = false;
  app.add_option("folder", folder, "Folder that save_checkpoint was given")->required();
  app.add_flag("--json", json, "Print JSON");
  if (const auto code = parse_arguments(app, arguments)) return *code;
  const auto checkpoints = list_checkpoints(folder);
  if (checkpoints.empty() && !json) throw UsageError("no checkpoint in '" + folder + "'; " + where_they_are(folder));
  print_list(checkpoints, json);
  return 0;
}

int run_show(const Arguments& arguments) {
  CLI::App app("Shows what a checkpoint holds; of named tensors also their values.", "deeptide checkpoint show");
  std::string folder, tag;
  std::vector<std::string> names;
  bool json = false;
  app.add_option("folder", folder, kFolder)->required();
  app.add_option("tensor", names, "Names of parameters or buffers");
  app.add_option("-t,--tag", tag, kTag);
  app.add_flag("--json", json, "Print JSON");
  if (const auto code = parse_arguments(app, arguments)) return *code;
  const CheckpointReader reader(folder, tag);
  if (names.empty()) print_checkpoint(reader, json);
  for (const std::string& name : names) print_tensors(reader, name);
  return 0;
}

int run_verify(const Arguments& arguments) {
  CLI::App app("Reads every byte of a checkpoint and names damaged tensors. Exits with 1 if there are any.",
               "deeptide checkpoint verify");
  std::string folder, tag;
  app.add_option("folder", folder, kFolder)->required();
  app.add_option("-t,--tag", tag, kTag);
  if (const auto code = parse_arguments(app, arguments)) return *code;
  const auto faults = verify_checkpoint(folder, tag, progress_bar("verify"));
  for (const std::string& fault : faults) std::printf("%s\n", fault.c_str());
  if (faults.empty()) std::printf("whole\n");
  return faults.empty() ? 0 : 1;
}

int run_diff(const Arguments& arguments) {
  CLI::App app("Compares two checkpoints tensor by tensor. Exits with 1 if they differ.", "deeptide checkpoint diff");
  std::string first, second;
  bool json = false;
  app.add_option("first", first, kFolder)->required();
  app.add_option("second", second, kFolder)->required();
  app.add_flag("--json", json, "Print JSON");
  if (const auto code = parse_arguments(app, arguments)) return *code;
  const auto differences =
      compare_checkpoints(CheckpointReader(first), CheckpointReader(second), progress_bar("compare"));
  print_differences(differences, json);
  return differences.empty() ? 0 : 1;
}

int run_prune(const Arguments& arguments) {
  CLI::App app("Removes checkpoints. Keeps the latest and what cannot be read.", "deeptide checkpoint prune");
  std::string folder;
  PruneOptions options;
  app.add_option("folder", folder, "Folder that save_checkpoint was given")->required();
  app.add_option("--keep_last", options.keep_last, "Keep this many, of most steps")->required();
  app.add_option("--keep_every", options.keep_every, "Keep also those whose steps are multiples of this");
  app.add_flag("-n,--dry_run", options.dry_run, "Only print what would be removed");
  if (const auto code = parse_arguments(app, arguments)) return *code;
  for (const std::string& tag : prune_checkpoints(folder, options)) {
    std::printf("%s %s\n", options.dry_run ? "would remove" : "removed", tag.c_str());
  }
  return 0;
}

int run_import(const Arguments& arguments) { become_module("deeptide._commands.importing", arguments); }

constexpr struct {
  const char* name;
  int (*run)(const Arguments& arguments);
  const char* purpose;
} kCommands[] = {
    {"ls", run_ls, "list the checkpoints in a folder"},
    {"show", run_show, "what a checkpoint holds, and values of tensors"},
    {"verify", run_verify, "read every byte, name damaged tensors"},
    {"diff", run_diff, "compare two checkpoints"},
    {"export", run_checkpoint_export, "write weights or states for other programs"},
    {"import", run_import, "take over a checkpoint of DeepSpeed or weights of Hugging Face"},
    {"prune", run_prune, "remove old checkpoints"},
};

}  // namespace

int run_checkpoint(const Arguments& arguments) {
  const std::string what = arguments.empty() ? "" : arguments[0];
  for (const auto& command : kCommands) {
    if (what == command.name) return command.run({arguments.begin() + 1, arguments.end()});
  }
  std::string names;
  for (const auto& command : kCommands) names += (names.empty() ? "" : ", ") + std::string(command.name);
  if (what != "--help" && what != "-h") {
    throw UsageError("deeptide checkpoint: got " + (what.empty() ? "nothing" : "'" + what + "'") +
                     ", expected one of " + names);
  }
  std::puts("Usage: deeptide checkpoint COMMAND FOLDER [OPTIONS]\n\nNeeds no job, no model and no accelerator:\n");
  for (const auto& command : kCommands) std::printf("  %-7s %s\n", command.name, command.purpose);
  return 0;
}

}  // namespace deeptide::launch
