# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Defines programs: plain data, so that it prints, travels to ranks as JSON and shrinks.

program = {
  "seed": number,
  "model": {"width", "blocks", "norm": layer | batch, "tie": none | head | transposed, "extras": […], "frozen": [names],
            "pruning": None or {"offset": steps until it begins, "share" of the weights of "up" that stays},
            "depth": None or {"theta", "gamma"} of layers that are dropped, "tokens": None or {"min", "steps"} of those
            that blocks see, "mixer": attention within sequences,
            "left_out": [names that no optimizer group has], "groups": 1 | 2, "seed_by_rank": whether ranks differ},
  "optimizer": a ds_config section, and "by": config | instance; "restored": whether a given one got its groups from
               another's state dict,
  "schedule": what each step multiplies lr by, or {"kind", "made"} (see `schedules.py`), or None, "clipping": number,
  "data": None or {"samples", "drop_last"}: what initialize makes a loader of,
  "end": destroy | return: whether a rank's process simply ends, with all its objects,
  "hosts": 1 | 2: with two, each has a folder of its own for checkpoints, where all phases have a rank on both,
  "accelerator": None, or what engines run on instead of the CPU (see `accelerators.py`),
  "phases": [{"world", "bf16", "fp16": instead, with a loss scale, "gas", "shift": added to the stage, "flip": the
              other memory, "config": {…}, "offload",
              "quantized": None | int8 | int4, how gradients travel, "fed_back": the error is added to the next ones,
              "folders": over how many shards of checkpoints are cut, 0: none, "beside": training goes on during saves,
              "activations": None | recompute | files | the budget of an automatic choice,
              "packed": packed masters, "moments": bf16 ones, "placement": {kind of state: its share in memory},
              "acts": [{"act": name, …}]}]
}

A phase is one life of an engine; the next begins with a new model, and may load what earlier ones saved. An act happens
on all ranks. A forward's loss is "cross", "square" or "masked": of some rows alone; its batch has "rows" of them, or is
"packed": the lengths of sequences, a digit each. Values that differ by rank are lists: rank r takes the one at r modulo
the list's length, and None means "not on this rank". Any acts in any order are a program: an act whose object is
missing does nothing.
"""

import json
from typing import NamedTuple


class Setting(NamedTuple):
    """How an engine runs a program: phases shift the stage and flip the memory from here."""

    stage: int
    shared: bool

    def __str__(self):
        return f"stage{self.stage}-{'shared' if self.shared else 'apart'}"

    @classmethod
    def parse(cls, text):
        return cls(int(text[5]), text.endswith("shared"))

    def of(self, phase):
        return Setting((self.stage + phase["shift"]) % 4, self.shared != phase["flip"])


SETTINGS = [Setting(stage, shared) for stage in range(4) for shared in (True, False)]


def settings_of(program):
    """Those that it can run at: an accelerator's memory is each rank's own."""
    return [setting for setting in SETTINGS if not (program.get("accelerator") and setting.shared)]


def pick(values, rank):
    """A rank's own value of a list; anything else is everybody's."""
    return values[rank % len(values)] if isinstance(values, list) else values


# States that an optimizer keeps of each parameter, by torch's names.
STATES = {
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "Adam": ("exp_avg", "exp_avg_sq"),
    "SGD": ("momentum_buffer",),
    "Adagrad": ("sum",),
    "RMSprop": ("square_avg",),
    "NAdam": ("exp_avg", "exp_avg_sq"),
    "RAdam": ("exp_avg", "exp_avg_sq"),
    "Adamax": ("exp_avg", "exp_inf"),
    "Adadelta": ("square_avg", "acc_delta"),
}
OWN = ("NAdam", "RAdam", "Adamax", "Adadelta")  # which no kernel of ours replaces: they step parts, and keep the states


# fp16's scale: halved by each step that is skipped, and never raised.
LOSS_SCALE = {"initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 10**6}


# Every phase ends with these: the final look. `look` reads each parameter's master and optimizer states.
FINALE = [
    {"act": "clone", "way": "clone", "on": [True]},
    {"act": "state"},
    {"act": "look_all"},
    {"act": "counters"},
]


def is_low(phase):
    """Whether parameters are of 16 bits, beside fp32 masters."""
    return phase["bf16"] or phase.get("fp16", False)


def is_packed(phase):
    """Masters are packed beside bf16 parameters only."""
    return phase["bf16"] and phase.get("packed", False)


def placement_of(phase, setting):
    """{kind of state: its share in memory}, where the stage can place it and no section offloads already."""
    return {} if phase["offload"] or setting.stage == 0 else phase.get("placement", {})


def quantized_in(phase, setting):
    """In how many bits gradients travel: None: whole, or not at all."""
    is_shared = setting.shared and not (phase["offload"] and setting.stage == 3)  # memory has no parameters of files
    return phase.get("quantized") if phase["world"] > 1 and not is_shared else None


def hosts_of(program):
    """How many hosts have folders of their own: each must have ranks in every phase, or a load would lack files."""
    return min(program.get("hosts", 1), *(phase["world"] for phase in program["phases"]))


def acts_of(phase):
    return phase["acts"] + FINALE


def most_ranks(program):
    return max(phase["world"] for phase in program["phases"])


def dump(program):
    """JSON with one act a line."""
    head = {key: value for key, value in program.items() if key != "phases"}
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    phases = []
    for phase in program["phases"]:
        own = json.dumps({key: value for key, value in phase.items() if key != "acts"})[1:-1]
        acts = ",\n    ".join(json.dumps(act) for act in phase["acts"])
        phases.append(f'  {{{own}, "acts": [\n    {acts}\n  ]}}')
    return "{\n" + ",\n".join(lines) + ',\n"phases": [\n' + ",\n".join(phases) + "\n]\n}\n"
