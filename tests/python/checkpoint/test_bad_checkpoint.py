# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that does not fit, is damaged or finds no room changes nothing, on any rank."""

import json
import resource
import shutil
from pathlib import Path

import models
import pytest
from conftest import run_processes, run_ranks
from states import assert_same, snapshot, start, train

import deeptide


def refuse_to_load(world, stage, folder, message, sizes):
    engine = start(world, stage, models.make_model(7, **sizes))
    train(engine)
    before = snapshot(engine)
    with pytest.raises(deeptide.CheckpointError, match=message):
        engine.load_checkpoint(folder, tag="one")
    assert_same(before, snapshot(engine))
    train(engine)


def save_one(world, stage, folder):
    engine = start(world, stage)
    train(engine)
    engine.save_checkpoint(folder, tag="one")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"layers": 4}, r"(?s)nothing was changed.*h\.3\.down\.bias.*h\.3\.up\.weight"),
        ({"layers": 2}, r"(?s)nothing was changed.*h\.2\.down\.bias.*h\.2\.up\.weight"),
        ({"width": 22}, r"(?s)nothing was changed.*embed\.weight.*\(37, 20\), expected \(37, 22\)"),
    ],
    ids=["missing", "extra", "shape"],
)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_checkpoint_that_does_not_fit_lists_names(stage, sizes, message, tmp_path):
    run_ranks(2, save_one, stage, str(tmp_path))
    run_ranks(2, refuse_to_load, stage, str(tmp_path), message, sizes)


def damage(folder, kind):
    shards = sorted(folder.glob("rank_*"))
    manifest = next(path for path in folder.iterdir() if path.suffix == ".json")
    if kind == "no manifest":
        manifest.unlink()
    elif kind == "garbage":
        manifest.write_text('{"format": ')
    elif kind == "no shard":
        shards[1].unlink()
    elif kind == "short shard":
        shards[1].write_bytes(shards[1].read_bytes()[:-100])
    elif kind in ("changed shard", "changed frozen file"):
        path = shards[1] if kind == "changed shard" else max(folder.glob("frozen_*"))
        content = bytearray(path.read_bytes())
        content[-3] ^= 16
        path.write_bytes(content)
    else:
        content = {**json.loads(manifest.read_text()), "state": '{"global_steps": "many"}'}
        if kind == "bad state":  # as a program of ours would have to write it: no checksum contradicts it
            del content["hash"], content["checksum"]
        manifest.write_text(json.dumps(content))


DAMAGE = {
    "no manifest": "manifest",
    "garbage": "malformed",
    "no shard": "rank_",
    "short shard": "rank_",
    "bad state": "global_steps|type must be number",
    "changed by hand": "its checksum is",
    "changed shard": r"is damaged: of the piece .* was changed|checking the checkpoint failed on rank",
}


@pytest.mark.parametrize("kind", list(DAMAGE))
@pytest.mark.parametrize("stage", [0, 3])
def test_a_damaged_checkpoint_changes_nothing(stage, kind, tmp_path):
    run_ranks(2, save_one, stage, str(tmp_path))
    damage(tmp_path / "one", kind)
    run_ranks(2, refuse_to_load, stage, str(tmp_path), DAMAGE[kind], {})


def make_adapters(seed=0):
    """Most is frozen, in tensors that have files of their own."""
    model = models.make_model(seed, width=200)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("h.0.", "h.1.up.")))
    return model


def save_adapters(world, folder):
    engine = start(world, 3, make_adapters())
    train(engine)
    engine.save_checkpoint(folder, tag="one")


def refuse_adapters(world, folder, kind):
    engine = start(world, 3, make_adapters(seed=3), checkpoint={"verify": kind != "unverified"})
    train(engine)
    before = snapshot(engine)
    message = "h.*is damaged|checking the checkpoint failed on rank"
    if kind == "unverified":
        message = "a part of the engine's state was replaced"
    with pytest.raises(deeptide.CheckpointError, match=message):
        engine.load_checkpoint(folder)
    if kind != "unverified":
        assert_same(before, snapshot(engine))


