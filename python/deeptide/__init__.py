# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Deeptide trains models that do not fit: `engine, optimizer, loader, scheduler = deeptide.initialize(...)`.

Importing this package loads nothing but itself: torch and the C++ core come in with the first name that needs them.
"""

import importlib
import os

from deeptide._version import TORCH_VERSION, __version__

_HOME = {
    "CheckpointError": "_C",
    "NonFiniteError": "_C",
    "DriftError": "_C",
    "CommError": "_C",
    "Config": "_C",
    "ConfigError": "_C",
    "DataLoader": "data",
    "DeeptideOptimizer": "optimizer",
    "DeeptideWarning": "_process.log",
    "DistributedSampler": "_C",
    "Engine": "engine",
    "Preempted": "_process.preemption",
    "RepeatingLoader": "data",
    "StepOutcome": "_C",
    "StepResult": "_C",
    "World": "_C",
    "add_config_arguments": "_process.arguments",
    "add_tuning_arguments": "_process.arguments",
    "import_checkpoint": "_model.weights",
    "init_distributed": "_process.world",
    "initialize": "_engine.initialize",
    "load_weights": "_model.weights",
    "make_world": "_process.world",
    "plan": "_forecast.plan",
}
_MODULES = (
    "accelerator",
    "checkpoint",
    "comm",
    "config",
    "data",
    "elasticity",
    "engine",
    "ops",
    "optimizer",
    "pipeline",
    "schedule",
    "utils",
    "zero",
)

__all__ = ["__version__", *_HOME]


if "DEEPTIDE_STACKS_FD" in os.environ:
    from deeptide._process.stacks import answer_stack_signals

    answer_stack_signals()


def _check_torch() -> None:
    """Answers a torch that the core does not fit, whose C++ symbols differ, before the loader does."""
    import torch

    built = TORCH_VERSION.split(".")[:2]
    if torch.__version__.split(".")[:2] != built:
        minor = ".".join(built)
        raise ImportError(
            f"this deeptide was built for torch {minor} and finds torch {torch.__version__}: install torch=={minor}.*, "
            "or build deeptide for yours from its sources: pip install --no-build-isolation ."
        )


def __getattr__(name: str) -> object:
    if name in _HOME or name in _MODULES or name == "_C":
        _check_torch()
        importlib.import_module("deeptide._model.changes")  # before threads build models
    if name in _HOME:
        value = getattr(importlib.import_module(f"deeptide.{_HOME[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"deeptide.{name}")
    else:
        raise AttributeError(f"module 'deeptide' has no attribute '{name}'")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})


if os.environ.get("DEEPTIDE_AS_DEEPSPEED") == "1":
    importlib.import_module("deeptide.as_deepspeed")
