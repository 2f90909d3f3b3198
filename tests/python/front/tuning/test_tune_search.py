# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""`deeptide tune` runs some trials and leaves others out, by figures that a function makes up."""

import pytest

from deeptide._tuning.command import set_argument
from deeptide._tuning.search import Batch, Search, table

GIB = 2**30
WANTED = {
    "fast": True,
    "metric": "throughput",
    "tuner_early_stopping": 5,
    "tuner_num_trials": 50,
    "num_tuning_micro_batch_sizes": 3,
    "max_train_batch_size": None,
    "min_train_batch_size": 1,
    "max_train_micro_batch_size_per_gpu": 1024,
    "min_train_micro_batch_size_per_gpu": 1,
    "arg_mappings": {},
}


def choice(stage, gib, files=0, why_not=""):
    zero = {"stage": stage} | ({"offload_optimizer": {"device": "nvme", "nvme_path": "/n"}} if files else {})
    name = f"stage {stage}" + (", optimizer states in files" if files else "")
    size = {"rank": gib * GIB // 2, "host": gib * GIB, "files": files * GIB}
    return {"name": name, "sections": {"zero_optimization": zero}, "bytes": size, "why_not": why_not}


def survey(batch=(32, 2, 8), world=2, config=None, **wanted):
    return {
        "config": config or {"zero_optimization": {"stage": 1}},
        "autotuning": WANTED | wanted,
        "world": world,
        "ranks_per_host": world,
        "device_bytes": 0,
        "batch": list(batch),
        "parameters": 800,
        "stage": 1,
        "bytes": choice(1, 6)["bytes"],
        "choices": [choice(0, 9), choice(1, 6), choice(2, 5), choice(3, 4), choice(2, 3, files=2)],
    }


def with_switch(on, **more):
    return survey(**more) | {"recomputes": on}


def search(facts, speed, gib=8, activations=0):
    """A search over `speed(stage, batch, more)` in samples per second; None: that run fails."""
    runs = []

    def measure(attempt):
        stage = attempt.setting.patch.get("zero_optimization", {}).get("stage", facts["stage"])
        runs.append((stage, str(attempt.batch), *attempt.more.items()))
        rate = speed(stage, attempt.batch, attempt.more)
        if rate is None:
            return {"error": "killed"}
        grown = attempt.setting.bytes["rank"] + activations * attempt.batch.micro
        return {
            "step_s": attempt.batch.micro * attempt.batch.accumulation * facts["world"] / rate,
            "samples_per_s": rate,
            "samples": 32,
            "follows": True,
            "grown_bytes": grown,
            "device_bytes": 0,
        }

    made = Search(facts, gib * GIB, measure)
    made.run()
    return made, runs


def test_what_the_plan_says_does_not_fit_is_not_run():
    made, runs = search(survey(), lambda stage, batch, more: 100 + stage)
    assert {stage for stage, *_ in runs} == {1, 2, 3}
    assert "stage 0" in table(made) and "the plan takes 9.00 GiB of 8.00 GiB" in table(made)
    assert "without files it fits, and files are slower" in table(made)


def test_files_are_tried_where_nothing_else_fits():
    made, runs = search(survey(), lambda stage, batch, more: 100.0, gib=3)
    assert runs[0] == (2, "2 x 8")
    assert made.best.setting.name == "stage 2, optimizer states in files"
    assert made.best.patch(2)["zero_optimization"]["offload_optimizer"]["device"] == "nvme"
    assert "the plan takes 6.00 GiB of 3.00 GiB" in table(made)


def test_micro_batches_grow_from_the_fastest_setting_and_keep_the_global_batch():
    made, runs = search(survey(), lambda stage, batch, more: (200 if stage == 2 else 100) + 10 * batch.micro)
    assert runs == [(1, "2 x 8"), (2, "2 x 8"), (3, "2 x 8"), (2, "4 x 4"), (2, "8 x 2"), (2, "16 x 1")]
    patch = made.best.patch(2)
    assert patch["train_micro_batch_size_per_gpu"] * patch["gradient_accumulation_steps"] * 2 == 32
    assert patch["train_batch_size"] == 32
    assert patch["zero_optimization"]["stage"] == 2
    assert str(made.best.batch) == "16 x 1"


def test_smaller_micro_batches_are_tried_where_larger_ones_are_slower():
    made, runs = search(survey((32, 8, 2)), lambda stage, batch, more: 100 - 10 * abs(batch.micro - 4))
    assert runs[-3:] == [(1, "16 x 1"), (1, "4 x 4"), (1, "2 x 8")]
    assert str(made.best.batch) == "4 x 4"


def test_noise_is_no_gain():
    made, _ = search(survey(), lambda stage, batch, more: 100 + 0.3 * stage + 0.05 * batch.micro)
    assert made.best is made.rows[0]


def test_activations_that_would_not_fit_are_forecast_and_a_smaller_setting_is_tried():
    """Two ranks of 3 GiB and 0.4 GiB per sample: at stage 1, 4 x 4 would take 6 + 3.2 GiB; at stage 3, 4 + 3.2."""
    made, runs = search(
        survey(),
        lambda stage, batch, more: (110 if stage == 1 else 100) + 20 * batch.micro,
        activations=int(0.4 * GIB),
    )
    assert (1, "4 x 4") not in runs
    assert "with its activations it would take 9.20 GiB of 8.00 GiB" in table(made)
    assert (made.best.setting.name, str(made.best.batch)) == ("stage 3", "4 x 4")


def test_a_run_that_fails_ends_the_way_up():
    made, runs = search(survey(), lambda stage, batch, more: None if batch.micro > 4 else 100 + batch.micro * 10)
    assert str(made.best.batch) == "4 x 4"
    assert (1, "16 x 1") not in runs
    assert "failed: killed" in table(made)


def test_the_global_batch_grows_within_its_bounds():
    facts = survey((8, 2, 2), max_train_batch_size=40)
    made, runs = search(facts, lambda stage, batch, more: 100 + 10 * batch.micro)
    assert [batch for _, batch, *_ in runs] == ["2 x 2"] * 3 + ["4 x 2", "8 x 2"]
    assert made.best.patch(2)["train_batch_size"] == 32


def test_latency_counts_seconds_per_step():
    facts = survey((16, 4, 2), max_train_batch_size=64, metric="latency")
    made, _ = search(facts, lambda stage, batch, more: 100 + batch.micro)
    assert str(made.best.batch) == "1 x 2"


def test_buckets_are_tried_if_the_search_is_not_fast():
    facts = survey((4, 2, 1), fast=False, tuner_early_stopping=9)
    made, runs = search(facts, lambda stage, batch, more: 150 if more.get("reduce_bucket_size") == 100 else 100)
    assert (1, "2 x 1", ("reduce_bucket_size", 400)) in runs
    assert made.best.patch(2)["zero_optimization"]["reduce_bucket_size"] == 100
    assert "reduce_bucket_size 100" in table(made)
    assert (1, "2 x 1", ("reduce_bucket_size", 100), ("allgather_bucket_size", 100)) in runs


@pytest.mark.parametrize(
    ("wanted", "count", "text"),
    [({"tuner_num_trials": 2}, 2, "as many as"), ({"tuner_early_stopping": 2}, 3, "2 runs in a row brought nothing")],
)
def test_the_search_ends_early_and_says_so(wanted, count, text):
    made, runs = search(survey(**wanted), lambda stage, batch, more: 100.0)
    assert len(runs) == count
    assert text in table(made)


def test_one_rank_shards_nothing():
    made, runs = search(survey((4, 4, 1), world=1), lambda stage, batch, more: 100.0)
    assert {stage for stage, *_ in runs} == {1}
    assert table(made).count("one rank has nothing to shard") == 3


def test_a_placement_of_the_configuration_is_kept_apart_from_the_stage_without_it():
    config = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/n"}}}
    facts = survey(config=config) | {"bytes": choice(1, 2, files=4)["bytes"]}
    made, runs = search(facts, lambda stage, batch, more: 100.0)
    assert made.rows[0].setting.name == "stage 1, placed as it is"
    away = next(row for row in made.rows if row.setting.name == "stage 1").patch(2)["zero_optimization"]
    assert away["offload_optimizer"] is None
    assert len(runs) >= 4


def test_a_batch_that_the_script_does_not_follow_is_never_the_fastest():
    facts = survey((4, 1, 2), world=2)
    made = Search(
        facts,
        8 * GIB,
        lambda attempt: {
            "step_s": 1 / attempt.batch.micro,
            "samples_per_s": 4.0 * attempt.batch.micro,
            "samples": 4,
            "follows": attempt.batch.micro == 1,
            "grown_bytes": 0,
            "device_bytes": 0,
        },
    )
    assert made.run().batch == Batch(1, 2)
    assert 'name its argument in "arg_mappings"' in table(made)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["--batch", "4", "x"], ["--batch", "8", "x"]),
        (["--batch=4"], ["--batch=8"]),
        (["x"], ["x", "--batch", "8"]),
    ],
)
def test_an_argument_is_set(before, after):
    assert set_argument(before, "--batch", 8) == after


