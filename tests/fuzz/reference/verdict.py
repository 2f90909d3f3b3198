# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Compares what engines gave with what plain torch gives; the tolerance follows from the program itself."""

import math
import re
from typing import NamedTuple

import torch
from actions.acts import UNCOUNTED, is_raw
from actions.programs import acts_of, is_low, placement_of, quantized_in

from reference.expected import Raises
from reference.oracle import expected_of, traits_of

# An engine sums in another order than plain torch. `plain.Life` with noise moves each gradient and each master by what
# rounding may move them; a program's tolerance at a value is MARGIN times what that moved the value, and at least FLOOR
# of its size: a sum of as many terms rounds differently. In bf16 an element moves by a whole step or not at all. Which
# ones may is shown by noise that is MARGIN times as large, and what that moves counts as it is.
MARGIN = 24  # two noises show less than rounding does now and then
FLOOR = 2e-6
FLOOR_OF_LOW = 2.0**-7  # in bf16 one element of a parameter may round to its neighbour
FLOOR_OF_MASTERS = 2.0**-10  # which moves the fp32 values beside it by less
NOISES = ((1, 1), (2, 1))
NOISES_OF_LOW = ((3, MARGIN), (4, MARGIN))
NOISES_OF_MOMENTS = ((7, 1), (8, 1), (9, 1), (10, 1))  # each rounds by itself: two noises may both be small at a scalar
NOISES_IN_DOUBT = ((11, 1), (12, 1), (13, 1), (14, 1), (15, 1), (16, 1))  # before a value is called wrong
NOISES_OF_QUANTIZED = ((5, 1), (6, 1))  # an error beyond them is not rounding's hundredth, but a bound's half


class Mismatch(NamedTuple):
    """kind: value, error, silence (an error was expected), internal (an error for developers), bits, hang, ended."""

    kind: str
    setting: object
    phase: int
    number: int
    rank: int
    act: dict
    text: str

    @property
    def signature(self):
        return self.kind, self.act.get("act"), self.act.get("way")

    def __str__(self):
        place = f"phase {self.phase}, act {self.number} {self.act}, rank {self.rank}"
        return f"{self.kind} at {self.setting}, {place}: {self.text}"


class Judge:
    """Knows what a program must give at each setting; settings that plain torch cannot tell apart are computed once."""

    def __init__(self, program, avoid=True):
        self.program, self.avoid = program, avoid
        self._known, self._doubted = {}, set()

    def expected(self, setting):
        traits = traits_of(self.program, setting)
        if traits not in self._known:
            exact = expected_of(self.program, setting, avoid=self.avoid)
            low = any(is_low(phase) for phase in self.program["phases"])
            noises = NOISES + NOISES_OF_LOW if low else NOISES
            if any(phase.get("moments") for phase in self.program["phases"]):
                noises += NOISES_OF_MOMENTS
            if any(quantized_in(phase, setting.of(phase)) for phase in self.program["phases"]):
                noises += NOISES_OF_QUANTIZED
            self._known[traits] = (exact, self._moved(setting, noises))
        return self._known[traits]

    def _moved(self, setting, noises):
        return [(expected_of(self.program, setting, noise, self.avoid), MARGIN / noise[1]) for noise in noises]

    def mismatches(self, run):
        if not run.hung:
            found = [m for setting, ranks in run.results.items() for m in self._beyond_doubt(setting, ranks)]
            return found or self._bits(run)
        # The first setting that did not end is the one that hangs, unless an earlier one has failed already.
        for setting, ranks in run.results.items():
            if all(ranks):
                found = list(self._beyond_doubt(setting, ranks))
                if found:
                    return found
                continue
            text = f"ranks {run.hung} did not end\n" + "\n".join(
                f"-- rank {r}: {log[1][-3000:]}" for r, log in enumerate(run.logs) if log
            )
            return [Mismatch("hang", setting, -1, -1, run.hung[0], {}, text)]
        return [Mismatch("ended", None, -1, -1, run.hung[0], {}, f"ranks {run.hung} failed: {run.logs}")]

    def _beyond_doubt(self, setting, ranks):
        """The mismatches of a setting; those of values only if more noises do not show as much."""
        found = list(self._of_setting(setting, ranks))
        traits = traits_of(self.program, setting)
        if any(m.kind == "value" for m in found) and traits not in self._doubted:
            self._doubted.add(traits)
            self.expected(setting)[1].extend(self._moved(setting, NOISES_IN_DOUBT))
            found = list(self._of_setting(setting, ranks))
        return found

    def _of_setting(self, setting, ranks):
        exact, moved = self.expected(setting)
        for p, phase in enumerate(self.program["phases"]):
            acts = acts_of(phase)
            for number, by_rank in enumerate(exact[p]):
                for rank, wanted in enumerate(by_rank):
                    place = (setting, p, number, rank, acts[number])
                    got = ranks[rank][p]
                    if number >= len(got):
                        yield Mismatch("ended", *place, f"the engine is of no use since {got[-1]}")
                        return
                    others = [(m[p][number][rank], margin) for m, margin in moved]
                    kind, text = _compare(wanted, others, got[number], _floor(phase, acts[number]))
                    if kind:
                        yield Mismatch(kind, *place, text)
                        return

    def _bits(self, run):
        """Settings that add in the same order, and of which plain torch expects the same, end with the same bits."""
        first = {}
        for setting, ranks in run.results.items():
            acts, results = acts_of(self.program["phases"][-1]), ranks[0][-1]
            final = results[-2]
            if len(results) < len(acts) or final[0] != "ok":
                continue
            other, values = first.setdefault(self._order(setting), (setting, final[1]))
            for name, value in final[1].items():
                if value is not None and not _same_bits(value, values[name]):
                    text = f"{name} is not {other}'s: off by {(value - values[name]).abs().max()}"
                    return [Mismatch("bits", setting, len(self.program["phases"]) - 1, -2, 0, acts[-2], text)]
        return []

    def _order(self, setting):
        """Stages 0 and 1 add micro-batches first, 2 and 3 ranks first; some acts differ in meaning by setting."""
        phases = self.program["phases"]
        acts = [act for phase in phases for act in phase["acts"]]
        special = {"boundary", "no_sync", "add_left_out"} & {act["act"] for act in acts}
        special = special or any(is_raw(act) or act.get("way") in UNCOUNTED for act in acts)
        # A backward that fails leaves rounds begun, which a call that is refused may go on with before the next one.
        special = special or any(act["act"] == "raise" and act["where"] == "backward" for act in acts)
        traits = traits_of(self.program, setting) if special else ()
        quantized = tuple(quantized_in(phase, setting.of(phase)) for phase in phases)
        late = tuple(phase["gas"] > 1 and setting.of(phase).stage >= 2 for phase in phases)
        # States off the device are stepped by the CPU's kernels, which fuse multiply-adds.
        on_host = tuple(bool(placement_of(phase, setting.of(phase))) for phase in phases)
        return traits, late, quantized, on_host if self.program.get("accelerator") else ()


