# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Links between hosts: what each carried, which one is slow, and hosts with two network cards."""

import re
from pathlib import Path

import pytest

deeptide = pytest.importorskip("deeptide")
PACKAGES = Path(deeptide.__file__).absolute().parents[1]
ENVIRONMENT = {"PYTHONPATH": str(PACKAGES), "OMP_NUM_THREADS": "1"}
RATE = 100  # Mbit/s of a link

TRAIN = """
import json, os, sys, time
import torch
import deeptide

torch.manual_seed(0)
torch.set_num_threads(1)
width = int(sys.argv[4])
model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(6)))
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
          "zero_optimization": {"stage": int(sys.argv[1]), "stage3_param_persistence_threshold": 0}}
config |= json.loads(sys.argv[2])
engine, *_ = deeptide.initialize(model=model, config=config)
rank = engine.world.rank
for step in range(int(sys.argv[3])):
    if rank == int(sys.argv[5]):
        time.sleep(0.5)
    loss = engine(torch.linspace(-1, 1 + rank, 2 * width).view(2, width) * (1 + step / 8)).square().mean()
    engine.backward(loss)
    outcome = engine.step()
    print(f"rank {rank} step {step} loss {loss.item():.9f} norm {outcome.grad_norm:.9f} sent {outcome.sent_bytes}")
print(f"rank {rank} sum", sum(p.detach().double().sum().item() for p in engine.module.parameters()))
while rank == 1 and os.path.exists("sleep"):
    time.sleep(0.1)
if os.path.exists("sleep"):
    engine.module_state_dict()
engine.destroy()
"""


def train(hosts, slots, stage=2, config="{}", steps=4, width=256, late=-1, **env):
    """`late`: the rank that computes for half a second more in each step."""
    words = [*hosts.python("train.py", TRAIN), str(stage), config, str(steps), str(width), str(late)]
    return hosts.start(*words, slots=slots, env={**ENVIRONMENT, **env})


def finish(hosts, job):
    code = job.wait(240)
    assert code == 0, job.output[-2000:] + job.errors[-3000:]
    hosts.expect_nothing_left()
    return job


def facts(job):
    """The lines of each rank but for its bytes, and the bytes of each step by rank."""
    lines = sorted(re.findall(r"rank \d+ (?:step|sum).*", job.output))
    sent = {}
    for rank, bytes_sent in re.findall(r"rank (\d+) step .* sent (\d+)", "\n".join(lines)):
        sent.setdefault(int(rank), []).append(int(bytes_sent))
    return [line.split(" sent ")[0] for line in lines], sent


def shape(worker, percent=100):
    """Limits what the host sends."""
    bucket = ["rate", f"{RATE * percent // 100}mbit", "burst", "32kb", "latency", "2s"]
    if worker.run("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *bucket, check=False).returncode != 0:
        pytest.skip("no tbf in this kernel")


# Rows must be long enough to be timed, and a link must have carried enough of them.
LONG = {2: {"steps": 8, "width": 384}, 3: {"steps": 16, "width": 512}, 4: {"steps": 24, "width": 512}}
SLOW = re.compile(r"slow from rank (\d+) on \S+ to rank (\d+) on [^;]*")
LATE = re.compile(r"late: rank (\d+) on \S+ computes for ([0-9.]+) s per step")


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("count", "stage", "slow"),
    [
        (2, 3, 1),
        (3, 2, 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 2, 0), (3, 3, 1), (4, 2, 3))),
    ],
)
def test_the_host_whose_link_has_half_the_bandwidth_is_named(hosts, count, stage, slow):
    for rank, worker in enumerate(hosts.workers[:count]):
        shape(worker, 50 if rank == slow else 100)
    job = finish(hosts, train(hosts, (1,) * count, stage, **LONG[count]))
    line = SLOW.search(job.errors + job.output)
    assert line, job.errors
    assert int(line[1]) == slow, line[0]


@pytest.mark.parametrize("count", [3, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 4))])
def test_no_link_is_named_where_all_are_even(hosts, count):
    for worker in hosts.workers[:count]:
        shape(worker)
    job = finish(hosts, train(hosts, (1,) * count, **LONG[count]))
    assert "links: rank 0 has sent" in job.errors + job.output
    assert not SLOW.search(job.errors + job.output), job.errors


def test_a_late_host_is_named_and_its_links_are_not(hosts):
    for worker in hosts.workers[:3]:
        shape(worker)
    job = finish(hosts, train(hosts, (1, 1, 1), late=1, **LONG[3]))
    line = LATE.search(job.errors + job.output)
    assert line, job.errors
    assert int(line[1]) == 1 and float(line[2]) >= 0.5, line[0]
    assert not SLOW.search(job.errors + job.output), job.errors


def limit_of(job):
    """The last line that names what limits a step."""
    return re.findall(r"limited by .*", job.errors + job.output)[-1]


BREAKDOWN = '{"wall_clock_breakdown": true, "steps_per_print": 8}'


