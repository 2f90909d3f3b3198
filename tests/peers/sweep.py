# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Whether ranks that share or divide a model train it as one does, for small models of Transformers' architectures.

`python tests/peers/sweep.py [class …]` runs these classes, or all that have no result yet, and writes docs/models.md.
Results are kept in runs/sweep, a file for each class, so a stopped sweep goes on where it was. `--again differs error`
runs classes with such a result once more; `--page` writes the page alone.
"""

import argparse
import json
import logging
import os
import re
import signal
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import small
import torch
import torch.distributed as dist
import transformers

import deeptide
import deeptide._engine.initialize  # loaded before ranks are forked, as the next ones
import deeptide.engine
import deeptide.pipeline.engine
import deeptide.tensor
from deeptide.pipeline.errors import PipelineError
from deeptide.tensor.cutting.examples import examples_of

GAS, STEPS, RATE = 2, 2, 1e-2
MOST = 3e-3  # of its own size may a loss or an update differ
AXES = {"tensor": {"tensor": 2}, "pipeline": {"pipeline": 2}, "both": {"pipeline": 2, "tensor": 2}}
KEPT = Path(__file__).parents[2] / "runs" / "sweep"


# -- One rank ---------------------------------------------------------------------------------------------------------


def train(world, name, config, example, adds_loss, axes):
    """(losses, {parameter or buffer: update}) of some steps of SGD, which shows gradients as they are."""
    settings = {
        "train_micro_batch_size_per_gpu": len(next(iter(example[0].values()))),
        "gradient_accumulation_steps": GAS,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        **({"parallel": axes} if axes else {}),
    }
    model = small.make(name, config, adds_loss)
    before = {key: value.clone() for key, value in model.state_dict().items() if value.is_floating_point()}
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    losses = []
    for number in range(STEPS * GAS):
        loss = engine(**small.batch_of(example, number)).loss
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    after = engine.module_state_dict()
    return losses, {key: after[key].float() - value.float() for key, value in before.items() if key in after}


def alone(world, name):
    """(what `train` takes, its results) on one rank. Errors: those of the model, under which nothing is known of it."""
    config = small.config_of(name)
    inputs, labels, adds_loss = small.example_of(name, config, examples_of)
    given = (name, config, (inputs, labels), adds_loss)
    expected = train(world, *given, None)
    if all(float(value.abs().max()) == 0.0 for value in expected[1].values() if value.numel()):
        raise ValueError("no weight moves")
    return given, expected


# -- Ranks as processes -----------------------------------------------------------------------------------------------


def _serve(rank, ranks, folder, function, args, timeout):
    store = dist.FileStore(f"{folder}/store", ranks)
    store.set_timeout(timedelta(seconds=timeout))
    try:
        result = ("result", function(deeptide.make_world(store, rank, ranks), *args))
    except Exception as error:
        refused = isinstance(error, (deeptide.ConfigError, PipelineError))
        kind = "refused" if refused else "lost" if isinstance(error, deeptide.CommError) else "error"
        result = (kind, f"{type(error).__name__}: {error}" if kind == "error" else str(error), traceback.format_exc())
    torch.save(result, f"{folder}/{rank}.part")
    os.rename(f"{folder}/{rank}.part", f"{folder}/{rank}")


def run(ranks, function, *args, timeout=100):
    """Calls function(world, *args) in a forked process for each rank.

    Returns ("results", [result of each]), or what the first error is: ("refused" or "error", its text).
    """
    with tempfile.TemporaryDirectory() as folder:
        started = {}
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                with open(os.devnull, "w") as null:
                    os.dup2(null.fileno(), 1)
                    os.dup2(null.fileno(), 2)
                try:
                    _serve(rank, ranks, folder, function, args, timeout)
                finally:
                    os._exit(0)
            started[pid] = rank
        end = time.monotonic() + timeout
        running = set(started)
        while running and time.monotonic() < end:
            running -= {pid for pid in running if os.waitpid(pid, os.WNOHANG)[0]}
            time.sleep(0.02)
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        found = [
            torch.load(f"{folder}/{rank}", weights_only=False) if os.path.exists(f"{folder}/{rank}") else None
            for rank in range(ranks)
        ]
    for kind in ("refused", "error", "lost"):
        for each in found:
            if each is not None and each[0] == kind:
                return "error" if kind == "lost" else kind, each[1], each[2]
    if any(each is None for each in found):
        return "error", f"no end after {timeout} s" if running else "a rank ended without a word", ""
    return "results", [each[1] for each in found], ""


# -- One class --------------------------------------------------------------------------------------------------------


def worst(results, expected):
    """(by how much of its size a loss or an update differs, which). results: of all ranks, which have stages."""
    true_losses, true_updates = expected
    found = [(abs(one - other) / max(abs(other), 1e-3), "the loss") for one, other in zip(results[0][0], true_losses)]
    sizes = {key: float(value.square().mean().sqrt()) for key, value in true_updates.items() if value.numel()}
    least = 1e-3 * max(sizes.values())
    for key, size in sizes.items():
        owned = [updates[key] for _, updates in results if key in updates]
        if not owned:
            found.append((float("inf"), f"'{key}' is missing"))
        for update in owned:
            if update.shape != true_updates[key].shape:
                found.append((float("inf"), f"'{key}' has the shape {list(update.shape)}"))
                continue
            off = float((update - true_updates[key]).square().mean().sqrt()) / max(size, least, 1e-12)
            found.append((off if off == off else float("inf"), f"'{key}'"))
    return max(found, key=lambda each: each[0])


def outcomes(name, axes=AXES):
    """{axis: "trains", "refused: …", "differs: …" or "error: …"}; a text instead where one rank alone shows nothing."""
    if not hasattr(transformers, name):  # which loads its module, before ranks are forked
        return "not in this version"
    kind, found, _ = run(1, alone, name)
    if kind != "results":
        return f"{_first(found)}"
    (given, expected), result = found[0], {}
    for axis, sizes in axes.items():
        kind, found, trace = run(sizes.get("tensor", 1) * sizes.get("pipeline", 1), train, *given, sizes)
        if kind != "results":
            result[axis] = f"{kind}: {_first(found)}"
            if kind == "error":
                result[f"{axis} trace"] = trace
            continue
        off, what = worst(found, expected)
        result[axis] = "trains" if off <= MOST else f"differs: {what} by {off:.2g}"
    if any(value.startswith(("differs", "error")) for axis, value in result.items() if axis in AXES):
        kind, again, _ = run(1, train, *given, None)
        if kind != "results" or worst(again, expected)[0] > MOST / 10:
            return "trains to other numbers each time, alone"
    return result


def _first(text):
    return (text.splitlines() or ["no word"])[0]


# -- The page --------------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_TRAIN, _SOME, _ALONE, _WAIT = (
    "## Trained on every axis",
    "## Refused, or not run, on an axis",
    "## Not shown by the sweep",
    "## Not run yet",
)
_NOT_RUN = "not run"


def read_page():
    """{class: what `outcomes` gave}, with reasons cut short."""
    found, section = {}, ""
    for line in PAGE.read_text().splitlines():
        section = line if line.startswith("## ") else section
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and section == _SOME:
            found[cells[0].strip("`")] = dict(zip(AXES, cells[1:]))
        elif line.startswith("| `"):
            found[cells[0].strip("`")] = cells[1]
        elif line.startswith("`") and section == _TRAIN:
            found |= {name: dict.fromkeys(AXES, "trains") for name in re.findall(r"`(\w+)`", line)}
    return found


def _reason(text):
    """A cell of the table: an error's first sentence, without what differs from class to class."""
    plain = " ".join(text.replace("|", "/").split())
    return re.split(r": a layer is used|; known are|\. Name |; take parallel|\. Give |; draw them", plain)[0][:230]


