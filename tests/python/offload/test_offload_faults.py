# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Files when a disk fails or a run is killed, and how little of them lies in memory."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys

import models
import pytest
import torch
from conftest import FOLDERS, run_processes, run_ranks
from torch import nn

import deeptide

WIDTH, LAYERS = 1100, 6
SECTIONS = {"offload_param": "the parameters of unit '", "offload_optimizer": "optimizer states"}


class Deep(nn.Module):
    """Layers of 4.6 MiB in fp32: two blocks on disk each."""

    def __init__(self, layers=LAYERS):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def start(world, folder, *sections, layers=LAYERS):
    files = {"device": "nvme", "nvme_path": str(folder), "buffer_count": 2}
    zero = {"stage3_max_live_parameters": 0, **dict.fromkeys(sections, files)}
    with deeptide.zero.Init():
        torch.manual_seed(0)
        model = Deep(layers)
    config = models.config(3, zero=zero)
    config["deeptide"] = {**config["deeptide"], "unit_size": WIDTH * (WIDTH + 1)}
    return deeptide.initialize(model=model, config=config, world=world)[0]


def batch(step, rank=0):
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def train(engine, steps):
    for step in range(steps):
        engine.backward(engine(batch(step, engine.world.rank)))
        engine.step()


def open_files(folder):
    """Descriptors of this process that lie in the folder: swap files have no name there."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith(f"{folder}/"):
                found.append(int(name))
        except FileNotFoundError:
            pass  # what listed the folder
    return sorted(found)


def lose_a_file(world, folder, section):
    own = folder / str(world.rank)
    engine = start(world, own, section)
    train(engine, 1)
    if world.rank == world.size - 1:
        os.ftruncate(open_files(own)[0], 0)
    try:
        train(engine, 2)
    finally:
        engine.destroy()  # the error's traceback would keep the engine, and the other rank wait for it


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("world", [1, 2])
def test_a_truncated_file_is_an_error_that_names_it(world, section, tmp_path):
    folder = re.escape(str(tmp_path / str(world - 1)))
    words = rf"(reading|writing) a block of {SECTIONS[section]}.* in '{folder}' failed: the file has been truncated"
    with pytest.raises(RuntimeError, match=words) as caught:
        run_ranks(world, lose_a_file, tmp_path, section)
    assert f"(on rank {world - 1} of {world}" in caught.value.__notes__[0]


def peer_of_a_lost_file(world, folder):
    try:
        lose_a_file(world, folder, "offload_param")
    except (RuntimeError, deeptide.CommError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def test_the_other_ranks_are_told_of_it(tmp_path):
    other, broken = run_ranks(2, peer_of_a_lost_file, tmp_path)
    assert "the file has been truncated" in broken
    assert other.startswith("CommError") and "rank 1" in other, other


def fill_the_disk(folder, section):
    """Every file may be as large as it is, and no write beyond: as a disk that is full behind a thin volume."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    engine = start(None, folder, section)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    try:
        train(engine, 3)
    except RuntimeError as error:
        print(error)


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.slow
def test_a_write_that_fails_is_an_error_that_names_the_folder(section, tmp_path):
    (done,) = run_processes(1, fill_the_disk, str(tmp_path), section, fresh=True)
    words = rf"writing a block of {SECTIONS[section]}.* in '{tmp_path}' failed: (File too large|Input/output error)"
    assert re.search(words, done.stdout), done.stdout + done.stderr


def train_and_tell(folder, sections, steps):
    engine = start(None, folder, *sections)
    for step in range(steps):
        loss = engine(batch(step))
        engine.backward(loss)
        engine.step()
        print(json.dumps(loss.item()), flush=True)
    engine.destroy()


def command(*arguments):
    call = f"import test_offload_faults as t; t.train_and_tell(*{arguments!r})"
    search = [os.path.dirname(os.path.dirname(deeptide.__file__)), *FOLDERS]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search), "OMP_NUM_THREADS": "1"}
    return {"args": [sys.executable, "-c", call], "env": environment, "stdout": subprocess.PIPE, "text": True}


@pytest.mark.slow
def test_a_killed_run_leaves_nothing_and_the_next_one_is_not_harmed(tmp_path):
    plain = subprocess.run(**command(str(tmp_path), (), 3), check=True).stdout
    both = tuple(SECTIONS)
    with subprocess.Popen(**command(str(tmp_path), both, 10_000)) as killed:
        lines = [killed.stdout.readline() for _ in range(3)]  # it writes blocks all the time
        killed.send_signal(signal.SIGKILL)
    assert "".join(lines) == plain
    assert list(tmp_path.rglob("*")) == []
    assert subprocess.run(**command(str(tmp_path), both, 3), check=True).stdout == plain
    assert list(tmp_path.rglob("*")) == []


def highest_memory():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def evaluate(folder, sections, layers):
    """Prints what an evaluation adds to the most memory that this process had, and what the engine counts of it."""
    small = start(None, folder, "offload_param", layers=2)
    with torch.no_grad():
        small(batch(0))
    small.destroy()
    before = highest_memory()
    engine = start(None, folder, *sections, layers=layers)
    with torch.no_grad():
        engine(batch(0))
    table = {line.role: line.measured_bytes for line in engine.memory()}
    print(json.dumps([highest_memory() - before, table["parameters"] + table["gathered peak"]]))


@pytest.mark.costly
def test_parameters_in_files_are_never_whole_in_memory(tmp_path):
    layers = 48
    model = 4 * layers * (WIDTH * WIDTH + WIDTH)
    (whole,) = run_processes(1, evaluate, str(tmp_path), [], layers, fresh=True)
    (files,) = run_processes(1, evaluate, str(tmp_path), ["offload_param"], layers, fresh=True)
    taken, counted = json.loads(whole.stdout.splitlines()[-1])
    assert taken > 0.8 * model and counted > model
    taken, counted = json.loads(files.stdout.splitlines()[-1])
    assert counted < model / 8
    assert taken < model / 4, (taken, model)  # what torch and the allocator keep is in it


@pytest.fixture
def old_disk(tmp_path):
    """A folder on ext2, which has neither fallocate nor files without a name."""
    if os.geteuid() != 0 or not shutil.which("mkfs.ext2"):
        pytest.skip("only root mounts a disk, and mkfs.ext2 makes one")
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with open(image, "wb") as file:
        file.truncate(256 << 20)
    subprocess.run(["mkfs.ext2", "-q", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, folder], capture_output=True).returncode:
        pytest.skip("this system mounts no disk images")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_states_and_parameters_lie_in_files_of_ext2(old_disk):
    def run(*sections):
        engine = start(None, old_disk, *sections)
        train(engine, 2)
        assert bool(open_files(old_disk)) == bool(sections)
        state = engine.module_state_dict()
        engine.destroy()
        return state

    expected = run()
    for name, value in run(*SECTIONS).items():
        assert torch.equal(value, expected[name]), name
    assert {path.name for path in old_disk.iterdir()} == {"lost+found"}