def recomputing(facts, speed, activations, gib=8):
    """Searches like `search`, over `speed(batch, recomputes)`; activations are a tenth where they are recomputed."""
    runs = []

    def measure(attempt):
        on = facts["recomputes"] if attempt.recomputes is None else attempt.recomputes
        runs.append((str(attempt.batch), attempt.recomputes))
        grown = attempt.setting.bytes["rank"] + activations * attempt.batch.micro // (10 if on else 1)
        rate = speed(attempt.batch, on)
        return {"step_s": 1 / rate, "samples_per_s": rate, "samples": 32, "follows": True, "grown_bytes": grown} | {
            "device_bytes": 0
        }

    made = Search(facts, gib * GIB, measure)
    made.run()
    return made, runs


def only_own(facts):
    return facts | {"choices": [choice(1, 6)]}


def test_recomputation_is_tried_where_memory_ends_the_way():
    facts = only_own(with_switch(False))
    made, runs = recomputing(facts, lambda batch, on: 100 + 20 * batch.micro - 10 * on, int(0.4 * GIB))
    assert runs == [("2 x 8", None), ("1 x 16", None), ("4 x 4", True), ("8 x 2", True), ("16 x 1", True)]
    assert (str(made.best.batch), made.best.recomputes) == ("16 x 1", True)
    assert "stage 1, recomputing" in table(made) and "leaves memory for this micro-batch" in table(made)


