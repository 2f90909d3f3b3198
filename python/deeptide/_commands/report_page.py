# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page about one run, or two side by side: no script, nothing loaded from elsewhere."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from deeptide._commands.run_record import Run

_COLOURS = ("#2563eb", "#ea580c")
_PARTS: tuple[tuple[str, str, Callable[[dict[str, float]], float]], ...] = (
    ("compute", "#2563eb", lambda t: t["computing"] - t["optimizer"]),
    ("optimizer", "#7c3aed", lambda t: t["optimizer"]),
    ("waiting for ranks", "#ea580c", lambda t: t["waiting"]),
    ("files", "#ca8a04", lambda t: t["files"]),
    ("data and the program's own", "#16a34a", lambda t: t["data"]),
)
_ROLE_COLOURS = ("#2563eb", "#7c3aed", "#ea580c", "#ca8a04", "#16a34a", "#0891b2", "#db2777", "#64748b")
_Series = Sequence[tuple[str, str, Sequence[float]]]  # name, colour, a value per step
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 560, 240, 72, 44, 10
_MOST_POINTS = 800  # of a curve: more than a screen shows
_MOST_VALUES = 120  # that can be read by pointing at them, of one chart

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2937; --soft: #6b7280; --line: #e5e7eb; --card: #fff; --page: #f8fafc; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e5e7eb; --soft: #9ca3af; --line: #374151; --card: #111827; --page: #030712; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 24px; background: var(--page); color: var(--ink);
       font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 16px; margin: 0 0 8px; }
p.soft, .soft { color: var(--soft); }
.limit { background: var(--card); border-left: 4px solid #ea580c; padding: 12px 16px; margin: 12px 0;
         border-radius: 6px; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 16px;
        margin: 16px 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 16px; overflow-x: auto; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 16px 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; }
