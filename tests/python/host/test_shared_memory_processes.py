# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Processes that share memory: what the kernel counts, forked workers, a rank that dies, hosts apart."""

import ctypes
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import models
import pytest
import torch
from conftest import run_processes, run_ranks
from test_shared_memory import assert_all_same, assert_same, run, start, state_of, train

import deeptide
from deeptide import _C

# -- memory -----------------------------------------------------------------------------------------------------------


def proportional_bytes():
    """This process's share of the memory that it holds: pages of several processes count in parts.

    Without files: its share of a library grows whenever any other process that has loaded it ends.
    """
    gc.collect()
    _C.release_idle_cpu_memory()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


class Large(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.h = torch.nn.ModuleList(torch.nn.Linear(1024, 1024) for _ in range(12))

    def forward(self, x):
        for layer in self.h:
            x = layer(x).relu()
        return x.square().mean()


def weigh(folder):
    deeptide.init_distributed()
    rank = torch.distributed.get_rank()
    run(None, True)  # what a first use brings in
    before = proportional_bytes()
    config = models.config(3, deeptide={"shared_memory": True, "tune_allocator": False})
    engine = deeptide.initialize(model=models.make_model(kind=Large), config=config)[0]
    for _ in range(3):
        engine.backward(engine(torch.randn(4, 1024)))
        engine.step()
    torch.distributed.barrier()
    held = proportional_bytes() - before
    torch.distributed.barrier()
    counted = {line.role: line.measured_bytes for line in engine.memory()}
    with open(os.path.join(folder, str(rank)), "w") as file:
        json.dump([held, counted], file)


def test_what_the_engine_counts_is_what_the_kernel_counts(tmp_path):
    run_processes(2, weigh, str(tmp_path))
    results = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    held = sum(result[0] for result in results)
    counted = {role: sum(result[1][role] for result in results) for role in results[0][1]}
    parameters = 12 * (1024 * 1024 + 1024) * 4
    assert counted["parameters"] == pytest.approx(parameters, rel=0.01), "once, not once a rank"
    assert held == pytest.approx(sum(counted.values()), rel=0.05), counted


# -- forked workers ---------------------------------------------------------------------------------------------------


class Meddling(torch.utils.data.Dataset):
    """Reads and writes the model's parameters wherever its items are made."""

    def __init__(self, model, meddles):
        self.model, self.meddles = model, meddles
        self.tokens, self.targets = models.batches(1, 12)[0]

    def __len__(self):
        return 12

    def __getitem__(self, i):
        if self.meddles:
            with torch.no_grad():
                for p in self.model.parameters():
                    expected = p + 1.0
                    p.add_(1.0)
                    assert torch.equal(p, expected)
            self.model(self.tokens[i : i + 1])
        return self.tokens[i], self.targets[i]


def train_with_workers(meddles):
    engine = start(None, True)
    rank = engine.world.rank
    data = Meddling(engine.module, meddles)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.Subset(data, range(6 * rank, 6 * rank + 6)),
        batch_size=2,
        num_workers=1 if meddles else 0,
        multiprocessing_context="fork" if meddles else None,
    )
    losses = []
    for _ in range(2):
        for tokens, targets in loader:
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    state = state_of(engine)
    engine.destroy()
    return losses, [], state


def meddle():
    deeptide.init_distributed()
    assert_same(train_with_workers(True), train_with_workers(False))


def test_workers_that_write_parameters_do_not_disturb_training():
    run_processes(2, meddle)


# -- ranks that die ---------------------------------------------------------------------------------------------------


