# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Tries seed after seed in a few processes until the time is over."""

import collections
import concurrent.futures
import functools
import json
import multiprocessing
import random
import time
import traceback

import generate
import pipelines
import torch
from actions import programs
from drawn import trial
from drawn.program import names_in
from drawn.program import program_of as drawn_program_of
from reference import defined
from reference.oracle import OPEN
from runner import Runner
from shrink import Shrinker, judged

PIPELINES = 5  # of so many seeds, the last one's program is a pipeline
DRAWN = (10, 7)  # of ten seeds, the seventh one's model is drawn, of traits that are right
PROGRAMS_PER_PROCESS = 100  # the oracle's memory grows from program to program, some 15 MiB each
_runner = None


def start(patience=1):
    """In each process that tries programs: it has a runner of its own."""
    global _runner
    torch.set_num_threads(1)
    _runner = Runner(patience)


def told(try_one):
    """A fault of the fuzzer's own is a finding of its seed, and the campaign goes on."""

    @functools.wraps(try_one)
    def tried(seed, *args):
        started = time.monotonic()
        try:
            return try_one(seed, *args)
        except Exception as error:
            found = ("the fuzzer's own", type(error).__name__), traceback.format_exc()
            return seed, 0, 0, time.monotonic() - started, found

    return tried


@told
def try_seed(seed, on_accelerator, count, seconds_to_shrink, end):
    """(seed, its settings, the acts they run, seconds, None or what was found). Shrinks no longer than until `end`."""
    started = time.monotonic()
    program = generate.program_of(seed, on_accelerator)
    settings = defined.settings_for(program, random.Random(seed), count)
    acts = len(settings) * sum(len(phase["acts"]) for phase in program["phases"])
    found = try_program(program, settings, seconds_to_shrink, end)
    return seed, len(settings), acts, time.monotonic() - started, found


@told
def try_pipeline(seed, on_accelerator):
    """Tries the pipeline program of that number, like try_seed."""
    started = time.monotonic()
    program = pipelines.program_of(seed, on_accelerator)
    acts = sum(len(phase["acts"]) for phase in program["phases"])
    return seed, 1, acts, time.monotonic() - started, pipelines.try_program(_runner, program)


@told
def try_drawn(seed, only_right, seconds_to_shrink, end, refusals):
    """Tries the drawn model's program of that number, like try_seed."""
    started = time.monotonic()
    program = drawn_program_of(seed, only_right)
    shrink = max(0, min(seconds_to_shrink, end - time.monotonic()))
    found = trial.try_program(_runner, program, shrink, refusals)
    return seed, 1, len(program["steps"]), time.monotonic() - started, found


def try_program(program, settings, seconds_to_shrink, end=float("inf"), avoid=True):
    """None, or the mismatch's signature and a text. avoid: see oracle.expected_of."""
    found = judged(_runner, program, settings, avoid)
    if not found:
        return None
    seconds_to_shrink = min(seconds_to_shrink, end - time.monotonic())
    if seconds_to_shrink <= 0:
        return found[0].signature, str(found[0])
    shrinker = Shrinker(_runner, seconds_to_shrink, avoid)
    smallest, settings, mismatch = shrinker.shrink(program, found[0])
    text = f"{mismatch}\nsettings: {', '.join(map(str, settings))}; smallest program, after {shrinker.tries} tries:\n"
    return mismatch.signature, text + programs.dump(smallest)


def try_open(path):
    """(path, whether it still fails)."""
    program = json.loads(path.read_text())
    return path, try_program(program, programs.settings_of(program), seconds_to_shrink=0, avoid=False) is not None


class Campaign:
    """Counts what ran and what it found."""

    def __init__(self, options):
        self.options = options
        self.end = time.monotonic() + options.seconds
        self.longest = 0.0  # seconds that a program took
        self.drawn = 0
        self.seeds = iter(range(options.seed, options.seed + options.programs))
        self.counts, self.found = collections.Counter(), collections.Counter()

    def run(self):
        """Returns whether every program gave what plain torch gives."""
        jobs = self.options.jobs
        context = multiprocessing.get_context("spawn")
        pool = concurrent.futures.ProcessPoolExecutor(
            jobs, context, start, (self.options.patience,), max_tasks_per_child=PROGRAMS_PER_PROCESS
        )
        with pool:
            running = {future for _ in range(jobs) if (future := self._submit(pool))}
            known = [pool.submit(try_open, path) for path in sorted(OPEN.glob("*.json"))]
            while running:
                done, running = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in done:
                    self._count(*future.result())
                    if following := self._submit(pool):
                        running.add(following)
            for future in known:
                path, fails = future.result()
                print(f"known: {path.stem}: {'still fails' if fails else 'agrees now; move it to tests/fuzz/mended'}")
        self._print()
        return not self.found

    def _submit(self, pool):
        is_over = time.monotonic() + self.longest >= self.end or (self.options.first and self.found)
        seed = None if is_over else next(filter(self._is_asked_for, self.seeds), None)
        if seed is None:
            return None
        self.drawn += 1
        on_accelerator = self.options.on_accelerator
        shrink = 60 if self.options.shrink is None else self.options.shrink
        is_turn = not (self.options.pipelines or on_accelerator) and self.drawn % DRAWN[0] == DRAWN[1]
        if self.options.models or is_turn:
            only_right = not self.options.models
            return pool.submit(try_drawn, seed, only_right, shrink, self.end, self.options.refusals)
        if self.options.pipelines or self.drawn % PIPELINES == 0:
            return pool.submit(try_pipeline, seed, on_accelerator)
        return pool.submit(try_seed, seed, on_accelerator, self.options.settings, shrink, self.end)

    def _is_asked_for(self, seed):
        return not self.options.having or {*self.options.having} <= names_in(drawn_program_of(seed))

    def _count(self, seed, runs, acts, seconds, mismatch):
        self.counts.update(programs=1, runs=runs, acts=acts)
        if not mismatch:
            self.longest = max(self.longest, seconds)
            return
        signature, text = mismatch
        self.found[signature] += 1
        if self.found[signature] == 1 or self.options.all:
            print(f"=== seed {seed}, {seconds:.0f} s: {text}", flush=True)

    def _print(self):
        counts = self.counts
        size = f"{counts['programs']} programs, {counts['runs']} runs, {counts['acts']} acts"
        print(f"fuzz: {size}, from seed {self.options.seed}; {sum(self.found.values())} programs failed")
        for signature, count in self.found.most_common():
            print(f"  {count} x {' '.join(map(str, filter(None, signature)))}")
