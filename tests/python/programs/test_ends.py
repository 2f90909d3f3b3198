# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Scripts that just end, in every way that scripts end: the exit code is theirs, and nothing aborts.

RUNS in the environment says how often each runs (`make test-ends`); once by default, in CI too.
"""

import concurrent.futures
import os
import shutil
import subprocess
import sys
import tempfile
import threading

import pytest

import deeptide

RUNS = int(os.environ.get("RUNS", "1"))
AT_ONCE = 4  # more than there are cores: threads that end late are the point

BEGINNING = """
import atexit, os, signal, sys, threading, time, warnings
import torch
import torch.distributed as dist
import deeptide

def make(stage=2, **more):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    section = {"stage": stage, **more}
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW"}, "zero_optimization": section}
    return model, deeptide.initialize(model=model, config=config)[0]

def train(model, engine, steps=2):
    for _ in range(steps):
        loss = model(torch.randn(2, 8)).square().mean()
        engine.backward(loss)
        engine.step()
    return loss

model, engine = make()
loss = train(model, engine)
"""
# {how: (what comes last, the job's exit code)}
ENDS = {
    "after a collective of its own": ("loss = torch.ones(1000000)\ndist.all_reduce(loss)", 0),
    "after a loss with a graph": ("dist.all_reduce(loss)", 0),
    "by sys.exit": ("dist.all_reduce(loss.detach())\nsys.exit()", 0),
    "by sys.exit within a function": (
        "def end():\n    kept = loss\n    dist.all_reduce(torch.ones(9))\n    sys.exit(0)\nend()",
        0,
    ),
    "without its group": ("dist.destroy_process_group()", 0),
    "with an exit handler that ends the group": (
        "atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())\n"
        "dist.all_reduce(torch.ones(9))",
        0,
    ),
    "with an engine that was destroyed": ("engine.destroy()\ndist.all_reduce(torch.ones(9))", 0),
    "with a second engine": ("again = make(3)\ntrain(*again)\ndist.all_reduce(torch.ones(9))", 0),
    "with an exception on one rank": ("dist.barrier()\nif dist.get_rank() == 1:\n    raise KeyError('mine')", 1),
    "by ^C": ("dist.barrier()\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)", 128 + 2),
    "by SIGTERM": ("dist.barrier()\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)", 128 + 15),
    "after a child that it forked": (
        "child = os.fork()\nif child == 0:\n    sys.exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\ntrain(model, engine)\ndist.all_reduce(torch.ones(9))",
        0,
    ),
    "after workers of a loader": (
        "data = torch.utils.data.DataLoader(torch.arange(8), num_workers=1, multiprocessing_context='fork')\n"
        "assert sum(int(x) for x in data) == 28\ntrain(model, engine)\ndist.all_reduce(torch.ones(9))",
        0,
    ),
    "beside a thread in backward": (
        "def work():\n    net = torch.nn.Linear(64, 64)\n"
        "    while True:\n        net(torch.ones(64, 64)).sum().backward()\n"
        "threading.Thread(target=work, daemon=True).start()\ndist.all_reduce(torch.ones(9))",
        0,
    ),
}


@pytest.fixture
def command():
    path = shutil.which("deeptide")
    if not path:
        pytest.skip("the deeptide command is not in PATH")
    return path


def _run(command, script):
    package = os.path.dirname(os.path.dirname(deeptide.__file__))
    environment = {**os.environ, "PYTHONPATH": package, "OMP_NUM_THREADS": "1", "DEEPTIDE_LOG_LEVEL": "warning"}
    words = [command, "-q", "--num_ranks", "2", "--python", sys.executable, str(script)]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.costly
@pytest.mark.parametrize("how", ENDS)
def test_a_script_ends_as_it_says(command, how, tmp_path):
    last, code = ENDS[how]
    script = tmp_path / "train.py"
    script.write_text(BEGINNING + last + "\n")
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        for done in pool.map(lambda _: _run(command, script), range(RUNS)):
            assert done.returncode == code, done.stderr
            assert "terminate called" not in done.stderr, done.stderr
            assert code or not done.stderr, done.stderr


IN_BACKWARD = """
model, engine = make(STAGE)
begun = threading.Event()
def work():
    try:
        while True:
            loss = model(torch.randn(2, 8)).square().mean()
            begun.set()
            engine.backward(loss)
    except RuntimeError:  # of a rank whose peer has ended
        pass