.tile b { display: block; font-size: 20px; font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 10px; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 500; }
tr.late td { color: #ea580c; font-weight: 600; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--soft); font-size: 11px; }
svg .axis { stroke: var(--line); } .legend span { margin-right: 14px; white-space: nowrap; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px; }
svg .hover { fill: transparent; } svg .hover:hover { fill: var(--soft); fill-opacity: .18; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12.5px; margin: 0; } summary { cursor: pointer; }
@media (max-width: 600px) { body { padding: 10px; } .card { padding: 10px; } svg text { font-size: 16px; }
  .tiles { grid-template-columns: repeat(2, 1fr); } th, td { padding: 4px 5px; } }
"""


def number(value: float | None, digits: int = 4) -> str:
    """Short, for people."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.{digits}g}"


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _ticks(low: float, high: float) -> list[float]:
    """Four or so round numbers."""
    step = 10.0 ** math.floor(math.log10(max(high - low, 1e-30) / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 5)
    first = math.ceil(low / step)
    return [step * k for k in range(first, math.floor(high / step + 1e-9) + 1)]


class _Axes:
    """Turns values into places on the drawing."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], zero: bool = False) -> None:
        self.x0, self.x1 = (min(xs), max(xs)) if xs else (0.0, 1.0)
        self.y0, self.y1 = (min(ys), max(ys)) if ys else (0.0, 1.0)
        if zero:
            self.y0 = min(self.y0, 0.0)
        if self.x1 <= self.x0:
            self.x1 = self.x0 + 1
        reach = max(abs(self.y0), abs(self.y1)) or 1.0
        if self.y1 - self.y0 < 1e-3 * reach:  # as good as one value: ticks within it would have one label
            self.y0, self.y1 = self.y0 - 0.05 * reach, self.y1 + 0.05 * reach

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x0) / (self.x1 - self.x0) * (_WIDTH - _LEFT - 8)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (_HEIGHT - _BOTTOM - _TOP)

    def drawing(self, body: str, label: Callable[[float], str] = number) -> str:
        lines = []
        for tick in _ticks(self.y0, self.y1):
            y = self.y(tick)
            lines.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}"/>')
            lines.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(label(tick))}</text>')
        for tick in _ticks(self.x0, self.x1):
            if tick != round(tick):
                continue
            x = self.x(tick)
            anchor = "end" if x > _WIDTH - 24 else "middle"
            label_x = escape(number(tick, 6))
            lines.append(f'<text x="{x:.1f}" y="{_HEIGHT - 24}" text-anchor="{anchor}">{label_x}</text>')
        lines.append(f'<text x="{(_LEFT + _WIDTH) / 2:.0f}" y="{_HEIGHT - 6}" text-anchor="middle">step</text>')
        return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(lines)}{body}</svg>'


def _fewer(points: Sequence[tuple[float, float]], most: int = _MOST_POINTS) -> list[tuple[float, float]]:
    """At most so many points, in order: the lowest and the highest of each stretch of steps, so that peaks stay."""
    if len(points) <= most:
        return list(points)
    width = math.ceil(2 * len(points) / (most - 2))
    kept = [points[0]]
    for begin in range(0, len(points), width):
        stretch = points[begin : begin + width]
        kept += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return [*kept, points[-1]]


def _hovers(axes: _Axes, steps: Sequence[float], text: Callable[[int], str]) -> str:
    """Strips over a chart that show a step's values when a reader points at them. text: of the step at an index."""
    chosen = range(0, len(steps), max(1, math.ceil(len(steps) / _MOST_VALUES)))
    places = [axes.x(steps[i]) for i in chosen]
    edges = [_LEFT, *((a + b) / 2 for a, b in itertools.pairwise(places)), _WIDTH - 8]
    return "".join(
        f'<rect class="hover" x="{left:.1f}" y="{_TOP}" width="{max(right - left, 1):.1f}" '
        f'height="{_HEIGHT - _BOTTOM - _TOP}"><title>{escape(text(i))}</title></rect>'
        for i, (left, right) in zip(chosen, itertools.pairwise(edges), strict=True)
    )


def _legend(items: Sequence[tuple[str, str]]) -> str:
    spans = "".join(f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in items)
    return f'<div class="legend soft">{spans}</div>'


def _strokes(count: int) -> list[str]:
    return (
        ['stroke-width="1.8"']
        if count < 2
        else ['stroke-width="4" opacity=".55"', 'stroke-width="1.6" stroke-dasharray="7 3"']
    )


def _marks(axes: _Axes, run: Run) -> str:
    """A triangle for each skipped step, or for those that fall on one place."""
    body, drawn = "", set()
    for line in run.steps:
        x, y = round(axes.x(line["step"])), _HEIGHT - _BOTTOM
        if line["applied"] or x in drawn:
            continue
        drawn.add(x)
        why = escape(line.get("reason", ""))
        body += f'<path fill="#dc2626" d="M{x - 4},{y} h8 l-4,-8 z"><title>step {line["step"]}: {why}</title></path>'
    return body


def _curve(
    title: str, runs: Sequence[Run], value: Callable[[dict[str, Any]], float | None], marks: bool = False
) -> str:
    """A line per run over its steps; `marks`: skipped steps stand below as triangles."""
    series = []
    for run in runs:
        points = ((line["step"], value(line)) for line in run.steps)
        series.append([(x, y) for x, y in points if y is not None and math.isfinite(y)])
    flat = [point for points in series for point in points]
    if not flat:
        return ""
    axes = _Axes([x for x, _ in flat], [y for _, y in flat])
    body = ""
    steps = sorted({x for x, _ in flat})
    values = [dict(finite) for finite in series]

    def text(index: int) -> str:
        of_runs = [
            (run.name, found[steps[index]]) for run, found in zip(runs, values, strict=False) if steps[index] in found
        ]
        shown = [f"{name}: {number(y)}" if len(runs) > 1 else number(y) for name, y in of_runs]
        return f"step {number(steps[index], 6)}: {', '.join(shown)}"

    # The first curve is wide and the second a thin line of dashes upon it: equal ones are both seen.
    for finite, colour, stroke in zip(series, _COLOURS, _strokes(len(runs)), strict=False):
        path = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in _fewer(finite))
        body += f'<polyline fill="none" stroke="{colour}" {stroke} points="{path}"/>'
    body += _hovers(axes, steps, text)
    for run in runs if marks else ():
        body += _marks(axes, run)
    names = [(run.name, colour) for run, colour in zip(runs, _COLOURS, strict=False)]
    if marks and any(run.skipped for run in runs):
        names.append(("skipped step", "#dc2626"))
    return f'<div class="card"><h2>{escape(title)}</h2>{axes.drawing(body)}{_legend(names)}</div>'


def _stacked(title: str, steps: Sequence[int], series: _Series, label: Callable[[float], str]) -> str:
    """Areas above each other; the highest fiftieth of the steps may leave the drawing."""
    tops = sorted(map(sum, zip(*(values for _, _, values in series), strict=True)))
    axes = _Axes(steps, tops[: max(1, int(0.98 * len(tops)))], True)
    body = ""
    every = max(1, math.ceil(len(steps) / (_MOST_POINTS // 2)))
    whole, all_steps = series, steps
    if every > 1:  # means of stretches of steps
        steps = [steps[begin] for begin in range(0, len(steps), every)]
        series = [
            (name, colour, [statistics.fmean(values[b : b + every]) for b in range(0, len(values), every)])
            for name, colour, values in series
        ]
    below = [0.0] * len(steps)
    for name, colour, values in series:
        above = [low + max(value, 0.0) for low, value in zip(below, values, strict=True)]
        upper, lower = (
            [f"{axes.x(step):.1f},{max(axes.y(v), _TOP):.1f}" for step, v in zip(steps, edge, strict=True)]
            for edge in (above, below)
        )
        points = " ".join(upper + lower[::-1])
        body += f'<polygon fill="{colour}" opacity=".85" points="{points}"><title>{escape(name)}</title></polygon>'
        below = above

    def text(index: int) -> str:
        parts = ", ".join(f"{name} {label(values[index])}" for name, _, values in whole)
        return f"step {number(all_steps[index], 6)}: {parts}"

    body += _hovers(axes, all_steps, text)
    legend = _legend([(name, colour) for name, colour, _ in series])
    return f'<div class="card"><h2>{escape(title)}</h2>{axes.drawing(body, label)}{legend}</div>'


def _time_chart(run: Run, title: str) -> str:
    """Charts where each step's time went."""
    lines = [line for line in run.steps if line["times"]["total"] > 0]
    if not lines:
        return ""
    series = [(name, colour, [1e3 * part(line["times"]) for line in lines]) for name, colour, part in _PARTS]
    return _stacked(title, [line["step"] for line in lines], series, lambda v: f"{number(v)} ms")


def _memory_over_time(run: Run, title: str) -> str:
    """Charts what each role held as a step ended."""
    lines = [line for line in run.steps if line.get("memory")]
    roles = sorted({role for line in lines for role in line["memory"]})
    if not roles:
        return ""
    series = [
        (role, colour, [line["memory"].get(role, (0, 0))[0] / 2**20 for line in lines])
        for role, colour in zip(roles, itertools.cycle(_ROLE_COLOURS), strict=False)
    ]
    return _stacked(title, [line["step"] for line in lines], series, lambda v: f"{number(v)} MiB")


def _memory_chart(run: Run, title: str) -> str:
    """Bars of the most that each role took, and the forecast as a mark."""
    rows = run.memory()
    if not rows:
        return ""
    most = max(max(peak, forecast) for _, peak, forecast in rows) or 1
    height = 26 * len(rows) + 6
    body = ""
    for i, (role, peak, forecast) in enumerate(rows):
        y = 26 * i + 4
        scale = (_WIDTH - 240) / most
        body += f'<text x="130" y="{y + 13}" text-anchor="end">{escape(role)}</text>'
        body += f'<rect x="136" y="{y}" height="18" width="{max(peak * scale, 1):.1f}" fill="#2563eb" rx="2"/>'
        body += f'<rect x="{136 + forecast * scale:.1f}" y="{y - 2}" height="22" width="2.5" fill="#ea580c"/>'
        end = 136 + max(peak, forecast) * scale + 8
        body += f'<text x="{end:.1f}" y="{y + 13}">{size(peak)}</text>'
    drawing = f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{body}</svg>'
    legend = _legend([("taken at most on rank 0", "#2563eb"), ("forecast", "#ea580c")])
    return f'<div class="card"><h2>{escape(title)}</h2>{drawing}{legend}</div>'


def _rank_table(run: Run) -> str:
    ranks = run.ranks
    if len(ranks) < 2:
        return ""
    busy = [one["total"] - one["waiting"] for one in ranks]
    middle = sorted(busy)[len(busy) // 2 - (1 - len(busy) % 2)]
    rows = ""
    for i, one in enumerate(ranks):
        late = busy[i] - middle > 0.1 * one["total"]
        cells = "".join(f"<td>{1e3 * one[key]:.1f}</td>" for key in ("total", "computing", "waiting", "files", "data"))
        rows += f"<tr{' class=late' if late else ''}><td>rank {i}{' (late)' if late else ''}</td>{cells}</tr>"
    head = "".join(f"<th>{name}</th>" for name in ("", "step, ms", "computing", "waiting", "files", "data"))
    title = f"Ranks, at the last line of {escape(run.name)}"
    return f'<div class="card"><h2>{title}</h2><table><tr>{head}</tr>{rows}</table></div>'


def _tiles(runs: Sequence[Run]) -> str:
    facts: list[tuple[str, Callable[[Run], str]]] = [
        ("steps (skipped)", lambda run: f"{len(run.steps)} ({run.skipped})"),
        ("last loss", lambda run: number(run.last("loss"))),
        ("samples/s", lambda run: number(run.samples_per_s())),
        ("tokens/s", lambda run: number(run.tokens_per_s())),
        ("step", lambda run: f"{number(1e3 * run.step_s())} ms" if run.step_s() else "-"),
        ("ranks", lambda run: str(run.start.get("world", "-"))),
    ]
    tiles = ""
    for name, fact in facts:
        values = "".join(
            f'<b style="color:{colour}">{escape(fact(run))}</b>' if len(runs) > 1 else f"<b>{escape(fact(run))}</b>"
            for run, colour in zip(runs, _COLOURS, strict=False)
        )
        tiles += f'<div class="tile"><span class="soft">{name}</span>{values}</div>'
    return f'<div class="tiles">{tiles}</div>'


def _origin(run: Run) -> str:
    """The configuration's file, or that the program gave it."""
    origin = str(run.start.get("origin", ""))
    return "given by the program, as a dict" if origin == "<dict>" else origin


def _configuration(run: Run) -> str:
    decided = "".join(f"<li>{escape(line)}</li>" for line in run.start.get("decisions", []))
    return (
        f'<div class="card"><h2>Configuration of {escape(run.name)}</h2>'
        f"<p class=soft>{escape(_origin(run))}</p>"
        f"<h2>What was decided, and why</h2><pre>{escape(run.start.get('summary', ''))}</pre><ul>{decided}</ul>"
        f"<details><summary>as given</summary><pre>{escape(run.start.get('config', ''))}</pre></details></div>"
    )


def make_page(runs: Sequence[Run]) -> str:
    """The page of one or two runs."""
    several = len(runs) > 1
    title = " and ".join(run.name for run in runs)
    limits = "".join(
        f'<div class="limit">{f"<b>{escape(run.name)}</b>: " if several else ""}{escape(run.limit)}</div>'
        for run in runs
        if run.limit
    )

    def named(text: str, run: Run) -> str:
        return f"{text}: {run.name}" if several else text

    charts = [
        _curve("Loss", runs, lambda line: line["loss"]),
        _curve("Gradient norm before clipping", runs, lambda line: line["norm"], marks=True),
        _curve("Tokens per second", runs, lambda line: line.get("tokens_per_s")),
        _curve("Samples per second", runs, lambda line: line.get("samples_per_s")),
        *(_time_chart(run, named("Where a step's time went", run)) for run in runs),
        *(_memory_chart(run, named("Memory by role", run)) for run in runs),
        *(_memory_over_time(run, named("Memory as each step ended", run)) for run in runs),
        _curve("Learning rate", runs, lambda line: line["lr"]),
        *(_rank_table(run) for run in runs),
    ]
    settings = "".join(_configuration(run) for run in runs)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head><body>'
        f"<h1>{escape(title)}</h1><p class=soft>A Deeptide run, as rank 0 recorded it.</p>{limits}{_tiles(runs)}"
        f'<div class="grid">{"".join(charts)}</div><div class="grid">{settings}</div></body></html>\n'
    )
