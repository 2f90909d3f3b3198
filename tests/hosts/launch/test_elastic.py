# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""--elastic_training: jobs that go on without what they lost, and take back what returns."""

import os
import signal
import time

SHOW = 'echo "attempt $DEEPTIDE_RESTART_COUNT rank $RANK/$WORLD_SIZE pid $$"; '


def test_a_failed_rank_leads_to_a_restart_on_the_same_hosts(hosts):
    text = SHOW + "if [ $RANK = 3 ] && [ $DEEPTIDE_RESTART_COUNT -lt 2 ]; then exit 5; fi; sleep 0.2"
    job = hosts.run("--elastic_training", "--grace", "1", "sh", "-c", text)
    assert job.code == 0, job.errors
    for attempt in range(3):
        assert job.output.count(f"attempt {attempt} rank") == 4, job.output
    assert "[deeptide] restart 2 of at most 10" in job.errors
    hosts.expect_nothing_left()


def test_the_last_failure_counts_when_there_are_no_restarts_left(hosts):
    job = hosts.run("--elastic_training", "--max_restarts", "1", "sh", "-c", SHOW + "exit 6", slots=(1, 1))
    assert job.code == 6
    assert job.output.count("attempt 1 rank") == 2 and "attempt 2" not in job.output


def test_a_lost_host_is_left_out_and_taken_back_when_it_returns(hosts):
    # dash heeds an interrupt that comes as it forks only once its child has ended: children here are short.
    stay = SHOW + "while :; do sleep 0.05; done"
    job = hosts.start(
        "--elastic_training",
        "--heartbeat_timeout",
        "2",
        "--launcher_args",
        hosts.network.ssh_arguments + " -o ConnectTimeout=2",
        "sh",
        "-c",
        stay,
        ssh=False,
    )
    job.wait_for("attempt 0 rank 3/4")
    worker = hosts.workers[1]
    worker.set_link("down")
    job.wait_for("attempt 1 rank 1/2", timeout=30)
    assert "host worker-2 cannot be reached" in job.errors and "continuing without it" in job.errors
    worker.set_link("up")
    deadline = time.monotonic() + 10
    while worker.processes():  # its agent has noticed too
        assert time.monotonic() < deadline, worker.processes()
        time.sleep(0.1)
    pids = [int(line.split()[-1]) for _, line in job.out if "attempt 1 rank 0/2" in line]
    os.kill(pids[0], signal.SIGKILL)
    job.wait_for("attempt 2 rank 3/4", timeout=30)
    job.signal(signal.SIGINT)
    assert job.wait() == 130
    hosts.expect_nothing_left()


def test_too_few_hosts_end_the_job(hosts):
    job = hosts.start(
        "--elastic_training",
        "--min_elastic_nodes",
        "2",
        "--heartbeat_timeout",
        "2",
        "--launcher_args",
        hosts.network.ssh_arguments + " -o ConnectTimeout=2",
        "sh",
        "-c",
        SHOW + "sleep 1000",
        ssh=False,
    )
    job.wait_for("attempt 0 rank 3/4")
    hosts.workers[1].set_link("down")
    assert job.wait(30) == 255
    assert "only 1 of 2 hosts can be used, too few to continue" in job.errors
    hosts.expect_nothing_left()


def test_no_more_hosts_than_asked_for(hosts):
    job = hosts.run("--elastic_training", "--max_elastic_nodes", "2", "sh", "-c", SHOW, slots=(1, 1, 1))
    assert job.code == 0, job.errors
    assert job.output.count("/2 pid") == 2, job.output


def test_the_world_is_one_that_the_elastic_batch_suits(hosts):
    section = '{"enabled": true, "max_train_batch_size": 8, "micro_batch_sizes": [2], "version": 0.1}'
    (hosts.folder / "ds_config.json").write_text(f'{{"elasticity": {section}}}')
    words = ["sh", "-c", SHOW, "sh", "--deepspeed_config", "ds_config.json"]
    job = hosts.run(
        "--elastic_training", *words, slots=(1, 1, 1)
    )  # a batch of 8 in micro-batches of 2: 1, 2 or 4 ranks
    assert job.code == 0, job.errors
    assert sorted(line.split()[5] for line in job.output.splitlines()) == ["0/2", "1/2"], job.output
    hosts.expect_nothing_left()
