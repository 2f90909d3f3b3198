# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The launcher's hosts against the model, over random files and filters; what --dry-run shows and what not."""

import os
import random
import re
import shlex
import shutil
import subprocess

import pytest
from hostfile_model import Refused, filter_hosts, parse_hostfile

DEEPTIDE = shutil.which("deeptide")
pytestmark = pytest.mark.skipif(not DEEPTIDE, reason="no `deeptide` in PATH")


def dry_run(folder, words, env=None):
    return subprocess.run(
        [DEEPTIDE, *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), **(env or {})},
        timeout=20,
    )


def shown_hosts(output):
    """{host: slots} of the printed plan; the ranks must follow each other."""
    hosts, next_rank = {}, 0
    for name, slots, first, last in re.findall(r"^# (\S+): slots (\S+), ranks (\d+)-(\d+)$", output, re.M):
        hosts[name] = [int(slot) for slot in slots.split(",")]
        assert int(first) == next_rank and int(last) == next_rank + len(hosts[name]) - 1
        next_rank = int(last) + 1
    return hosts


def random_hostfile(rng):
    lines = []
    for _ in range(rng.randrange(0, 6)):
        name = rng.choice(["a", "b", "node-1", "w.x.y", "n1", "10.0.0.7"])
        good = f"{name}{rng.choice([' ', '  ', chr(9)])}slots={rng.choice([1, 2, 3, 8])}"
        odd = rng.choice(
            [
                *("", "  ", "# comment", f"{name}", f"{name} slots=", f"{name} slots=-1", f"{name} slots=0"),
                "-x slots=2",
                *(f"{name} slots=2 # four", f"  {name} slots=2", f"{name} slots=2 max_slots=4", f"{name} slots=2x"),
                *(f"{name} 2", f"{name} slots=2 huh", "a;b slots=1", f"{name} slots=99999", f"#{name} slots=2"),
            ]
        )
        lines.append(good if rng.random() < 0.8 else odd)
    return "\n".join(lines) + rng.choice(["", "\n", "\r\n"])


def random_filter(rng):
    def spec():
        slots = rng.choice(["", ":0", ":1,0", ":0-1", ":1-0", ":7", ":", ":x", ":0,", ":0,0", ":2-2,0"])
        return rng.choice(["a", "b", "node-1", "w.x.y", "n1", "nobody", ""]) + slots

    text = "@".join(spec() for _ in range(rng.randrange(1, 4)))
    return rng.choice(
        [
            *({}, {}, {"include": text}, {"exclude": text}, {"include": text, "exclude": "a"}),
            *({"num_nodes": rng.randrange(1, 5)}, {"num_gpus": rng.randrange(1, 5)}, {"num_nodes": 1, "num_gpus": 1}),
            {"include": text, "num_gpus": 1},
        ]
    )


@pytest.mark.parametrize("seed", range(4))
def test_hosts_are_those_of_the_model(tmp_path, seed):
    rng = random.Random(seed)
    outcomes = {"accepted": 0, "refused": 0}
    for _ in range(150):
        text, filters = random_hostfile(rng), random_filter(rng)
        (tmp_path / "hosts").write_text(text, newline="")
        words = ["-H", "hosts", "--force_multi", "--dry-run"]
        for name, value in filters.items():
            words += [f"--{name}={value}"]
        done = dry_run(tmp_path, [*words, "true"])
        case = f"{text!r} {filters}: {done.stdout}{done.stderr}"
        try:
            expected = filter_hosts(parse_hostfile(text), **filters)
        except Refused as refused:
            outcomes["refused"] += 1
            assert done.returncode == 2 and not done.stdout, case
            assert refused.line is None or f"hosts:{refused.line}:" in done.stderr, case
        else:
            outcomes["accepted"] += 1
            assert done.returncode == 0, case
            assert shown_hosts(done.stdout) == expected, case
    assert min(outcomes.values()) > 10, outcomes


@pytest.mark.parametrize("seed", range(2))
def test_the_users_arguments_are_printed_as_a_shell_reads_them(tmp_path, seed):
    rng = random.Random(seed)
    (tmp_path / "hosts").write_text("a slots=1\n")
    for _ in range(60):
        words = ["".join(rng.choice("ab '\"$\\*;&|<>()#~`!-=\n") for _ in range(rng.randrange(9))) for _ in range(4)]
        shown = dry_run(tmp_path, ["-H", "hosts", "--force_multi", "--dry-run", "true", *words]).stdout
        line = shown[shown.index("#   CROSS_RANK") :].replace("\n#   ", "\n")[4:]
        assert shlex.split(line)[-4:] == words