threading.Thread(target=work, daemon=True).start()
begun.wait()
dist.all_reduce(torch.ones(9))
"""


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 3])
def test_a_script_ends_beside_a_thread_in_the_engines_backward(command, stage, tmp_path):
    """Its rank waits for others that have ended: c10d may tell of lost connections."""
    script = tmp_path / "train.py"
    script.write_text(BEGINNING + IN_BACKWARD.replace("STAGE", str(stage)))
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        for done in pool.map(lambda _: _run(command, script), range(RUNS)):
            assert done.returncode == 0, done.stderr
            assert "terminate called" not in done.stderr and "Fatal" not in done.stderr, done.stderr


FORK = """
def is_refused(use):
    try:
        use()
    except ValueError as error:
        return 'was forked from process' in str(error)
    return False

state = lambda: deeptide.utils.safe_get_full_optimizer_state(next(model.parameters()), "exp_avg")
warnings.filterwarnings("ignore", "This process .* is multi-threaded")  # Python 3.12 and later
child = os.fork()
if child == 0:
    signal.alarm(120)  # a wait for a thread that is not here has no end
    right = is_refused(engine.step) and is_refused(state)
    del engine, model
    sys.exit(0 if right else 3)
assert os.waitpid(child, 0)[1] == 0
train(model, engine)
assert state().isfinite().all()
"""
IN_FILES = {"device": "nvme", "nvme_path": "FOLDER"}
# Each has threads, rings or mappings that others lack: side threads that sum, shared memory, gathers, files.
ENGINES = {
    "that sums": (2, {}),
    "that gathers": (3, {}),
    "that gathers and shares no memory": (3, {"shared_memory": False}),
    "with states in files": (2, {"offload_optimizer": IN_FILES}),
    "with states in files and no thread that sums": (2, {"offload_optimizer": IN_FILES, "reduce_thread": "off"}),
    "with all in files": (3, {"offload_optimizer": IN_FILES, "offload_param": IN_FILES}),
}


@pytest.mark.costly
@pytest.mark.parametrize("which", ENGINES)
def test_a_forked_child_leaves_its_parent_an_engine(command, which, tmp_path):
    stage, section = ENGINES[which]
    own = {key: section[key] for key in ("shared_memory", "reduce_thread") if key in section}
    section = {key: value for key, value in section.items() if key not in own}
    script = tmp_path / "train.py"
    beginning = BEGINNING.replace("model, engine = make()", f"model, engine = make({stage}, **{section!r})")
    beginning = beginning.replace('"zero_optimization": section', f'"zero_optimization": section, "deeptide": {own!r}')
    script.write_text(beginning.replace("FOLDER", str(tmp_path)) + FORK)
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        for done in pool.map(lambda _: _run(command, script), range(RUNS)):
            assert (done.returncode, done.stderr) == (0, "")


CELL = BEGINNING.replace('"train_batch_size": 4', '"train_batch_size": 2')
# {who runs it: (the arguments of Python, what it reads)}
ALONE = {
    "a notebook, whose cell runs again": (
        ["-c", "cell = open('cell.py').read()\nfor _ in range(3):\n    exec(cell)"],
        None,
    ),
    "a prompt": (["-i", "-q", "cell.py"], "train(model, engine)\nexit()\n"),
    "a prompt that is closed": (["-i", "-q", "cell.py"], ""),
    "pytest": (["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_cell.py"], None),
    "a module": (["-m", "cell"], None),
}


@pytest.mark.costly
@pytest.mark.parametrize("who", ALONE)
def test_who_runs_a_script_sees_it_end(who, tmp_path):
    arguments, typed = ALONE[who]
    (tmp_path / "cell.py").write_text(CELL)
    (tmp_path / "test_cell.py").write_text("from cell import *\n\n\ndef test():\n    train(model, engine)\n")
    package = os.path.dirname(os.path.dirname(deeptide.__file__))
    environment = {**os.environ, "PYTHONPATH": package, "DEEPTIDE_LOG_LEVEL": "warning"}
    environment.pop("PYTEST_ADDOPTS", None)
    words = [sys.executable, *arguments]
    for _ in range(RUNS):
        done = subprocess.run(
            words, input=typed, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        prompts = done.stderr.replace(">>> ", "").strip()
        assert (done.returncode, prompts) == (0, ""), done.stdout


@pytest.mark.costly
def test_a_forked_child_may_drop_an_engine_but_not_use_it():
    code = BEGINNING + (
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n"
        "        engine.step()\n"
        "    except ValueError as error:\n"
        "        right = 'was forked from process' in str(error)\n"
        "    del engine\n"
        "    os._exit(0 if right else 3)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "train(model, engine)\n"
    )
    package = os.path.dirname(os.path.dirname(deeptide.__file__))
    environment = {**os.environ, "PYTHONPATH": package, "DEEPTIDE_LOG_LEVEL": "warning"}
    code = code.replace('"train_batch_size": 4', '"train_batch_size": 2')
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.costly
def test_a_child_forked_beside_a_thread_in_zero_init_can_listen_too():
    code = (
        "import os, signal, deeptide, torch\n"
        "deeptide.initialize\n"
        "from deeptide._model import changes\n"
        "changes._lock.acquire()\n"  # as a thread within zero.Init, at that very moment
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.alarm(30)\n"
        "    changes.listen(print)\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    package = os.path.dirname(os.path.dirname(deeptide.__file__))
    environment = {**os.environ, "PYTHONPATH": package}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def kernel(tmp_path):
    """A notebook's kernel over sockets in a folder; yields (its manager, its client, the file of its stderr)."""
    manager = pytest.importorskip("jupyter_client.manager")
    pytest.importorskip("ipykernel")
    package = os.path.dirname(os.path.dirname(deeptide.__file__))
    environment = {**os.environ, "PYTHONPATH": package, "DEEPTIDE_LOG_LEVEL": "warning", "OMP_NUM_THREADS": "1"}
    environment["IPYTHONDIR"] = environment["JUPYTER_CONFIG_DIR"] = str(tmp_path)
    with tempfile.TemporaryDirectory() as folder, open(tmp_path / "stderr", "w+") as errors:  # a socket's path is short
        kernels = manager.KernelManager(transport="ipc", ip=os.path.join(folder, "kernel"))
        kernels.connection_file = os.path.join(folder, "connection.json")
        kernels.shutdown_wait_time = 120  # seconds, before it kills: a busy machine needs some
        kernels.start_kernel(env=environment, stderr=errors, cwd=tmp_path)
        client = kernels.blocking_client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=120)
            yield kernels, client, errors
        finally:
            client.stop_channels()
            if kernels.is_alive():
                kernels.shutdown_kernel(now=True)


def _run_cell(client, code):
    """Returns the name of the error that the cell ended with, or None."""
    reply = client.execute_interactive(code, timeout=120, output_hook=lambda message: None)
    return reply["content"].get("ename")


@pytest.mark.costly
def test_a_notebooks_kernel_is_interrupted_restarted_and_ended(kernel):
    kernels, client, errors = kernel
    for _ in range(2):
        first = kernels.provisioner.process
        assert _run_cell(client, CELL) is None
        assert _run_cell(client, CELL) is None  # engine and model are bound anew
        threading.Timer(1, kernels.interrupt_kernel).start()
        assert _run_cell(client, "train(model, engine)\ntime.sleep(60)") == "KeyboardInterrupt"
        assert _run_cell(client, "train(model, engine)") is None
        kernels.restart_kernel(now=False)
        client.wait_for_ready(timeout=120)
        assert first.wait(30) == 0
    last = kernels.provisioner.process
    assert _run_cell(client, CELL) is None
    kernels.shutdown_kernel(now=False)
    assert last.wait(30) == 0
    errors.seek(0)
    assert "terminate" not in (told := errors.read()) and "Error" not in told, told