def be_killed(victim, delay, folder):
    deeptide.init_distributed()
    engine = start(None, True)
    rank = engine.world.rank
    train(engine, 0, 1)
    torch.distributed.barrier()

    def die():
        with open(os.path.join(folder, "died"), "w") as file:
            file.write(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == victim:
        threading.Timer(delay, die).start()
    try:
        while True:
            train(engine, 0, 1)
    except deeptide.CommError as error:
        print(json.dumps([str(error), time.time()]))
        sys.stdout.flush()
        os._exit(3)


def test_survivors_of_a_kill_at_any_moment_end_soon_and_leave_nothing(tmp_path):
    victim = 0  # with it goes the store; others are killed in test_failures.py and in tests/comm
    results = run_processes(3, be_killed, victim, random.Random(1).uniform(0.05, 0.4), str(tmp_path), check=False)
    died = float((tmp_path / "died").read_text())
    texts = []
    for rank, result in enumerate(results):
        if rank == victim:
            assert result.returncode == -signal.SIGKILL
            continue
        assert result.returncode == 3, result.stderr
        text, when = json.loads(result.stdout.splitlines()[-1])
        texts.append(text)
        assert text.startswith(f"rank {rank} ") and "step " in text, text
        assert when - died < 10, f"{when - died} s of a timeout of 60 s: {text}"
    assert any(f"rank {victim}'s process" in text for text in texts), texts
    assert not [name for name in os.listdir("/dev/shm") if "deeptide" in name]


# -- hosts apart ------------------------------------------------------------------------------------------------------


def shell(command):
    subprocess.run(command, shell=True, check=True, capture_output=True, text=True)


@pytest.fixture
def two_hosts():
    """Two network namespaces with a cable between them: what a rank sees of a machine of its own."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    names = [f"deeptide-{os.getpid()}-{i}" for i in range(2)]
    cables = [f"dt{os.getpid() % 100000}-{i}" for i in range(2)]
    try:
        for name in names:
            shell(f"ip netns add {name}")
        shell(f"ip link add {cables[0]} type veth peer name {cables[1]}")
    except subprocess.CalledProcessError as error:
        for name in names:
            subprocess.run(f"ip netns del {name}", shell=True, capture_output=True)
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    try:
        for i, (name, cable) in enumerate(zip(names, cables, strict=True)):
            shell(f"ip link set {cable} netns {name}")
            shell(f"ip -n {name} addr add 10.213.77.{i + 1}/24 dev {cable}")
            shell(f"ip -n {name} link set {cable} up")
            shell(f"ip -n {name} link set lo up")
        yield list(zip(names, cables, strict=True))
    finally:
        for name in names:
            subprocess.run(f"ip netns del {name}", shell=True, capture_output=True)


def train_across(folder):
    deeptide.init_distributed()
    engine = start(None, True, 3, 3, True)
    summary = engine.summary()
    numbers = train(engine)
    state = state_of(engine)
    engine.destroy()
    torch.save((*numbers, state, summary), os.path.join(folder, str(torch.distributed.get_rank())))


@pytest.mark.costly
def test_ranks_in_two_network_namespaces_train_as_on_one_host(two_hosts, tmp_path):
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}; "
        f"import test_shared_memory_processes as tests; tests.train_across({str(tmp_path)!r})"
    )
    processes = []
    for rank in range(4):
        name, cable = two_hosts[rank // 2]
        variables = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": "4",
            "LOCAL_RANK": str(rank % 2),
            "MASTER_ADDR": "10.213.77.1",
            "MASTER_PORT": "29613",
            "GLOO_SOCKET_IFNAME": cable,
            "OMP_NUM_THREADS": "1",
        }
        command = ["ip", "netns", "exec", name, sys.executable, "-c", code]
        processes.append(subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True))
    for process in processes:
        try:
            _, errors = process.communicate(timeout=120)
        finally:
            if process.poll() is None:
                process.kill()
        assert process.returncode == 0, errors[-3000:]
    results = [torch.load(tmp_path / str(rank)) for rank in range(4)]
    assert all("hosts: 2 hosts of 2 ranks, shared memory within\n" in result[3] for result in results), results[0][3]
    assert_all_same([result[:3] for result in results], run_ranks(4, run, True, 3, 3, True))