def _same_bits(a, b):
    return torch.equal(a, b) or torch.equal(a.nan_to_num(), b.nan_to_num())


def _floor(phase, act):
    if not is_low(phase):
        return FLOOR
    return FLOOR_OF_MASTERS if act["act"] == "look_all" else FLOOR_OF_LOW


def _compare(wanted, others, got, floor):
    """(kind of mismatch or None, text)."""
    if got[0] == "raised" and ("INTERNAL ASSERT" in got[2] or "a fault in deeptide" in got[2]):
        return "internal", f"{got[1]}: {got[2]}"
    if isinstance(wanted, Raises):
        if got[0] == "ok":
            return "silence", f"nothing was raised, expected {wanted}"
        right = got[1] in wanted.kinds and re.search(wanted.pattern, got[2])
        return (None, "") if right else ("error", f"{got[1]}: {got[2]}\nexpected {wanted}")
    if got[0] != "ok":
        return "error", f"{got[1]}: {got[2]}"
    if (wanted is None) != (got[1] is None):
        return "value", f"got {got[1]}, expected {wanted}"
    if wanted is None or any(isinstance(other, Raises) or other.keys() != wanted.keys() for other, _ in others):
        return None, ""  # rounding decides whether it fails, or is applied
    if wanted.keys() != got[1].keys():
        return "value", f"names differ: {sorted(wanted.keys() ^ got[1].keys())}"
    for name, value in wanted.items():
        text = _difference(value, [(other[name], margin) for other, margin in others], got[1][name], floor)
        if text:
            return "value", f"{name}: {text}"
    return None, ""


def _difference(wanted, others, got, floor):
    if isinstance(wanted, torch.Tensor):
        return _tensor_difference(wanted, others, got, floor)
    if isinstance(wanted, float) and not isinstance(got, torch.Tensor):
        return _tensor_difference(
            torch.tensor(wanted), [(torch.tensor(o), m) for o, m in others], torch.tensor(got), floor
        )
    if isinstance(wanted, list) and wanted and isinstance(wanted[0], float):
        same = len(got) == len(wanted) and all(
            math.isclose(a, b, rel_tol=1e-9) for a, b in zip(got, wanted, strict=True)
        )
        return "" if same else f"got {got}, expected {wanted}"
    return "" if got == wanted else f"got {got}, expected {wanted}"


def _tensor_difference(wanted, others, got, floor):
    if got is None or got.shape != wanted.shape or got.dtype != wanted.dtype:
        described = None if got is None else (got.dtype, tuple(got.shape))
        return f"got {described}, expected {wanted.dtype} {tuple(wanted.shape)}"
    if not wanted.dtype.is_floating_point or not wanted.numel():
        return "" if torch.equal(wanted, got) else f"got {got}, expected {wanted}"
    wanted, got = wanted.double(), got.double()
    finite = wanted.isfinite()
    if not torch.equal(finite, got.isfinite()):
        return f"got {got}, expected {wanted}"
    if not finite.any():
        return ""
    spread = max(margin * (other.double() - wanted)[finite].abs().max().item() for other, margin in others)
    tolerance = spread + floor * wanted[finite].abs().max().item() + 1e-9
    worst = (got - wanted)[finite].abs().max().item()
    return "" if worst <= tolerance else f"off by {worst:.3g}, tolerance {tolerance:.3g}\ngot {got}\nexpected {wanted}"
