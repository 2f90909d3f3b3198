# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Saves where the machine does not help: a clock that jumps, a mount that is read-only, another job in the folder."""

import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import _environment, run_processes
from ports import free_ports
from test_async_saves import start, train, weights_of, world_of_one

import deeptide
from deeptide import checkpoint

# -- a clock that jumps -----------------------------------------------------------------------------------------------

JUMPING_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <sys/time.h>
#include <time.h>
static atomic_long calls;
static atomic_int jumps;
void let_the_clock_jump(int yes) { jumps = yes; }
static long jump(void) { return !jumps ? 0 : calls++ % 2 ? 86400 : -86400; }
int clock_gettime(clockid_t clock, struct timespec *at) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(clock, at);
  if (clock == CLOCK_REALTIME) at->tv_sec += jump();
  return code;
}
int gettimeofday(struct timeval *restrict at, void *restrict zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  at->tv_sec = now.tv_sec;
  at->tv_usec = now.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}
"""


def save_under_a_jumping_clock(folder, library):
    deeptide.init_distributed()
    engine = start(1, checkpoint={"async": True, "keep_last": 2}, bf16=True)
    train(engine, 0, 1)
    ctypes.CDLL(library).let_the_clock_jump(1)
    assert abs(time.time() - time.time()) > 80_000
    saved = []
    for blocking in (True, False, False, True, False):
        expected = weights_of(engine)
        engine.save_checkpoint(folder, blocking=blocking)
        outcomes = train(engine, engine.global_steps, 2)
        while not blocking and not any(outcome.saved for _, outcome in outcomes):
            assert not any(outcome.save_error for _, outcome in outcomes)
            outcomes = train(engine, engine.global_steps, 1)
        saved.append(expected)
    engine.load_checkpoint(folder)
    for name, value in weights_of(engine).items():
        assert torch.equal(value, saved[-1][name]), name
    ctypes.CDLL(library).let_the_clock_jump(0)
    engine.destroy()


@pytest.mark.costly
def test_a_clock_that_jumps_disturbs_no_save(tmp_path):
    library, folder = tmp_path / "clock.so", tmp_path / "saves"
    (tmp_path / "clock.c").write_text(JUMPING_CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "clock.c", "-ldl"], check=True)
    run_processes(2, save_under_a_jumping_clock, str(folder), str(library), env={"LD_PRELOAD": str(library)})
    steps = [found.global_steps for found in checkpoint.ls(folder)]
    assert len(steps) == 2 and steps[1] > steps[0] > 1  # the last two, whatever their files' times say
    # Times of files that went backwards: the order stays that of steps.
    os.utime(folder / f"global_step{steps[1]}" / "manifest.json", (0, 0))
    assert [found.global_steps for found in checkpoint.ls(folder)] == steps
    assert checkpoint.prune(folder, keep_last=1) == [f"global_step{steps[0]}"]
    assert not checkpoint.verify(folder)


# -- a read-only mount ------------------------------------------------------------------------------------------------

ON_A_READ_ONLY_MOUNT = """
import subprocess, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/.."]
from test_hard_places import save_on_a_read_only_mount
save_on_a_read_only_mount(sys.argv[2])
"""


def mount(*words):
    subprocess.run(["mount", *words], check=True)


def save_on_a_read_only_mount(folder):
    engine = start(1, world=world_of_one(), bf16=True)
    train(engine, 0, 1)
    expected = weights_of(engine)
    engine.save_checkpoint(folder, tag="good")
    mount("--bind", folder, folder)
    mount("-o", "remount,bind,ro", folder)
    text = r"cannot create the folder .*/bad\.\w+\.tmp: Read-only file system; check the folder's owner and permissions"
    with pytest.raises(deeptide.CheckpointError, match=text):
        engine.save_checkpoint(folder, tag="bad")
    engine.save_checkpoint(folder, tag="bad", blocking=False)
    outcomes = train(engine, 1, 1)
    while not any(outcome.save_error for _, outcome in outcomes):
        outcomes = train(engine, engine.global_steps, 1)
    assert "Read-only file system" in outcomes[-1][1].save_error
    engine.load_checkpoint(folder)
    for name, value in weights_of(engine).items():
        assert torch.equal(value, expected[name]), name
    mount("-o", "remount,bind,rw", folder)
    assert sorted(os.listdir(folder)) == ["good", "latest"]
    engine.save_checkpoint(folder, tag="bad")
    print("done")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
@pytest.mark.slow
def test_a_read_only_mount_is_named_and_training_goes_on(tmp_path):
    command = ["unshare", "--mount", sys.executable, "-c", ON_A_READ_ONLY_MOUNT, str(Path(__file__).parent), tmp_path]
    environment = _environment(0, 1, free_ports(1)[0], None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith("done\n"), done.stderr


# -- two jobs, one folder ---------------------------------------------------------------------------------------------


def save_as_a_job(job, keep_last, folder):
    deeptide.init_distributed()
    engine = start(1, checkpoint={"async": True, "keep_last": keep_last}, bf16=True)
    with torch.no_grad():
        engine.module.bias.fill_(job)
    errors = []
    for _ in range(10):
        errors += [outcome.save_error for _, outcome in train(engine, engine.global_steps, 1)]
        engine.save_checkpoint(folder, client_state={"job": job})
    try:
        engine.wait_for_save()
    except deeptide.CheckpointError as error:
        errors.append(str(error))
    if engine.global_rank == 0:
        print(json.dumps([error for error in errors if error]))


def load_of_whichever_job(folder, tag):
    engine = start(0, world=world_of_one(), bf16=True)
    _, state = engine.load_checkpoint(folder, tag=tag)
    assert engine.module.bias.tolist() == [state["job"]] * engine.module.bias.numel()
    engine.destroy()


@pytest.mark.costly
@pytest.mark.parametrize("keep_last", [0, 3])
def test_two_jobs_in_one_folder_never_mix(keep_last, tmp_path):
    told = {}

    def run(job):
        told[job] = run_processes(2, save_as_a_job, job, keep_last, str(tmp_path))[0].stdout

    jobs = [threading.Thread(target=run, args=(job,)) for job in (1, 2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    for job in (1, 2):
        for error in json.loads(told[job].splitlines()[-1]):
            assert str(tmp_path) in error, error  # the file that the other job took away
    tags = [found.tag for found in checkpoint.ls(tmp_path)]
    assert tags
    for tag in tags:
        assert not checkpoint.verify(tmp_path, tag=tag)
        load_of_whichever_job(str(tmp_path), tag)
    load_of_whichever_job(str(tmp_path), None)