@pytest.mark.parametrize(("world_size", "kind"), [(1, "verified"), (3, "verified"), (1, "unverified")])
def test_a_damaged_frozen_file_changes_nothing_unless_loads_do_not_verify(world_size, kind, tmp_path):
    """Three ranks want a third of the damaged block each: none would compare it for its own sake."""
    run_ranks(1, save_adapters, str(tmp_path))
    damage(tmp_path / "one", "changed frozen file")
    run_ranks(world_size, refuse_adapters, str(tmp_path), kind)


def load_what_is_damaged_at_first(world, folder):
    engine = start(world, 3, make_adapters(seed=3))
    with pytest.raises(deeptide.CheckpointError, match=r"is damaged|reading the checkpoint failed on rank") as refusal:
        engine.load_checkpoint(folder, tag="two")
    if "is damaged" in str(refusal.value):
        assert "a part of the engine's state was replaced" in str(refusal.value)
    replaced = r"two failed when a part of the engine's state was replaced"
    for go_on in (lambda: train(engine), lambda: engine.save_checkpoint(folder, tag="three")):
        with pytest.raises(deeptide.CheckpointError, match=replaced):
            go_on()
    engine.load_checkpoint(folder, tag="one")
    expected = start(world, 3, make_adapters())
    train(expected)
    assert_same(snapshot(expected), snapshot(engine))
    train(engine)
    train(expected)
    assert_same(snapshot(expected), snapshot(engine))


@pytest.mark.parametrize("world_size", [1, 3])
def test_an_engine_that_has_read_damage_at_first_goes_on_with_another_checkpoint(world_size, tmp_path):
    """Three ranks want a third of the damaged block each, and one of them compares it whole."""
    run_ranks(world_size, save_adapters, str(tmp_path))
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    damage(tmp_path / "two", "changed frozen file")
    run_ranks(world_size, load_what_is_damaged_at_first, str(tmp_path))


def bytes_read():
    return int(Path("/proc/self/io").read_text().split()[1])


def count_bytes(folder):
    deeptide.init_distributed()
    counts = {}
    for when in ("at first", "again"):
        model = models.make_model(0, width=600)
        engine = start(None, 1, model)
        if when == "again":
            train(engine)
        for path in Path(folder, "one").iterdir():
            path.read_bytes()  # into the page cache: /proc counts no read that passes by it
        before = bytes_read()
        engine.load_checkpoint(folder)
        counts[when] = bytes_read() - before
    size = sum(path.stat().st_size for path in Path(folder, "one").iterdir())
    assert size < counts["at first"] < 1.1 * size, (size, counts)
    assert 1.9 * size < counts["again"] < 2.2 * size, (size, counts)


def save_wide(folder):
    deeptide.init_distributed()
    engine = start(None, 1, models.make_model(0, width=600))
    train(engine)
    engine.save_checkpoint(folder, tag="one")


@pytest.mark.costly
def test_a_run_that_begins_by_loading_reads_every_byte_once(tmp_path):
    """State that steps have made is compared before a load replaces it; what initialize left is not worth that."""
    run_processes(1, save_wide, str(tmp_path))
    run_processes(1, count_bytes, str(tmp_path))


def save_on_a_full_disk(stage, folder):
    deeptide.init_distributed()
    engine = start(None, stage)
    train(engine)
    engine.save_checkpoint(folder, tag="one")
    saved = snapshot(engine)
    train(engine)
    before = snapshot(engine)
    if engine.world.rank == 1:  # a file that grows beyond fails as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    for tag in ("one", "two"):
        with pytest.raises(deeptide.CheckpointError, match="rank 1" if engine.world.rank == 0 else "cannot write"):
            engine.save_checkpoint(folder, tag=tag)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert_same(before, snapshot(engine))
    assert engine.load_checkpoint(folder)[0].endswith("/one")
    assert_same(saved, snapshot(engine))
    train(engine)
    engine.save_checkpoint(folder, tag="two")


@pytest.mark.parametrize("stage", [0, 3])
def test_a_full_disk_leaves_the_old_checkpoint(stage, tmp_path):
    run_processes(2, save_on_a_full_disk, stage, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "one", "two"]
