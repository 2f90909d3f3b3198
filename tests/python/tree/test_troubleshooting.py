# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""docs/troubleshooting.md has a heading for every error and warning of the sources, found by the message's text."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import edges
import pytest
import torch

import deeptide
from deeptide._commands import explain as catalogue

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "troubleshooting.md"
sys.path.insert(0, str(ROOT / "tools"))

import messages as sources  # noqa: E402

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="a bundle may leave the page out")
OF_OTHERS = {"No package metadata was found for deepspeed"}  # importlib's
# Places that pass on texts made elsewhere, by file. One is added here once its texts are found where they are made.
RELAYS = """
agreement.cc awaited_operation.h batches.py bind_custom_optimizer.cc blocking.cc boundary.cc boundary.cc
check.py command_line.cc commands.py config.py config.py configuration.py configuration.py contents.cc costs.py
elasticity.py elasticity.py engine.py errors.py errors.py
flight_files.cc host.cc io_bench.cc io_bench.cc io_threads.cc io_uring.cc layer_costs.cc live_model.cc live_state.cc
log.py log.py logging.py meeting.cc modules.py modules.py modules.py node_local.cc node_local.cc parameters.py
passage.py passage.py
pattern.cc pattern.cc preemption.py recordings.cc refusals.cc rule.cc run_agent.cc run_rank.cc section_reader.cc
stand_ins.py stand_ins.py states.py stepper.cc stepper.cc validate.cc
""".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def headings():
    return catalogue.read_headings(PAGE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def found():
    return sources.messages()


def has_words(message):
    """Not those whose one word is before a name in quotes: what is wrong with it stands elsewhere."""
    return len(re.findall(r"[A-Za-z]{2,}", message.text)) > (message.text.endswith("…") and "'" in message.text)


@pytest.mark.costly
def test_every_message_has_a_heading(headings, found):
    assert len(found) > 900
    assert [str(m) for m in found if has_words(m) and catalogue.match(headings, m.text) is None] == []


def test_what_only_passes_texts_on_is_known(found):
    assert sorted(m.path.name for m in found if not has_words(m)) == RELAYS


@pytest.mark.costly
def test_every_part_leads_somewhere(headings, found):
    """A message to its heading; or at least it is in the sources, where functions make texts that others throw."""
    folders = (ROOT / "src", ROOT / "python")
    files = [p for folder in folders for p in folder.rglob("*") if p.suffix in {".cc", ".h", ".py"}]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(files))
    text = re.sub(r'"\s*(?:f?"|R"\()', "", text)
    used = {(match.heading.title, match.part) for m in found if (match := catalogue.match(headings, m.text))}
    idle = {p for h in headings for p in h.parts if (h.title, p) not in used} - OF_OTHERS
    assert [part for part in idle if not catalogue.pattern_of(part).search(text)] == []
    told = [" ".join(m.text.split()) for m in found]
    assert [part for part in idle if any(catalogue.pattern_of(part).search(one) for one in told)] == []


@pytest.mark.costly
def test_headings_say_something_and_none_takes_all(headings, found):
    assert [h.title for h in headings if len(h.text.split()) < 8] == []
    parts = Counter(part for heading in headings for part in heading.parts)
    assert [part for part, times in parts.items() if times > 1] == []
    taken = Counter(match.heading.title for m in found if (match := catalogue.match(headings, m.text)))
    title, most = taken.most_common(1)[0]
    assert most < len(found) / 10, title


def test_a_new_message_is_missed(tmp_path, headings):
    file = tmp_path / "new.cc"
    file.write_text('void f() { TORCH_CHECK_VALUE(x, "the flux ", x, " lacks a gyre"); throw Error("tide" + y); }')
    assert [m.text for m in sources._Cpp([file]).messages()] == ["the flux … lacks a gyre", "tide…"]
    assert catalogue.match(headings, "the flux 3 lacks a gyre") is None


def message_of(error, work, *arguments, **names):
    with pytest.raises(error) as caught:
        work(*arguments, **names)
    return str(caught.value)


def test_real_messages_reach_their_heading(headings, tmp_path):
    """With values in the place of holes, over all layers between a check and Python."""
    engine = edges.start(None)
    model = torch.nn.Linear(2, 2)
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}}
    try:
        made = {
            "The loss is no scalar": message_of(ValueError, engine.backward, torch.ones(2, requires_grad=True)),
            '"did you mean"': message_of(deeptide.ConfigError, deeptide.plan, model, {**config, "train_batch_sise": 1}),
            "A key has a value of another type or range": message_of(
                deeptide.ConfigError, deeptide.plan, model, {**config, "gradient_clipping": "much"}
            ),
            "No checkpoint is there": message_of(
                deeptide.CheckpointError, deeptide.checkpoint.CheckpointReader, str(tmp_path)
            ),
        }
    finally:
        engine.destroy()
    assert {title: catalogue.match(headings, text).heading.title for title, text in made.items()} == {
        t: t for t in made
    }


def test_the_command_prints_a_heading():
    run = [sys.executable, "-m", "deeptide._commands.explain"]
    text = "rank 1: ValueError: parameter 'a.b' got other memory after initialize (module.to(), …)"
    done = subprocess.run([*run, text], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.startswith('"got other memory after initialize"\n\n`module.to(…)`')
    log = f"step 1\nTraceback (most recent call last):\n{text}\n"
    assert subprocess.run(run, input=log, capture_output=True, text=True, timeout=100).stdout == done.stdout
    unknown = subprocess.run([*run, "zzz"], capture_output=True, text=True, timeout=100)
    assert unknown.returncode == 1 and "no heading" in unknown.stdout


def test_the_command_names_what_is_near_a_message_that_no_heading_has():
    run = [sys.executable, "-m", "deeptide._commands.explain", "CUDA out of memory. Tried to allocate 2 GiB"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "nearest:" in done.stdout and "out-of-memory killer" in done.stdout, done.stdout
