# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the real DeepSpeed's modules and classes, and writes their public names into as_deepspeed/names/surface.txt.

Run by hand with a Python that has deepspeed 0.19.8: DS_ACCELERATOR=cpu python tools/deepspeed_surface.py. Names only.
Lines are "package/: its modules", "module: its functions, classes and constants", "module:Class: its attributes".
"""

import ast
import importlib
import inspect
import textwrap
from pathlib import Path

OUT = Path(__file__).resolve().parents[1] / "python/deeptide/as_deepspeed/names/surface.txt"
MODULES = (
    "accelerator comm launcher.constants launcher.launch launcher.launcher_helper launcher.multinode_runner "
    "launcher.runner runtime.activation_checkpointing.checkpointing runtime.dataloader runtime.engine "
    "runtime.lr_schedules runtime.pipe.engine runtime.pipe.module runtime.pipe.topology runtime.utils "
    "runtime.zero.config runtime.zero.parameter_offload runtime.zero.partition_parameters runtime.zero.stage3 "
    "runtime.zero.stage_1_and_2 runtime.zero.utils utils.groups utils.timer"
)
FUNCTIONS = (  # of which the table of names has some
    "checkpoint.utils monitor.config moe.utils runtime.config runtime.precision_config sequence.layer utils.logging "
    "utils.numa utils.tensor_fragment utils.z3_leaf_module utils.zero_to_fp32"
)
CLASSES = (
    "accelerator.abstract_accelerator:DeepSpeedAccelerator accelerator.cpu_accelerator:CPU_Accelerator "
    "accelerator.cuda_accelerator:CUDA_Accelerator runtime.config:DeepSpeedConfig "
    "runtime.dataloader:DeepSpeedDataLoader runtime.engine:DeepSpeedEngine runtime.pipe.engine:PipelineEngine "
    "runtime.pipe.module:LayerSpec runtime.pipe.module:PipelineModule runtime.pipe.module:TiedLayerSpec "
    "runtime.pipe.topology:PipelineParallelGrid runtime.pipe.topology:ProcessTopology "
    "runtime.zero.partition_parameters:GatheredParameters runtime.zero.partition_parameters:Init "
    "runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3 runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer "
    "utils.timer:SynchronizedWallClockTimer utils.timer:ThroughputTimer"
)


def public(names: set[str]) -> list[str]:
    return sorted(name for name in names if not name.startswith("_"))


def packages(root: Path) -> dict[str, list[str]]:
    """{package: the modules in it}, of what Python finds on disk."""
    found: dict[str, list[str]] = {}
    for path in sorted(root.rglob("*.py")):
        parts = ["deepspeed", *path.relative_to(root).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
            found.setdefault(".".join(parts), [])
        if len(parts) > 1 and not any(part.startswith("_") for part in parts):
            found.setdefault(".".join(parts[:-1]), []).append(parts[-1])
    return {name: sorted(set(modules)) for name, modules in found.items()}


def of_module(module) -> list[str]:
    """Names that a module defines itself: functions, classes, constants in capitals."""
    tree = ast.parse(inspect.getsource(module))
    assigned = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    defined = {
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ and callable(value)
    }
    return public(defined | {name for name in assigned if name.isupper() and name != "TYPE_CHECKING"})


def of_class(kind: type) -> list[str]:
    """Methods, properties, and what methods assign to self."""
    names: set[str] = set()
    for each in kind.__mro__:
        if not each.__module__.startswith("deepspeed"):
            continue
        names |= set(vars(each))
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(each)))):
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            for target in targets:
                for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
                        names.add(part.attr)
    return public(names)


def parameters(module) -> list[str]:
    """A line for each of its functions: the names of parameters."""
    lines = []
    for name in of_module(module):
        value = getattr(module, name)
        if inspect.isfunction(value):
            kinds = inspect.signature(value).parameters.values()
            names = [each.name for each in kinds if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
            lines += [f"{module.__name__}:{name}(): {' '.join(names)}"]
    return lines


def main() -> None:
    import deepspeed

    root = Path(deepspeed.__file__).parent
    lines = [f"{name}/: {' '.join(modules)}" for name, modules in packages(root).items() if modules]
    read = importlib.import_module
    lines += [f"deepspeed.{name}: {' '.join(of_module(read(f'deepspeed.{name}')))}" for name in MODULES.split()]
    lines += [line for name in (*MODULES.split(), *FUNCTIONS.split()) for line in parameters(read(f"deepspeed.{name}"))]
    for module, kind in (name.split(":") for name in CLASSES.split()):
        names = of_class(getattr(read(f"deepspeed.{module}"), kind))
        lines += [f"deepspeed.{module}:{kind}: {' '.join(names)}"]
    OUT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