def write_page(found):
    """Writes the lists of the page; its text stays. What has no new result keeps the page's."""
    head = PAGE.read_text().split("## ")[0]
    found = {name: result for name, result in read_page().items() if name in small.names()} | found
    shown = {name: result for name, result in sorted(found.items()) if isinstance(result, dict)}
    whole = [name for name, result in shown.items() if all(result.get(axis) == "trains" for axis in AXES)]
    rows = [
        f"| `{name}` | " + " | ".join(_reason(result.get(axis, _NOT_RUN)) for axis in AXES) + " |"
        for name, result in shown.items()
        if name not in whole
    ]
    alone = [f"| `{name}` | {_reason(each)} |" for name, each in sorted(found.items()) if isinstance(each, str)]
    waiting = [name for name in small.names() if name not in found]
    parts = [
        *(head + _TRAIN, _listed(whole)),
        *(_SOME, "\n".join(["| class | tensor 2 | pipeline 2 | both |", "|---|---|---|---|", *rows])),
        *(_ALONE, "\n".join(["| class | why one rank alone does not train it small |", "|---|---|", *alone])),
        *(_WAIT, _listed(waiting)),
    ]
    PAGE.write_text("\n\n".join(parts) + "\n")


def _listed(classes):
    return ", ".join(f"`{name}`" for name in classes) or "None."


def kept():
    """{class: what `outcomes` gave}."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(KEPT.glob("*.json"))}


def main():
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("classes", nargs="*")
    parser.add_argument("--again", nargs="*", default=[], help="beginnings of results to run once more")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    KEPT.mkdir(parents=True, exist_ok=True)
    known = kept()

    def is_due(name):
        if name not in known:
            return True
        values = [known[name]] if isinstance(known[name], str) else known[name].values()
        return any(value.startswith(begin) for value in values for begin in options.again)

    for name in [] if options.page else options.classes or filter(is_due, small.in_order()):
        begin = time.monotonic()
        result = outcomes(name)
        (KEPT / f"{name}.json").write_text(json.dumps(result, indent=1))
        shown = {key: value for key, value in result.items() if key in AXES} if isinstance(result, dict) else result
        print(f"{time.monotonic() - begin:.1f}", name, shown, flush=True)
    if not options.classes:
        write_page(kept())


if __name__ == "__main__":
    main()
