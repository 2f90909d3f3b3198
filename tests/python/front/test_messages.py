# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The front tells a user, and a program takes hold of it: logging, warnings, the summary at the start."""

import logging
import sys

import edges
import pytest
from conftest import run_ranks

import deeptide
from deeptide._process.log import DeeptideWarning, say


@pytest.fixture
def engine(tmp_path):
    engine = edges.start(stage=3, zero={"stage3_gather_16bit_weights_on_model_save": False})
    yield engine
    engine.destroy()


def test_the_logger_deeptide_has_what_the_front_says(caplog, capsys):
    with caplog.at_level(logging.INFO, "deeptide"):
        say("a line")
    assert [(record.name, record.levelname, record.message) for record in caplog.records] == [
        ("deeptide", "INFO", "a line")
    ]
    assert capsys.readouterr().err == "[deeptide] a line\n"


def test_a_line_is_shown_once_if_the_program_logs_to_the_terminal_itself(capsys, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [logging.StreamHandler(sys.stderr)])
    say("a line")
    assert capsys.readouterr().err == "a line\n"


def test_a_warning_names_the_programs_own_line(engine, tmp_path, caplog, capsys):
    with pytest.warns(DeeptideWarning, match="stage 3 gathers the whole model") as caught:
        assert not engine.save_16bit_model(tmp_path)
    assert [warning.filename for warning in caught] == [__file__]
    assert [(record.name, record.levelname) for record in caplog.records] == [("deeptide", "WARNING")]
    assert capsys.readouterr().err == ""  # `warnings` shows it, once


def test_messages_below_the_level_are_neither_logged_nor_warned(monkeypatch, caplog, recwarn, capsys):
    monkeypatch.setenv("DEEPTIDE_LOG_LEVEL", "error")
    say("a line")
    say("a warning", "warning")
    assert not caplog.records
    assert not recwarn.list
    assert capsys.readouterr().err == ""


ONE_COPY = "the parameters in one copy with the other ranks of its host"
KEPT = {
    **{("shared", stage): f"{ONE_COPY}, all gradients, 1/2 of the optimizer states" for stage in (0, 1)},
    **{("shared", stage): f"{ONE_COPY}, 1/2 of the gradients, 1/2 of the optimizer states" for stage in (2, 3)},
    ("apart", 0): "all parameters, all gradients, all optimizer states",
    ("apart", 1): "all parameters, all gradients, 1/2 of the optimizer states",
    ("apart", 2): "all parameters, 1/2 of the gradients, 1/2 of the optimizer states",
    ("apart", 3): "1/2 of the parameters, 1/2 of the gradients, 1/2 of the optimizer states",
}


def _summary(world, stage):
    config = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    engine = edges.start(world, **config)
    text = engine.summary()
    engine.destroy()
    return text


@pytest.mark.both_ways
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_summary_says_what_each_rank_keeps(request, stage):
    expected = KEPT[request.node.callspec.params["_memory"], stage]
    text = run_ranks(2, _summary, stage)[0]
    assert f"each rank keeps: {expected}" in text, text
    assert "sharded" not in text.split("types:")[0]


def test_the_category_of_warnings_is_public():
    assert deeptide.DeeptideWarning is DeeptideWarning