def test_recomputation_that_costs_more_than_it_gives_is_left_off():
    facts = only_own(with_switch(False))
    made, runs = recomputing(facts, lambda batch, on: 100 + 5 * batch.micro - 40 * on, int(0.4 * GIB))
    assert runs[-1] == ("4 x 4", True)
    assert (str(made.best.batch), made.best.recomputes) == ("2 x 8", None)


def test_recomputation_is_left_alone_where_memory_does():
    _, runs = recomputing(only_own(with_switch(False)), lambda batch, on: 100.0 + batch.micro, 0)
    assert {on for _, on in runs} == {None}


def test_a_script_that_recomputes_is_tried_without():
    facts = only_own(with_switch(True, batch=(4, 2, 1)))
    made, runs = recomputing(facts, lambda batch, on: 100 - 30 * on, 0)
    assert runs == [("2 x 1", None), ("1 x 2", None), ("2 x 1", False)]
    assert made.best.recomputes is False and "stage 1, without recomputing" in table(made)


def test_a_script_that_fails_without_memory_is_tried_recomputing():
    facts = only_own(with_switch(False))

    def measure(attempt):
        if not attempt.recomputes:
            return {"error": "killed"}
        return {"step_s": 1, "samples_per_s": 32, "samples": 32, "follows": True, "grown_bytes": 0, "device_bytes": 0}

    made = Search(facts, 8 * GIB, measure)
    assert made.run().recomputes is True


MESHES = [{"axis": axis, "size": 2, "why_not": ""} for axis in ("pipeline", "tensor")]


def search_meshes(facts, speed, train_batch, **more):
    """A search over `speed(parallel, batch)`; the script trains by train_batch() or by calls of its own."""
    runs = []

    def measure(attempt):
        parallel = attempt.setting.patch.get("parallel", {})
        runs.append((parallel, str(attempt.batch)))
        rate = speed(parallel, attempt.batch)
        return {
            "step_s": 32 / rate,
            "samples_per_s": rate,
            "samples": 32,
            "follows": True,
            "grown_bytes": 0,
            "device_bytes": 0,
            "train_batch": train_batch,
        }

    made = Search(facts, more.get("gib", 8) * GIB, measure)
    made.run()
    return made, runs


def test_meshes_are_tried_from_the_fastest_with_the_same_global_batch():
    facts = survey() | {"meshes": MESHES}
    made, runs = search_meshes(facts, lambda parallel, batch: 200 if "tensor" in parallel else 100, train_batch=True)
    assert ({"pipeline": 2}, "2 x 16") in runs and ({"tensor": 2}, "2 x 16") in runs
    patch = made.best.patch(2)
    assert patch["parallel"] == {"tensor": 2}
    assert patch["train_batch_size"] == 32 == patch["gradient_accumulation_steps"] * 2
    assert ({"tensor": 2}, "4 x 8") in runs, "then larger micro-batches"
    assert "layers cut over ranks" in table(made)


def test_a_pipeline_is_passed_over_where_the_script_steps_itself():
    facts = survey() | {"meshes": MESHES}
    made, runs = search_meshes(facts, lambda parallel, batch: 100, train_batch=False)
    assert {"tensor"} == {axis for parallel, _ in runs for axis in parallel}
    assert "not run: a pipeline trains by train_batch(), and the script calls forward, backward" in table(made)


def test_a_mesh_that_the_model_refuses_is_in_the_table():
    refused = [{"axis": "pipeline", "size": 2, "why_not": "it has no chain of blocks"}]
    made, runs = search_meshes(survey() | {"meshes": refused}, lambda parallel, batch: 100, train_batch=True)
    assert not any(parallel for parallel, _ in runs)
    assert "not run: it has no chain of blocks" in table(made)


def test_a_mesh_is_tried_where_nothing_else_fits():
    facts = survey() | {"meshes": MESHES, "choices": [choice(1, 6)]}
    made, runs = search_meshes(facts, lambda parallel, batch: 100 + 50 * batch.micro, train_batch=True, gib=4)
    assert runs[0] == ({"pipeline": 2}, "2 x 16")
    assert made.best.setting.shared == 2
    assert made.best.patch(2)["train_batch_size"] == 32


def test_a_script_with_a_mesh_of_its_own_keeps_it():
    facts = survey((32, 2, 16), config={"parallel": {"tensor": 2}}) | {"shared": 2, "meshes": []}
    made, _ = search_meshes(facts, lambda parallel, batch: 100 + batch.micro, train_batch=True)
    assert made.best.patch(2)["train_batch_size"] == 32, "one replica on two ranks"
