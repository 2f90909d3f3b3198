// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// config_markdown: the table as a page for readers.
#include "config/publish/publish.h"
#include "deeptide/config.h"

namespace deeptide {
namespace config {

std::string status_words(const Key& key) {
  const std::string why = key.reason.empty() ? "." : ": " + key.reason + ".";
  switch (key.status) {
    case Status::either:
      return "Accepted either way" + why;
    case Status::later:
      return "Not supported yet" + why;
    case Status::never:
      return "Accepted, without effect here" + why;
    case Status::honoured:
      break;
  }
  std::string later;
  for (const std::string& name : key.later_choices) later += (later.empty() ? "Not supported yet: " : ", ") + name;
  return later.empty() ? "Honoured." : "Honoured. " + later + ".";
}

}  // namespace config

namespace {

using config::Key;
using config::Kind;
using config::Status;
using config::Variant;

const char* const kIntroduction =
    R"(<!-- Written by the target config_docs from the table in src/config/table/*/schema_*.cc; a test compares. Do not edit. -->
# Configuration

Three configurations to copy. The batch is 64 samples per step over all ranks, 4 per rank at a time; the number of
micro-batches follows from the number of ranks.

**Data parallel, mixed precision.** The model and its training state fit into each rank's memory:

```json
{
  "train_batch_size": 64,
  "train_micro_batch_size_per_gpu": 4,
  "bf16": {"enabled": true},
  "gradient_clipping": 1.0,
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
  "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 10000, "warmup_num_steps": 200}},
  "zero_optimization": {"stage": 1},
  "steps_per_print": 10
}
```

**Sharded.** The training state, about 16 bytes per parameter with bf16 and AdamW, is spread over all ranks:

```json
{
  "train_batch_size": 64,
  "train_micro_batch_size_per_gpu": 4,
  "bf16": {"enabled": true},
  "gradient_clipping": 1.0,
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
  "zero_optimization": {"stage": 3},
  "steps_per_print": 10
}
```

**Larger than memory.** Parameters and optimizer states lie in files on a fast drive:

```json
{
  "train_batch_size": 64,
  "train_micro_batch_size_per_gpu": 4,
  "bf16": {"enabled": true},
  "gradient_clipping": 1.0,
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
  "zero_optimization": {
    "stage": 3,
    "offload_param": {"device": "nvme", "nvme_path": "/nvme"},
    "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}
  },
  "steps_per_print": 10
}
```

`deeptide plan` tells how much memory each of them takes for a model, before anything is allocated.

## How it is read

Deeptide reads DeepSpeed's `ds_config.json`. Comments (`#`, `//`, `/* */`) and trailing commas are allowed; a key given
twice is an error. `"auto"` is accepted for every value and means the default, or a value that follows from other keys; the
summary at the start lists each such decision. The tables below list every key at every depth; any other key is an error
that names the file, the line and the nearest known key.

Of the three batch sizes any two are enough, or `train_batch_size` or `train_micro_batch_size_per_gpu` alone:
`train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x world size`.

| status | meaning |
|---|---|
| honoured | has the effect described |
| either | accepts any value, since all of them ask for what happens anyway; the reason is given |
| later | not supported yet, and its absence would change numbers, memory or behaviour: accepts only the default or a value that means 'off' |
| never | has no effect here, or its wish is met in another way: accepted, with the reason; the summary at the start names those that are given |

A section that is switched off (`"enabled": false`, `"device": "none"`) may hold any of its known keys, and, where it is
not supported yet, any values. A key that begins with `_` or `//` is a comment, at any depth. A dash as default means:
absent. `docs/ds_config.schema.json` holds the same table for editors (JSON Schema, draft 2020-12).
)";

std::string escaped(const std::string& text) {
  std::string out;
  for (char c : text) out += c == '|' ? std::string("\\|") : std::string(1, c);
  return out;
}

std::string type_words(const Key& key) {
  std::string words = config::describe_expected(key);
  if (words.rfind("one of ", 0) == 0) words.erase(0, 7);
  if (words == "a word in double quotes") words = "a word";
  return words;
}

std::string default_words(const Key& key) {
  if (key.must_be_given) return "required";
  if (!key.fallback.is(JsonKind::null)) return "`" + to_text(key.fallback) + "`";
  return key.derived.empty() ? "-" : "- (" + key.derived + ")";
}

std::string meaning(const Key& key) {
  std::string text = key.doc;
  for (const std::string& other : key.other_names) text += " Also `" + other + "`.";
  if (!key.reason.empty()) text += " *" + key.reason + "*";
  std::string later;
  for (const std::string& name : key.later_choices) later += (later.empty() ? " *Later: " : ", ") + name;
  return text + (later.empty() ? "" : later + "*");
}

std::string row(const Key& key) {
  static const char* const kStatus[] = {"honoured", "either", "later", "never"};
  return "| `" + key.name + "` | " + escaped(type_words(key)) + " | " + escaped(default_words(key)) + " | " +
         kStatus[static_cast<int>(key.status)] + " | " + escaped(meaning(key)) + " |\n";
}

bool nested(const Key& key) { return key.kind == Kind::section || key.kind == Kind::dictionary; }

std::string table_of(const std::vector<Key>& keys) {
  std::string rows;
  for (const Key& key : keys) {
    if (!nested(key)) rows += row(key);
  }
  return rows.empty() ? "" : "\n| key | type | default | status | meaning |\n|---|---|---|---|---|\n" + rows;
}

std::string heading(const std::string& path, const Key& key) {
  static const char* const kStatus[] = {"", " Accepted either way.", " Not supported yet.",
                                        " Accepted, without effect here."};
  std::string text = "\n## `" + path + "`\n\n" + key.doc + kStatus[static_cast<int>(key.status)];
  if (!key.reason.empty()) text += " *" + key.reason + "*";
  for (const std::string& other : key.other_names) text += " Also `" + other + "`.";
  if (key.open) text += " Other keys in it are ignored.";
  return text + "\n";
}

std::string sections_of(const std::vector<Key>& keys, const std::string& above) {
  std::string text;
  for (const Key& key : keys) {
    if (!nested(key)) continue;
    const std::string path = above.empty() ? key.name : above + "." + key.name;
    text += heading(path, key) + table_of(key.keys);
    for (const Variant& variant : key.variants) {
      std::string types;
      for (const std::string& name : variant.types) types += (types.empty() ? "" : ", ") + name;
      text += "\n### `" + path + "` of " + types + "\n";
      text += variant.open ? "\nAny keys.\n" : table_of(variant.keys);
    }
    text += sections_of(key.keys, key.kind == Kind::dictionary ? path + ".<name>" : path);
  }
  return text;
}

}  // namespace

std::string config_markdown() {
  const std::vector<Key>& keys = config::schema().keys;
  return kIntroduction + std::string("\n## Top level\n") + table_of(keys) + sections_of(keys, "");
}

}  // namespace deeptide
