# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The flops profiler's table, in DeepSpeed's order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deeptide.flops_profiler import ModuleProfile

_NOTATIONS = """\
Notations: data parallel size (dp_size), model parallel size (mp_size), number of parameters (params), number of
multiply-accumulates (MACs), number of floating-point operations (flops), floating-point operations per second (FLOPS),
fwd latency (forward propagation latency), bwd latency (backward propagation latency), step (weights update latency),
iter latency (sum of fwd, bwd and step latency). MACs are those of matrix products, convolutions and attention, and
flops twice as many; backward's are counted, not estimated."""


def _text(value: float, unit: str = "") -> str:
    from deeptide.flops_profiler import to_text

    return to_text(value, unit)


def _time(seconds: float | None) -> str:
    from deeptide.flops_profiler import duration_text

    return "-" if seconds is None else duration_text(seconds)


def _summary(facts: dict[str, Any]) -> Iterator[str]:
    def row(name: str, value: object) -> str:
        return f"{name:<70}  {value!s:<8}"

    yield row("world size:", facts["world_size"])
    yield row("data parallel size:", facts["world_size"])
    yield row("model parallel size:", 1)
    if "batch_size_per_gpu" in facts:
        yield row("batch size per GPU:", facts["batch_size_per_gpu"])
    yield row("params per GPU:", _text(facts["params"]))
    yield row("params of model = params per GPU * mp_size:", _text(facts["params"]))
    yield row("fwd MACs per GPU:", _text(facts["fwd_macs"], "MACs"))
    yield row("fwd flops per GPU:", _text(facts["fwd_flops"]))
    yield row("fwd flops of model = fwd flops per GPU * mp_size:", _text(facts["fwd_flops"]))
    latency = facts["fwd_latency_s"]
    yield row("fwd latency:", _time(latency))
    if latency:
        yield row("fwd FLOPS per GPU = fwd flops per GPU / fwd latency:", _text(facts["fwd_flops"] / latency, "FLOPS"))
    backward = facts["bwd_latency_s"]
    if backward:
        yield row("bwd flops per GPU:", _text(facts["bwd_flops"]))
        yield row("bwd latency:", _time(backward))
        yield row("bwd FLOPS per GPU = bwd flops per GPU / bwd latency:", _text(facts["bwd_flops"] / backward, "FLOPS"))
        both = (facts["fwd_flops"] + facts["bwd_flops"]) / (latency + backward)
        yield row("fwd+bwd FLOPS per GPU:", _text(both, "FLOPS"))
        share = "unknown" if facts["mfu"] is None else f"{100 * facts['mfu']:.1f} %"
        yield row("share of this machine's measured peak (MFU):", share)
        yield row("measured peak of a matrix product:", _text(facts["peak_flops_per_s"], "FLOPS"))
        yield row("step latency:", _time(facts["step_latency_s"]))
        yield row("iter latency:", _time(facts["iter_latency_s"]))
    if facts["uncounted_calls"]:
        names = ", ".join(f"{name} x {calls}" for name, calls in sorted(facts["uncounted_calls"].items()))
        yield row("operators without a formula, in no total:", names)
    if "samples_per_s" in facts:
        yield row("samples/second:", f"{facts['samples_per_s']:.2f}")


def _by_depth(root: ModuleProfile) -> list[list[ModuleProfile]]:
    depths, level = [], [root]
    while level:
        depths.append(level)
        level = [child for node in level for child in node.children]
    return depths


def _aggregated(root: ModuleProfile, module_depth: int, top: int) -> Iterator[str]:
    depths = _by_depth(root)
    last = len(depths) - 1 if module_depth == -1 else min(module_depth, len(depths) - 1)
    yield f"Top {top} modules in terms of params, MACs or fwd latency at different model depths:"
    for depth in range(last + 1):
        yield f"depth {depth}:"
        kinds: dict[str, list[float]] = {}
        for node in depths[depth]:
            sums = kinds.setdefault(node.kind, [0, 0, 0.0])
            for i, value in enumerate((node.params, node.macs, node.latency)):
                sums[i] += value
        for i, (what, unit) in enumerate((("params", ""), ("MACs", "MACs"), ("fwd latency", "s"))):
            best = sorted(kinds, key=lambda kind, i=i: -kinds[kind][i])[:top]  # type: ignore[misc]
            shown = {kind: _time(kinds[kind][i]) if i == 2 else _text(kinds[kind][i], unit) for kind in best}
            yield f"    {what:<11} - {shown}"


def _detailed(node: ModuleProfile, root: ModuleProfile, depth: int, most: int) -> Iterator[str]:
    def share(part: float, whole: float) -> str:
        return f"{100 * part / whole:.2f}%" if whole else "0.00%"

    speed = node.flops / node.latency if node.latency else 0.0
    items = [
        f"{_text(node.params)} = {share(node.params, root.params)} Params",
        f"{_text(node.macs, 'MACs')} = {share(node.macs, root.macs)} MACs",
        f"{_time(node.latency)} = {share(node.latency, root.latency)} latency",
        _text(speed, "FLOPS"),
        f"backward {_text(node.bwd_macs, 'MACs')}",
    ]
    name = f"({node.name.rsplit('.', 1)[-1]}): " if node.name else ""
    yield "  " * depth + f"{name}{node.kind}: " + ", ".join(items)
    if most != -1 and depth >= most:
        return
    for child in node.children:
        yield from _detailed(child, root, depth + 1, most)


def write_table(
    root: ModuleProfile, facts: dict[str, Any] | None, module_depth: int, top_modules: int, detailed: bool
) -> str:
    """The whole table, or, without `facts`, its part about depths."""
    if facts is None:
        return "\n".join(_aggregated(root, module_depth, top_modules))
    lines = ["", "-------------------------- DeepSpeed Flops Profiler --------------------------"]
    lines += [f"Profile Summary at step {facts['profile_step']}:", _NOTATIONS, "", *_summary(facts)]
    lines += ["", "----------------------------- Aggregated Profile per GPU -----------------------------"]
    lines += _aggregated(root, module_depth, top_modules)
    if detailed:
        lines += ["", "------------------------------ Detailed Profile per GPU ------------------------------"]
        lines += ["Each module: its own and its submodules' share of params, MACs and fwd latency, and its speed."]
        lines += _detailed(root, root, 0, module_depth)
    lines.append("------------------------------------------------------------------------------")
    return "\n".join(lines)