@pytest.mark.rotates
def test_the_breakdown_names_the_network_and_its_slow_link(hosts):
    for rank, worker in enumerate(hosts.workers[:3]):
        shape(worker, 50 if rank == 2 else 100)
    line = limit_of(finish(hosts, train(hosts, (1, 1, 1), 2, BREAKDOWN, **LONG[3])))
    assert line.startswith("limited by network: ") and "communication_data_type" in line, line
    assert "slow from rank 2 on" in line, line  # the hosts here share the machine's name


def test_the_breakdown_names_the_late_host(hosts):
    for worker in hosts.workers[:2]:
        shape(worker)
    line = limit_of(finish(hosts, train(hosts, (1, 1), 2, BREAKDOWN, late=1, **LONG[2])))
    assert re.match(r"limited by waiting for rank 1, which spends 0\.[345]", line), line


def test_the_hang_report_names_the_slow_link(hosts):
    for rank, worker in enumerate(hosts.workers[:2]):
        shape(worker, 50 if rank == 1 else 100)
    (hosts.folder / "sleep").touch()
    words = ["--hang_timeout", "2", *hosts.python("train.py", TRAIN), "2", "{}", "8", "384", "-1"]
    job = hosts.start(*words, slots=(1, 1), env=ENVIRONMENT)
    job.wait_for_error("slow link so far: from rank 1 on worker-2 to rank 0 on worker-1", timeout=120)
    (hosts.folder / "sleep").unlink()
    assert job.wait(120) in (0, 1), job.errors  # rank 1 ends without what the others call
    hosts.expect_nothing_left()


BF16_TRANSPORT = '{"communication_data_type": "bf16"}'


@pytest.mark.rotates
@pytest.mark.parametrize("stages", [(1, 3), pytest.param((0, 1, 2, 3), marks=pytest.mark.slow)])
def test_bf16_transport_sends_half_of_the_gradients_bytes(hosts, stages):
    jobs = {}
    for stage in stages:
        for config in ("{}", BF16_TRANSPORT):
            jobs[stage, config] = facts(finish(hosts, train(hosts, (1, 1), stage, config)))
    elements = 6 * (256 * 256 + 256)
    rounded = jobs[stages[0], BF16_TRANSPORT][0]
    for stage in stages:
        (_, whole), (_, half) = jobs[stage, "{}"], jobs[stage, BF16_TRANSPORT]
        for rank in range(2):
            saved = {a - b for a, b in zip(whole[rank], half[rank], strict=True)}
            assert saved == {2 * elements // 2}, f"stage {stage}: {saved}"  # half of the model goes to the other rank
        assert jobs[stage, BF16_TRANSPORT][0] == rounded, f"stage {stage} computes other numbers"
    assert jobs[stages[0], "{}"][0] != rounded, "nothing was rounded"


@pytest.mark.rotates
def test_what_each_link_has_carried_is_shown(hosts):
    for slots in ((1, 1), (1, 1, 1), (2, 2)):
        job = finish(hosts, train(hosts, slots))
        shown = re.findall(r"links: rank 0 has sent ([^;\n]+)", job.errors + job.output)
        assert len(shown) == 1, job.errors
        peers = re.findall(r"([0-9.]+) MiB to rank (\d+)", shown[0])
        others = {(1, 1): [1], (1, 1, 1): [1, 2], (2, 2): [2]}[slots]
        assert [int(rank) for _, rank in peers] == others, shown[0]
        # In each of four steps, to the rank of its index on each other host: what that one owns of the gradient, summed
        # over this host's ranks, and this rank's part of the parameters.
        model = 4 * 6 * (256 * 256 + 256) * 4 / 2**20
        expected = 2 * model / sum(slots)
        for mebibytes, _ in peers:
            assert abs(float(mebibytes) - expected) < 0.15, (shown[0], expected)


@pytest.fixture
def two_cards(hosts):
    """The first two hosts with a second link between them."""
    names = {worker: f"dt2{number}" for number, worker in enumerate(hosts.workers[:2])}
    (first, second) = names
    add = ["link", "add", names[first], "netns", first.namespace, "type", "veth", "peer", "name", names[second]]
    first.run("ip", *add, "netns", second.namespace)
    for number, (worker, name) in enumerate(names.items(), 1):
        worker.run("ip", "address", "add", f"10.84.0.{number}/24", "dev", name)
        worker.run("ip", "link", "set", name, "up")
        worker.run("ip", "link", "set", name, "name", "eth1", check=False)
    yield first, second
    first.run("ip", "link", "del", "eth1", check=False)


def sent_through(worker, device):
    text = worker.run("cat", f"/sys/class/net/{device}/statistics/tx_bytes").stdout
    return int(text)


def test_two_cards_share_what_is_sent(hosts, two_cards):
    one = facts(finish(hosts, train(hosts, (1, 1))))
    before = [[sent_through(worker, device) for device in ("eth0", "eth1")] for worker in two_cards]
    both = facts(finish(hosts, train(hosts, (1, 1), GLOO_SOCKET_IFNAME="eth0,eth1")))
    assert both == one
    for worker, (first, second) in zip(two_cards, before, strict=True):
        sent = sum(next(iter(both[1].values())))
        shares = [sent_through(worker, "eth0") - first, sent_through(worker, "eth1") - second]
        assert shares[1] > 0.35 * sent, (shares, sent)