def test_nothing_of_the_environment_is_shown_but_what_is_exported(tmp_path):
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    (tmp_path / ".deepspeed_env").write_text("FROM_DS_FILE=one two\n# no\nDB_PASSWORD=in-a-file\n")
    (tmp_path / "other_env").write_text("export FROM_OTHER='x'\n")
    env = {
        "AWS_SECRET_ACCESS_KEY": "leak-1",
        "MY_SETTING": "leak-2",
        "DEEPTIDE_JOB_TOKEN": "leak-3",
        "NCCL_AUTH_TOKEN": "leak-4",
        "XNCCL": "leak-5",
        "NCCL_DEBUG": "shown",
        "PYTHONHASHSEED": "7",
    }
    for launcher in ("ssh", "pdsh", "openmpi", "mpich", "impi", "slurm"):
        done = dry_run(tmp_path, ["-H", "hosts", "--launcher", launcher, "--dry-run", "true"], env)
        assert done.returncode == 0, done.stderr
        assert "leak" not in done.stdout + done.stderr and "in-a-file" not in done.stdout, done.stdout
        for text in ("NCCL_DEBUG=shown", "PYTHONHASHSEED=7", "FROM_DS_FILE='one two'"):
            assert text in done.stdout, (launcher, text, done.stdout)
    done = dry_run(tmp_path, ["-H", "hosts", "--dry-run", "true"], {"DS_ENV_FILE": "other_env"})
    assert "FROM_OTHER=x" in done.stdout and "FROM_DS_FILE" not in done.stdout


def test_a_bad_variables_file_is_named_but_not_quoted(tmp_path):
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    (tmp_path / ".deeptide_env").write_text("GOOD=1\nsecret words\n")
    done = dry_run(tmp_path, ["-H", "hosts", "--dry-run", "true"])
    assert done.returncode == 2
    assert ".deeptide_env:2: expected NAME=VALUE" in done.stderr and "secret" not in done.stderr


def test_no_secret_is_on_a_command_line(tmp_path):
    """Under a starter that writes down what it was called with: the token is named, and in the environment."""
    starter = tmp_path / "mpirun"
    starter.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > words\necho "$DEEPTIDE_JOB_TOKEN" > token\n')
    starter.chmod(0o755)
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NCCL_AUTH_TOKEN": "leak"}
    words = ["-q", "-H", "hosts", "--launcher", "openmpi", "--master_addr", "10.0.0.1", "true"]
    assert dry_run(tmp_path, words, env).returncode == 0
    token, called = (tmp_path / "token").read_text().strip(), (tmp_path / "words").read_text()
    assert re.fullmatch("[0-9a-f]{32}", token) and token not in called and "leak" not in called
    assert "DEEPTIDE_JOB_TOKEN" in called


MISTAKES = [
    (["-H", "none", "true"], "hostfile 'none' does not exist"),
    (["-H", "hosts", "-i", "a", "-e", "b", "true"], "--include and --exclude cannot be combined"),
    (["-H", "hosts", "-i", "a", "--num_gpus", "1", "true"], "cannot be combined with --include"),
    (["-H", "hosts", "-i", "c", "true"], "host 'c' is not in the hostfile, which lists a, b"),
    (["-H", "hosts", "-i", "a:5", "true"], "host 'a' has no slot 5; it has 0,1"),
    (["-H", "hosts", "-e", "a@b", "true"], "no host is left"),
    (["-H", "hosts", "--num_nodes", "3", "true"], "--num_nodes 3: the hostfile has 2 hosts"),
    (["-H", "hosts", "--no_ssh", "true"], "--node_rank and --master_addr"),
    (
        ["-H", "hosts", "--no_ssh", "--node_rank", "2", "--master_addr", "x", "true"],
        "--node_rank 2: the job has 2 hosts",
    ),
    (["-H", "hosts", "--node_rank", "1", "true"], "--node_rank requires --no_ssh"),
    (["-H", "hosts", "--launcher", "rsh", "true"], "--launcher must be one of"),
    (["-H", "hosts", "--launcher", "mvapich", "true"], "--launcher mpich"),
    (["-H", "uneven", "--launcher", "mpich", "--dry-run", "true"], "a has 1, b has 2"),
    (["-H", "hosts", "--launcher", "openmpi", "-i", "a:1", "true"], "cannot choose slots 1 of a"),
    (["-H", "hosts", "--launcher_args", "'open", "--dry-run", "true"], "--launcher_args: unclosed quote (')"),
    (["--num_nodes", "2", "true"], "--num_nodes 2 needs a hostfile"),
    (["--force_multi", "true"], "need a hostfile"),
    (["--bind_core_list", "0", "true"], "requires --bind_cores_to_rank"),
    (["--bind_cores_to_rank", "--bind_core_list", "0,9-1", "true"], "is not a list of numbers"),
    (["--min_elastic_nodes", "2", "true"], "require --elastic_training"),
    (
        ["--elastic_training", "--min_elastic_nodes", "3", "--max_elastic_nodes", "2", "true"],
        "--max_elastic_nodes must",
    ),
    (["--log_level", "loud", "true"], "--log_level must be one of critical, debug, error, info, warning"),
    (["--autotuning", "fly", "true"], "--autotuning: fly not in {tune,run}"),
]


@pytest.mark.parametrize(("words", "text"), MISTAKES, ids=[text[:30] for _, text in MISTAKES])
def test_a_mistake_is_told(tmp_path, words, text):
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    (tmp_path / "uneven").write_text("a slots=1\nb slots=2\n")
    done = dry_run(tmp_path, words)
    assert done.returncode == 2, done.stdout
    assert text in done.stderr
