# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The record of a run and the page about it."""

import json
from html.parser import HTMLParser

import pytest
import torch
from conftest import run_processes
from models import batches, make_model

import deeptide
from deeptide._commands.report import main, write_report
from deeptide._commands.run_record import Run


def config_of(folder, name="run", **extra):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "steps_per_print": 2,
        "deeptide": {"jsonl_monitor": {"enabled": True, "output_path": str(folder), "job_name": name}},
        **extra,
    }


def train(config, steps=6, bad=None):
    engine = deeptide.initialize(model=make_model(), config=config)[0]
    for step, (tokens, targets) in enumerate(batches(steps, 4)):
        loss = engine(tokens, targets)
        engine.backward(loss * float("nan") if step == bad else loss)
        engine.step()
    return engine


class Page(HTMLParser):
    """Collects what a browser would load, and whether tags match."""

    def __init__(self, text):
        super().__init__()
        self.links, self.open, self.headings, self.polylines = [], [], [], 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in ("src", "href")]
        self.polylines += tag == "polyline"
        if tag not in ("meta", "line", "rect", "path", "polyline", "polygon"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.polylines += tag == "polyline"

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)

    def handle_endtag(self, tag):
        if self.open and self.open[-1] == tag:
            self.open.pop()


def test_record_tells_what_the_page_shows(tmp_path):
    engine = train(config_of(tmp_path), bad=3)
    run = Run(tmp_path / "run")
    assert [line["step"] for line in run.steps] == [1, 2, 3, 4, 5, 6]
    assert run.skipped == 1 and run.steps[3]["norm"] is None and "non-finite" in run.steps[3]["reason"]
    assert run.steps[0]["loss"] > 0 and run.steps[0]["lr"] == 0.01 and run.steps[0]["tokens"] == 4 * 6
    assert run.start["train_batch"] == 4 and run.start["summary"] == engine._core.summary()
    assert json.loads(run.start["config"])["steps_per_print"] == 2
    assert run.samples_per_s() > 0 and run.tokens_per_s() == pytest.approx(6 * run.samples_per_s())
    assert run.limit.startswith("limited by ") and len(run.ranks) == 1
    memory = {role: (peak, forecast) for role, peak, forecast in run.memory()}
    for line in engine._core.memory():
        if line.measured_bytes:
            assert memory[line.role] == (line.measured_bytes, line.predicted_bytes)
    total = run.steps[-1]["times"]
    parts = total["computing"] + total["waiting"] + total["files"] + total["data"]
    assert parts == pytest.approx(total["total"], rel=0.02)


def test_page_is_whole_and_loads_nothing(tmp_path):
    train(config_of(tmp_path), bad=3)
    text = write_report(tmp_path / "run").read_text()
    page = Page(text)
    assert page.links == [] and page.open == [] and "<script" not in text
    assert {"Loss", "Gradient norm before clipping", "Tokens per second", "Where a step's time went"} <= set(
        page.headings
    )
    assert page.polylines == 5  # loss, norm, tokens, samples, rate
    assert "step 4: non-finite gradient" in text and "limited by " in text
    assert "skipped step" in text and "ZeRO stage 0" in text


def test_two_runs_stand_side_by_side(tmp_path, capsys):
    train(config_of(tmp_path, "one"))
    train(config_of(tmp_path, "two", optimizer={"type": "AdamW", "params": {"lr": 0.001}}))
    page = tmp_path / "page.html"
    assert main([str(tmp_path / "one"), str(tmp_path / "two" / "run.jsonl"), "-o", str(page)]) == 0
    assert capsys.readouterr().out.strip() == str(page)
    text = page.read_text()
    assert Page(text).polylines == 10
    assert "Configuration of one" in text and "Configuration of two" in text


def rank_of_two(folder):
    train(config_of(folder))


def test_page_lists_ranks(tmp_path):
    run_processes(2, rank_of_two, str(tmp_path))
    text = write_report(tmp_path / "run").read_text()
    assert "rank 0" in text and "rank 1" in text and len(Run(tmp_path / "run").ranks) == 2


def test_a_resumed_run_has_each_step_once(tmp_path):
    train(config_of(tmp_path), 3)
    train(config_of(tmp_path), 5)
    path = tmp_path / "run" / "run.jsonl"
    with path.open("a") as file:
        file.write('{"kind": "st')  # killed while it wrote
    assert [line["step"] for line in Run(path).steps] == [1, 2, 3, 4, 5]


def test_what_is_no_record_is_said(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "jsonl_monitor" in capsys.readouterr().err
    (tmp_path / "run.jsonl").write_text("[1]\n{}\n")
    assert main([str(tmp_path)]) == 2
    assert "line 1: not a line of a run's record" in capsys.readouterr().err


def test_observing_changes_no_number(tmp_path):
    plain = {name: value for name, value in config_of(tmp_path).items() if name != "deeptide"}
    seen = {"wall_clock_breakdown": True, "comms_logger": {"enabled": True}, "memory_breakdown": True}
    one, other = train(plain), train(config_of(tmp_path) | seen)
    for a, b in zip(one.module.parameters(), other.module.parameters()):
        assert torch.equal(a, b)


def long_record(folder, name, steps, scale=1.0):
    """A record as a long run leaves it, of few distinct values."""
    times = dict.fromkeys(("computing", "optimizer", "waiting", "files", "data"), 0.01)
    (folder / name).mkdir(parents=True)
    with (folder / name / "run.jsonl").open("w") as file:
        file.write(json.dumps({"kind": "start", "origin": "<dict>", "world": 1, "config": "{}"}) + "\n")
        for step in range(1, steps + 1):
            spike = 50.0 if step == steps // 3 else 0.0
            line = {
                "kind": "step",
                "step": step,
                "loss": scale * (10.0 / step**0.5) + spike,
                "norm": 1.0 + step % 7,
                "lr": 1e-3,
                "applied": step % 50 > 0,
                "reason": "overflow",
                "wall_s": step * 0.05,
                "samples": 8 * step,
                "tokens": 0,
                "times": {"total": 0.05, **times},
                "memory": {"parameters": [1 << 20, 0], "gradients": [step, 0]},
            }
            file.write(json.dumps(line) + "\n")
    return folder / name


def test_a_long_run_makes_a_small_page_that_shows_each_peak(tmp_path):
    page = write_report(long_record(tmp_path, "a", 60_000), long_record(tmp_path, "b", 60_000)).read_text()
    assert len(page) < 1_000_000
    assert "<dict>" not in page and "&lt;dict&gt;" not in page and "given by the program, as a dict" in page
    assert page.count(">step</text>") >= 4  # the axis of each chart has a name
    loss = page[page.index("<h2>Loss</h2>") :]
    loss = loss[: loss.index("</svg>")]
    assert "stroke-dasharray" in loss  # two equal curves are two
    assert "<title>step 1: a: 10, b: 10</title>" in loss
    heights = [float(point.split(",")[1]) for point in loss.split('points="')[1].split('"')[0].split()]
    assert min(heights) < 20 < sorted(heights)[2]  # one peak, at the top
    assert "minmax(min(440px, 100%), 1fr)" in page
    rate = page[page.index("<h2>Samples per second</h2>") :]
    labels = [text.split("<")[0] for text in rate[: rate.index("</svg>")].split('text-anchor="end">')[1:]]
    assert len(labels) > 1 and len(set(labels)) == len(labels)  # 160 within the clock's error: an axis, not one label
