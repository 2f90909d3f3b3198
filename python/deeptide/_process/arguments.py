# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Command-line arguments under DeepSpeed's names."""

from __future__ import annotations

import argparse
from typing import Any


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds --deepspeed, --deepspeed_config and --deepspeed_mpi (and the old spelling 'deepscale') to a parser."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="train with the engine")
    group.add_argument("--deepspeed_config", default=None, type=str, metavar="FILE", help="the ds_config.json")
    # Older scripts pass it; that mpirun has started them is found out with or without it.
    group.add_argument("--deepspeed_mpi", default=False, action="store_true", help="started by mpirun")
    group.add_argument("--deepscale", default=False, action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", default=None, type=str, help=argparse.SUPPRESS)
    return parser


# Option, default and help of DeepSpeed's tuning arguments, by the schedule that they belong to. Its scripts give -1 for
# "as the first half of the cycle".
_TUNING: dict[str, dict[str, tuple[Any, str]]] = {
    "LRRangeTest": {
        "lr_range_test_min_lr": (0.001, "where the rate starts"),
        "lr_range_test_step_rate": (1.0, "how much it grows in each interval"),
        "lr_range_test_step_size": (1000, "steps of an interval"),
        "lr_range_test_staircase": (False, "grow once per interval instead of in each step"),
    },
    "OneCycle": {
        "cycle_first_step_size": (1000, "steps of the cycle's first half"),
        "cycle_first_stair_count": (-1, "stairs of the first half; -1: none"),
        "cycle_second_step_size": (-1, "steps of the second half; -1: as the first"),
        "cycle_second_stair_count": (-1, "stairs of the second half; -1: none"),
        "decay_step_size": (1000, "steps of an interval of the decay after the cycle"),
        "cycle_min_lr": (0.01, "where the rate starts and ends"),
        "cycle_max_lr": (0.1, "its peak"),
        "decay_lr_rate": (0.0, "decay of the rate after the cycle"),
        "cycle_momentum": (False, "let the momentum move against the rate"),
        "cycle_min_mom": (0.8, "the smallest momentum"),
        "cycle_max_mom": (0.9, "the largest momentum"),
        "decay_mom_rate": (0.0, "decay of the momentum after the cycle"),
    },
    "WarmupLR": {
        "warmup_min_lr": (0.0, "where the rate starts"),
        "warmup_max_lr": (0.001, "what it rises to"),
        "warmup_num_steps": (1000, "steps of the rise"),
        "warmup_type": ("log", "shape of the rise: log or linear"),
    },
}


def _truth(text: str) -> bool:
    return text.lower() in ("1", "true", "yes", "on")


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds --lr_schedule and the options of the schedules LRRangeTest, OneCycle and WarmupLR to a parser."""
    group = parser.add_argument_group("Convergence Tuning", "Learning-rate schedules")
    group.add_argument("--lr_schedule", default=None, type=str, help=f"one of {', '.join(_TUNING)}")
    for schedule, options in _TUNING.items():
        for name, (fallback, text) in options.items():
            if name == "cycle_momentum":
                group.add_argument(f"--{name}", default=fallback, action="store_true", help=f"{schedule}: {text}")
                continue
            kind = _truth if isinstance(fallback, bool) else type(fallback)
            group.add_argument(f"--{name}", default=fallback, type=kind, help=f"{schedule}: {text} ({fallback})")
    return parser


def scheduler_of(args: argparse.Namespace) -> dict[str, Any] | None:
    """The configuration's section "scheduler" that these arguments ask for; None without --lr_schedule.

    Errors: ConfigError on a schedule that has no arguments.
    """
    from deeptide._C import ConfigError  # loads torch, which a parser does without

    kind = getattr(args, "lr_schedule", None)
    if kind is None:
        return None
    if kind not in _TUNING:
        raise ConfigError(f"--lr_schedule: got {kind!r}, expected one of {', '.join(_TUNING)}")
    params = {name: getattr(args, name, fallback) for name, (fallback, _) in _TUNING[kind].items()}
    return {"type": kind, "params": {name: value for name, value in params.items() if value != -1}}


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """Returns, like DeepSpeed's, (the section "scheduler", None), or (None, why there is none)."""
    try:
        section = scheduler_of(args)
    except ValueError as error:
        return None, str(error)
    return (section, None) if section else (None, "--lr_schedule is not given")


def get_lr_from_config(config: dict[str, Any]) -> tuple[float | None, str]:
    """Returns, like DeepSpeed's, (the learning rate to give the optimizer, ""), or (None, what the section lacks)."""
    if "type" not in config or "params" not in config:
        return None, 'a scheduler section needs "type" and "params"'
    names = {"LRRangeTest": "lr_range_test_min_lr", "OneCycle": "cycle_max_lr", "WarmupLR": "warmup_max_lr"}
    name = names.get(config["type"])
    if name is None:
        return None, f"{config['type']!r} is no schedule with a rate of its own; expected one of {', '.join(names)}"
    return float(config["params"][name]), ""
