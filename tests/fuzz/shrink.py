# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Makes a failing program smaller for as long as it fails in the same way."""

import copy
import time

from actions.programs import settings_of
from reference.expected import UndefinedError
from reference.verdict import Judge

SIMPLE_MODEL = {
    "blocks": 1,
    "width": 3,
    "norm": "layer",
    "tie": "none",
    "extras": [],
    "frozen": [],
    "left_out": [],
    "groups": 1,
    "seed_by_rank": False,
    "pruning": None,
    "depth": None,
    "tokens": None,
    "mixer": False,
}
SIMPLE_PHASE = {
    "bf16": False,
    "fp16": False,
    "gas": 1,
    "shift": 0,
    "flip": False,
    "config": {},
    "offload": False,
    "packed": False,
    "moments": False,
    "quantized": None,
    "fed_back": False,
    "folders": 0,
    "beside": False,
    "activations": None,
    "placement": {},
    "observers": [],
}
SIMPLE_ACT = {
    "on": True,
    "route": [[0]],
    "seeds": 1,
    "seed": 1,
    "kind": "square",
    "via": "engine",
    "mode": "train",
    "retain": None,
    "recompute": None,
    "anew": False,
    "repeats": False,
    "packed": None,
    "rows": 4,
}


def judged(runner, program, settings, avoid=True):
    """The mismatches of one run. Raises UndefinedError."""
    judge = Judge(program, avoid)
    for setting in settings:
        judge.expected(setting)
    return judge.mismatches(runner.run(program, settings))


class Shrinker:
    """shrink() returns (the smallest program found, its settings, its mismatch)."""

    def __init__(self, runner, seconds, avoid=True):
        self.runner, self.avoid, self.end = runner, avoid, time.monotonic() + seconds
        self.tries = 0

    def shrink(self, program, mismatch):
        self.best, self.mismatch = program, mismatch
        self.settings = [mismatch.setting] if mismatch.setting and mismatch.kind != "bits" else settings_of(program)
        self._fewer_settings()
        changed = True
        while changed and time.monotonic() < self.end:
            changed = sum([self._fewer_phases(), self._fewer_acts(), self._simpler()]) > 0
        return self.best, self.settings, self.mismatch

    def _fails(self, program, settings):
        if time.monotonic() > self.end:
            return False
        self.tries += 1
        try:
            found = judged(self.runner, program, settings, self.avoid)
        except (UndefinedError, KeyError, IndexError):
            return False
        alike = [m for m in found if _cause(m) == _cause(self.mismatch)]
        if not alike:
            return False
        self.best, self.settings, self.mismatch = program, settings, alike[0]
        return True

    def _fewer_settings(self):
        if self.mismatch.kind != "bits":
            return
        for setting in settings_of(self.best):
            for other in settings_of(self.best):
                if setting != other and self._fails(self.best, [setting, other]):
                    return

    def _fewer_phases(self):
        for index in reversed(range(len(self.best["phases"]))):
            smaller = copy.deepcopy(self.best)
            del smaller["phases"][index]
            if smaller["phases"] and self._fails(smaller, self.settings):
                return True
        return False

    def _fewer_acts(self):
        """Halves, quarters, …, single acts, from the end."""
        changed = False
        for index in range(len(self.best["phases"])):
            size = len(self.best["phases"][index]["acts"])
            while size:
                end = len(self.best["phases"][index]["acts"])
                while end > 0:
                    smaller = copy.deepcopy(self.best)
                    del smaller["phases"][index]["acts"][max(0, end - size) : end]
                    changed |= self._fails(smaller, self.settings)
                    end -= size
                size //= 2
        return changed

    def _simpler(self):
        changed = False
        for place, values in self._places():
            for key, simple in values.items():
                target = _at(self.best, place)
                if key not in target or target[key] == simple:
                    continue
                smaller = copy.deepcopy(self.best)
                _at(smaller, place)[key] = simple
                changed |= self._fails(smaller, self.settings)
        return changed

    def _places(self):
        yield (
            (),
            {
                "clipping": 0.0,
                "schedule": None,
                "optimizer": {"type": "SGD", "by": "config", "params": {"lr": 0.05, "momentum": 0.0}},
                "seed": 0,
                "end": "destroy",
                "hosts": 1,
                "data": None,
                "accelerator": None,
            },
        )
        yield ("model",), SIMPLE_MODEL
        for p, phase in enumerate(self.best["phases"]):
            yield ("phases", p), {**SIMPLE_PHASE, "world": 1}
            if self.best["phases"][p]["world"] > 2:  # as it is by now: from 1 it would grow, over and over
                yield ("phases", p), {"world": 2}
            for a in range(len(phase["acts"])):
                yield ("phases", p, "acts", a), SIMPLE_ACT


def _cause(mismatch):
    """With the exception, and whether it came before any act: other errors of an act are not the one looked for."""
    raised = mismatch.text.split(":")[0], ": initialize:" in mismatch.text
    return (*mismatch.signature[:2], *(raised if mismatch.kind == "error" else ()))


def _at(value, place):
    for key in place:
        value = value[key]
    return value
