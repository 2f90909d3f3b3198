# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The parts of the first ten minutes on a GPU: their commands, and how long each may take."""

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

HERE = Path(__file__).resolve().parent
NO_GPU = "torch finds no GPU here"
# Stage by stage, then each thing that has code of its own for devices.
SMOKE = ("stage-0", "stage-3", "offload-optimizer", "offload-param", "packed", "fp16", "compiled")
DEVICE_TESTS = ("test", "test_like_a_gpu")
DEVICE_TESTS += tuple(f"offload/test_{name}" for name in ("offload", "offload_param", "placement", "twin_flow"))
BUILT = ("deeptide_product", "deeptide_numerics_kernels_test", "deeptide_optim_kernels_test")


@dataclasses.dataclass
class Command:
    name: str  # of its log
    words: list[str]
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Part:
    """Commands that run beside each other. `skipped`: why they do not run; empty: they do.

    `tell`: what to say of a command that ended well, from the output folder; None: the last words that it printed.
    """

    name: str
    limit_s: float
    commands: list[Command]
    skipped: str = ""
    tell: Callable[[Path], str] | None = None


def _tell_speed(out: Path) -> str:
    """Each contender's median step."""
    words = []
    for line in json.loads((out / "speed.json").read_text())["jobs"]:
        steps = [second for job in line["jobs"] for second in job.get("seconds", ())]
        why = next((str(job[key]) for job in line["jobs"] for key in ("error", "skipped") if key in job), "not run")
        words.append(f"{line['contender']} " + (f"{1000 * median(steps):.1f} ms" if steps else why[:80]))
    return ", ".join(words)


def _python(name: str, *words: object, **environment: str) -> Command:
    return Command(name, [sys.executable, *map(str, words)], environment)


def _build(root: Path, build: Path, out: Path, jobs: int, kernels: str) -> Command:
    """With kernels or not at all: without nvcc the build would go on and use torch's operators in their place."""
    configure = (
        f"cmake -S {root} -B {build} -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DDEEPTIDE_UNITY=ON "
        f"-DDEEPTIDE_EXAMPLES=OFF -DDEEPTIDE_TESTS=ON -DDEEPTIDE_KERNELS={kernels} "
        f"-DPython3_EXECUTABLE={sys.executable} -DCMAKE_PREFIX_PATH={root}/third_party/usr"
    )
    compile_all = f"cmake --build {build} -j {jobs} --target {' '.join(BUILT)}"
    pack = f"tar --create --xz --dereference --file {out}/built.tar.xz --directory {build} python bin"
    return Command("build", ["sh", "-c", f"{configure} && {compile_all} && {pack} && echo packed {out}/built.tar.xz"])


def _kernels(build: Path, on_gpu: bool) -> list[Command]:
    """The kernels' tests: launched on the GPU, or their bodies on the host."""
    chosen = f"--gtest_filter=*{'Gpu' if on_gpu else 'Host'}*"
    programs = {layer: f"{build}/tests/{layer}/deeptide_{layer}_kernels_test" for layer in ("numerics", "optim")}
    return [Command(f"{layer}-kernels", [program, chosen]) for layer, program in programs.items()]


def _smoke(device: str, path: dict[str, str]) -> list[Command]:
    cases = [case for case in SMOKE if device == "cuda" or case not in ("fp16", "compiled")]
    return [_python(f"smoke-{case}", HERE / "smoke.py", case, "--device", device, **path) for case in cases]


def _speed(root: Path, out: Path, device: str, path: dict[str, str]) -> Command:
    model, steps, warmup = ("gpt2-xl", 5, 2) if device == "cuda" else ("tiny", 2, 1)
    words = ["--model", model, "--device", device, "--rounds", 1, "--steps", steps, "--warmup", warmup]
    words += ["--only", "torch-masters", "deeptide-0", "deeptide-3", "--limit", 120]
    words += ["--json", out / "speed.json", "--output", out / "speed.md"]
    return _python("speed", root / "bench", "gpu", *words, **path)


def _tests(root: Path, jobs: int, on_gpu: bool, path: dict[str, str]) -> Command:
    """The accelerator's tests on CUDA; to rehearse, one file of them on the simulated accelerator."""
    folder = root / "tests" / "python" / "accelerator"
    files = [folder / f"{name}_on_accelerator.py" for name in DEVICE_TESTS if on_gpu or name == "test_like_a_gpu"]
    variables = {**path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    if on_gpu:
        variables["DEEPTIDE_TEST_ACCELERATOR"] = "cuda"
    words = ["-m", "pytest", "-p", "xdist", "-q", "-rfs", "-n", min(8, jobs), "--dist", "worksteal"]
    return _python("tests", *words, *files, **variables)


def parts(root: Path, build: Path, out: Path, built: bool, jobs: int) -> list[Part]:
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    path = {"PYTHONPATH": f"{build}/python:{root}/bench", "PATH": f"{build}/bin:{os.environ.get('PATH', '')}"}
    facts = _python("facts", HERE / "facts.py", "--device", device, "--json", out / "facts.json")
    build_all = _build(root, build, out, jobs, "CUDA" if on_gpu else "OFF")
    profile = _python("profile", HERE / "profile_step.py", "--json", out / "profile.json", **path)
    return [
        Part("facts", 40, [facts]),
        Part("build", 240, [build_all], skipped=f"{build} is taken as it is" if built else ""),
        Part("kernels", 40, _kernels(build, on_gpu)),
        Part("smoke", 80, _smoke(device, path)),
        Part("speed", 150, [_speed(root, out, device, path)], tell=_tell_speed),
        Part("profile", 40, [profile], skipped="" if on_gpu else NO_GPU),
        Part("tests", 170, [_tests(root, jobs, on_gpu, path)]),
    ]
