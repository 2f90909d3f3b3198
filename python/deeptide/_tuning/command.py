# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""`deeptide tune`: surveys the script's model, runs it for some steps at a time, writes the fastest configuration.

The launcher hands over, as JSON, its own path, the job's options and the script's words.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from deeptide import _C
from deeptide._C import ConfigError
from deeptide._tuning.search import Attempt, Search, table

_LONGEST_S = 7200.0  # of a first run; others get ten times what the longest has taken, and 10 minutes at least
_ERROR = re.compile(r"Error|killed|error:|failed")
_PREFIX = re.compile(r"^(\[rank ?\d+\]:? )+")  # the launcher's, and torch's
_OBSERVERS = ("tensorboard", "wandb", "comet", "csv_monitor", "flops_profiler")


class Runs:
    """Starts the launcher, once per run."""

    def __init__(self, words: dict[str, Any]) -> None:
        self.words = words
        self._longest_s = 0.0

    def command(self, wanted: dict[str, Any], arguments: list[str]) -> list[str]:
        """A job whose ranks are `deeptide._tuning.run`."""
        job = list(self.words["job"])
        script = self.words["command"][0]
        if not self.words["as_module"]:
            job.append("--module")
            mentioned = "--local_rank" in Path(script).read_text(errors="replace")
            if mentioned and not {"--local_rank", "--no_local_rank"} & set(job):
                job.append("--local_rank")  # which the launcher cannot see behind the module
        wanted = wanted | {"as_module": self.words["as_module"]}
        return [self.words["launcher"], *job, "deeptide._tuning.run", json.dumps(wanted), script, *arguments]

    def run(self, wanted: dict[str, Any], arguments: list[str], folder: Path) -> dict[str, Any]:
        """The result, or {"error": text}; the output is in the folder's log.txt."""
        folder.mkdir(parents=True, exist_ok=True)
        result, log = folder / "result.json", folder / "log.txt"
        result.unlink(missing_ok=True)
        limit = max(600.0, 10 * self._longest_s) if self._longest_s else _LONGEST_S
        began = time.monotonic()
        with log.open("w") as output:
            job = subprocess.Popen(
                self.command(wanted | {"result": str(result.resolve())}, arguments),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            code = _wait(job, limit)
        if code == 0 and result.exists():
            self._longest_s = max(self._longest_s, time.monotonic() - began)
            return dict(json.loads(result.read_text()))
        return {"error": _why(code, log, limit)}


def _wait(job: subprocess.Popen[bytes], limit: float) -> int | None:
    """The exit code; None after the limit. ^C reaches the launcher, too, which ends its ranks."""
    try:
        return job.wait(limit)
    except subprocess.TimeoutExpired:
        job.terminate()
        job.wait()
        return None
    except KeyboardInterrupt:
        job.wait()
        raise


def _why(code: int | None, log: Path, limit: float) -> str:
    if code is None:
        return f"no end within {limit:.0f} s"
    if code == 0:
        return f"no result in {log.parent}: rank 0 must run on this host, or share that folder with it"
    lines = [_PREFIX.sub("", line).strip() for line in log.read_text(errors="replace").splitlines()]
    said = next((line for line in reversed(lines) if _ERROR.search(line)), f"exit code {code}")
    return f"{said[:200]} ({log})"


def set_argument(arguments: list[str], name: str, value: object) -> list[str]:
    """The script's arguments with `name` set to `value`."""
    for index, word in enumerate(arguments):
        if word == name:
            return [*arguments[: index + 1], str(value), *arguments[index + 2 :]]
        if word.startswith(f"{name}="):
            return [*arguments[:index], f"{name}={value}", *arguments[index + 1 :]]
    return [*arguments, name, str(value)]


def _merge(into: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Merges like Config.merged: null removes."""
    merged = dict(into)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict):
            merged[key] = _merge(merged[key] if isinstance(merged.get(key), dict) else {}, value)
        else:
            merged[key] = value
    return merged


def _switch(attempt: Attempt) -> dict[str, Any]:
    """The words that tell a run of recomputation; none where the script's own counts."""
    return {} if attempt.recomputes is None else {"recomputes": attempt.recomputes}


def _call_of(recomputes: bool) -> str:
    """The call that the script makes before initialize, as no configuration holds it."""
    return f"model.gradient_checkpointing_{'enable' if recomputes else 'disable'}()"


class Tuning:
    """One search: its folders, its runs and what it writes."""

    def __init__(self, words: dict[str, Any]) -> None:
        self.words = words
        self.runs = Runs(words)
        self.memory_bytes = _C.machine_limits([]).memory_bytes  # before any rank takes some
        self.survey = self._take_survey()
        self.wanted = self.survey["autotuning"]
        self.experiments, self.results = (
            Path(self.wanted["exps_dir"]).absolute(),
            Path(self.wanted["results_dir"]).absolute(),
        )
        if self.wanted["end_profile_step"] <= self.wanted["start_profile_step"] - 1:
            raise ConfigError('"autotuning": end_profile_step must not be below start_profile_step')
        if self.wanted["overwrite"]:
            shutil.rmtree(self.experiments, ignore_errors=True)
        self.search = Search(self.survey, self.memory_bytes, self.measure)

    def _take_survey(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="deeptide-tune-") as folder:
            survey = self.runs.run({"mode": "survey"}, self.words["command"][1:], Path(folder))
            if "error" in survey:
                sys.stderr.write((Path(folder) / "log.txt").read_text(errors="replace"))
                raise ConfigError("the script's first run, which tells its model, ended as printed above")
        return survey

    def measure(self, attempt: Attempt) -> dict[str, Any]:
        """The result of an earlier search, or of a run."""
        patch = _merge(self._silence(), attempt.patch(self.survey["world"]))
        first = max(self.wanted["start_profile_step"], 1)
        wanted = {"mode": "time", "patch": patch, "first_step": first, "last_step": self.wanted["end_profile_step"]}
        wanted |= _switch(attempt)
        arguments = self.arguments(attempt)
        folder = self.experiments / self._folder_name(attempt, wanted, arguments)
        done = folder / "result.json"
        print(f"  {attempt.name}, batch {attempt.batch}: ", end="", flush=True)
        known = done.exists()
        result = json.loads(done.read_text()) if known else self.runs.run(wanted, arguments, folder)
        if not known:
            done.write_text(json.dumps(result))
        rate = result["error"] if "error" in result else f"{result['samples_per_s']:.2f} samples/s"
        print(rate + (", measured before" if known else ""), flush=True)
        return dict(result)

    def _folder_name(self, attempt: Attempt, wanted: dict[str, Any], arguments: list[str]) -> str:
        """The same for the same run: of the same script, options, configuration and steps."""
        facts = [wanted, arguments, self.words["job"], self.words["command"][0], self.survey["config"]]
        key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]
        return re.sub(r"[^a-z0-9]+", "_", f"{attempt.name} {attempt.batch}".lower()).strip("_") + f"_{key}"

    def _silence(self) -> dict[str, Any]:
        """Monitors and timelines of the script are not of a trial."""
        patch: dict[str, Any] = {name: None for name in _OBSERVERS if name in self.survey["config"]}
        own = self.survey["config"].get("deeptide", {})
        sections = {name: None for name in ("jsonl_monitor", "timeline") if name in own}
        return patch | ({"deeptide": sections} if sections else {})

    def arguments(self, attempt: Attempt) -> list[str]:
        """The script's, with what "arg_mappings" maps to the attempt's values."""
        arguments = list(self.words["command"][1:])
        for key, name in self.wanted["arg_mappings"].items():
            value: Any = self.configuration(attempt)
            for part in key.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                arguments = set_argument(arguments, name, value)
        return arguments

    def configuration(self, attempt: Attempt) -> dict[str, Any]:
        """The script's configuration as the attempt changes it."""
        merged = _merge(self.survey["config"], attempt.patch(self.survey["world"]))
        merged.pop("autotuning", None)
        return merged

    def write(self, best: Attempt) -> None:
        """The table, the fastest configuration, and the command that uses it."""
        self.results.mkdir(parents=True, exist_ok=True)
        path = self.results / "ds_config_optimal.json"
        path.write_text(json.dumps(self.configuration(best), indent=2) + "\n")
        (self.results / "summary.txt").write_text(table(self.search) + "\n")
        (self.results / "cmd_optimal.txt").write_text(self._optimal_command(best, path) + "\n")

    def _optimal_command(self, best: Attempt, path: Path) -> str:
        arguments, origin = self.arguments(best), self.survey["origin"]
        if best.recomputes is not None:
            arguments = [*arguments, f" # in the script, before initialize: {_call_of(best.recomputes)}"]
        names_it = [word for word in arguments if word == origin or word.endswith(f"={origin}")]
        line = " ".join(["deeptide", *self.words["job"], self.words["command"][0]])
        if not names_it:
            return f"{' '.join([line, *arguments])}  # the script holds its configuration: give it {path}"
        return " ".join([line, *(word.replace(origin, str(path)) if word in names_it else word for word in arguments)])

    def train(self, best: Attempt) -> None:
        """Becomes the job with the fastest configuration."""
        wanted = {"mode": "train", "patch": best.patch(self.survey["world"])} | _switch(best)
        command = self.runs.command(wanted, self.arguments(best))
        sys.stdout.flush()
        os.execv(command[0], command)


def _tune(words: dict[str, Any]) -> int:
    print("deeptide tune: the script's first run tells its model", flush=True)
    tuning = Tuning(words)
    survey = tuning.survey
    print(f"{survey['parameters'] / 1e6:.2f} M parameters, {survey['world']} ranks; runs in {tuning.experiments}")
    best = tuning.search.run()
    print("\n" + table(tuning.search))
    if best is None:
        print("deeptide tune: no configuration ran; the table says why", file=sys.stderr)
        return 1
    tuning.write(best)
    print(f"fastest (*): {best.name}, batch {best.batch}, in {tuning.results / 'ds_config_optimal.json'}")
    if best.recomputes is not None:
        print(f"recomputation is the model's: call {_call_of(best.recomputes)} before initialize")
    if words["run"]:
        tuning.train(best)
    return 0


def main() -> int:
    """The command; returns its exit status."""
    try:
        return _tune(json.loads(sys.argv[1]))
    except ConfigError as error:
        print(f"deeptide tune: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("deeptide tune: interrupted; the same command goes on where this one was", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
