# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as folders: read, exported and pruned without an engine, from Python and by the command."""

import json
import os
import resource
import shutil
import subprocess
import zipfile

import models
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.format_utils
import torch.distributed.checkpoint.state_dict
from conftest import run_ranks
from torch import nn

import deeptide
from deeptide import checkpoint

ROLES = ("master", "exp_avg", "exp_avg_sq")
OPTIMIZER = {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.1}}


class WithBuffer(models.TinyModel):
    """With a frozen parameter and a buffer."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(20), requires_grad=False)
        self.register_buffer("seen", torch.arange(3))

    def forward(self, tokens, targets=None):
        self.seen += 1
        return super().forward(tokens, targets)


def save(world, folder, steps=2, stage=3, **extra):
    """Trains some steps and saves after each; returns everything by name and role."""
    config = models.config(stage, optimizer=OPTIMIZER, **extra)
    engine = deeptide.initialize(model=models.make_model(kind=WithBuffer), config=config, world=world)[0]
    for tokens, targets in models.batches(steps * engine.gradient_accumulation_steps(), 4 * world.size):
        part = slice(4 * world.rank, 4 * world.rank + 4)
        engine.backward(engine(tokens[part], targets[part]))
        if engine.step().applied:
            engine.save_checkpoint(folder)
    names = [name for name, p in engine.module.named_parameters() if p.requires_grad]
    state = {(name, role): engine._core.full_state(name, role) for name in names for role in ROLES}
    state |= {(name, "buffer"): value for name, value in engine.module.named_buffers()}
    state["bias", "param"] = engine.module_state_dict()["bias"]
    return state


@pytest.fixture
def saved(tmp_path):
    """(folder, everything that a world of two saved)."""
    folder = tmp_path / "run"
    return folder, run_ranks(2, save, str(folder))[0]


def weights_of(state):
    return {name: value for (name, role), value in state.items() if role in ("master", "param", "buffer")}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype and torch.equal(value, other[name]), name


def command(*words, code=0, **options):
    words = [shutil.which("deeptide"), "checkpoint", *map(str, words)]
    done = subprocess.run(words, capture_output=True, text=True, **options)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code in (0, 1) else done.stderr


def test_reader_gives_what_engines_of_any_world_saved(saved):
    folder, state = saved
    reader = checkpoint.open(folder)
    assert reader.world_size == 2 and reader.global_steps == 2
    found = {(tensor.name, tensor.role): reader.read(tensor) for tensor in reader.tensors}
    own = {key: value for key, value in found.items() if key[1] != "buffer.data=1"}
    assert_equal(own, state)
    tensor = reader.find("h.1.up.weight")
    assert tensor.role == "master" and tensor.shape == [60, 20]
    whole = state["h.1.up.weight", "master"].flatten()
    assert torch.equal(reader.read_range(tensor, 17, 901), whole[17:901])
    statistics = checkpoint.statistics(reader, tensor)
    assert statistics.norm == pytest.approx(whole.double().norm().item())
    with pytest.raises(deeptide.CheckpointError, match=r"has no 'up.weight'; it has 'h.0.up.weight' as exp_avg"):
        reader.find("up.weight")


def test_list_verify_diff_and_prune(saved):
    folder, _ = saved
    assert [(c.tag, c.global_steps, c.is_latest) for c in checkpoint.ls(folder)] == [
        ("global_step1", 1, False),
        ("global_step2", 2, True),
    ]
    assert checkpoint.verify(folder) == []
    differences = checkpoint.diff(folder / "global_step1", folder)
    assert {d.kind for d in differences} == {"values"} and all(d.max_difference > 0 for d in differences)
    assert "bias" not in {d.name for d in differences}
    assert checkpoint.diff(folder, folder / "global_step2") == []
    assert checkpoint.prune(folder, 1, dry_run=True) == ["global_step1"]
    assert checkpoint.prune(folder, 1, keep_every=1) == []
    assert checkpoint.prune(folder, 1) == ["global_step1"]
    assert sorted(os.listdir(folder)) == ["global_step2", "latest"]


@pytest.mark.parametrize("dtype", [None, "bf16", "fp16"])
def test_state_dicts_are_what_torch_loads(saved, tmp_path, dtype):
    folder, state = saved
    names = checkpoint.export(folder, tmp_path / "out", "state_dict", dtype=dtype)
    assert names == ["pytorch_model.bin"]
    path = tmp_path / "out" / names[0]
    kind = {None: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    expected = {name: v.to(kind) if v.is_floating_point() else v for name, v in weights_of(state).items()}
    assert_equal(torch.load(path, weights_only=True), expected)
    assert_equal(torch.load(path, weights_only=True, mmap=True), expected)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        for item in archive.infolist():
            archive.fp.seek(item.header_offset + 26)
            lengths = archive.fp.read(4)
            begin = item.header_offset + 30 + sum(int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
            assert begin % 64 == 0, item.filename
    with pytest.raises(
        deeptide.ConfigError, match="export: got format 'onnx', expected one of safetensors, state_dict"
    ):
        checkpoint.export(folder, tmp_path / "out", "onnx")


def train_gpt2(world, folder, config):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**config))
    engine = deeptide.initialize(model=model, config=models.config(3, optimizer=OPTIMIZER), world=world)[0]
    tokens = torch.arange(24).view(2, 12) % config["vocab_size"]
    for _ in range(2 * engine.gradient_accumulation_steps()):
        engine.backward(engine(tokens, labels=tokens).loss)
        engine.step()
    engine.save_checkpoint(folder)
    model.eval()
    with torch.no_grad():
        return engine(tokens).logits


@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_transformers_read_an_export_to_the_same_logits(tmp_path, size):
    transformers = pytest.importorskip("transformers")
    config = {"vocab_size": 61, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 2}
    config |= {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    logits = run_ranks(2, train_gpt2, str(tmp_path / "run"), config)[0]
    names = checkpoint.export(tmp_path / "run", tmp_path / "out", max_shard_size=size)
    assert ("model.safetensors.index.json" in names) == (size == "20KB")
    transformers.GPT2Config(**config).save_pretrained(tmp_path / "out")
    model, told = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    tokens = torch.arange(24).view(2, 12) % config["vocab_size"]
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens).logits, logits)


def test_torch_reads_weights_and_states_of_a_distributed_checkpoint(saved, tmp_path):
    folder, state = saved
    out = command("export", folder, tmp_path / "out", "--format", "dcp", env={"PATH": ""})  # and no Python
    assert out.split() == [str(tmp_path / "out" / name) for name in (".metadata", "__0_0.distcp")]
    weights = {name: torch.zeros_like(value) for name, value in weights_of(state).items()}
    moments = {
        name: {role: torch.zeros_like(state[name, role]) for role in ROLES[1:]} | {"step": torch.tensor(0.0)}
        for name, role in state
        if role == "master"
    }
    groups = [{"params": list(moments), "lr": 0.0, "betas": (0.0, 0.0)}]  # a list, as torch's get_state_dict has it
    nested = {"model": weights, "optim": {"state": moments, "param_groups": groups}}
    flat = {f"optim.param_groups.{name}.{key}": 0.0 for name in moments for key in ("lr", "betas")}
    dcp.load(nested, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    dcp.load(flat, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    by_name = {"optim": {"state": moments, "param_groups": {name: {"lr": 0.0} for name in moments}}}
    dcp.load(by_name, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    assert by_name["optim"]["param_groups"] == nested["optim"]["param_groups"]  # torch puts the list in their place
    assert_equal(nested["model"], weights_of(state))
    for name, found in nested["optim"]["state"].items():
        assert found["step"] == 2
        assert all(torch.equal(found[role], state[name, role]) for role in ROLES[1:]), name
        assert flat[f"optim.param_groups.{name}.lr"] == 0.01
        assert flat[f"optim.param_groups.{name}.betas"] == (0.9, 0.95)
    read = nested["optim"]["param_groups"]
    assert {(group["lr"], group["betas"]) for group in read} == {(0.01, (0.9, 0.95))}
    assert sorted(name for group in read for name in group["params"]) == sorted(moments)
    with pytest.raises(deeptide.ConfigError, match="dcp holds what was saved; give no dtype"):
        checkpoint.export(folder, tmp_path / "out", "dcp", dtype="bf16")


def save_groups(world, folder):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups = [
        {"params": model[0].parameters(), "lr": 0.01, "weight_decay": 0.3},
        {"params": model[1].parameters(), "lr": 0.002, "betas": (0.8, 0.9)},
    ]
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}
    engine, *_ = deeptide.initialize(model=model, model_parameters=groups, config=config, world=world)
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()
    engine.save_checkpoint(str(folder), tag="groups")


@pytest.mark.parametrize("flat", [False, True])
def test_torch_loads_groups_of_a_distributed_checkpoint_in_both_its_forms(tmp_path, flat):
    run_ranks(1, save_groups, tmp_path / "run")
    checkpoint.export(tmp_path / "run", tmp_path / "out", "dcp")
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[1].parameters()}], lr=7.0)
    options = torch.distributed.checkpoint.state_dict.StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, states = torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer, options=options)
    state = {"model": weights, "optim": states}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, checkpoint_id=str(tmp_path / "out"), planner=planner, no_dist=True)
    torch.distributed.checkpoint.state_dict.set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options
    )
    first, second = optimizer.param_groups
    assert (first["lr"], first["weight_decay"], tuple(first["betas"])) == (0.01, 0.3, (0.9, 0.999))
    assert (second["lr"], second["weight_decay"], tuple(second["betas"])) == (0.002, 0.0, (0.8, 0.9))
    assert all(value["step"] == 1 and value["exp_avg"].abs().sum() > 0 for value in optimizer.state.values())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_a_distributed_checkpoint_is_described_as_torch_does(saved, tmp_path):
    checkpoint.export(saved[0], tmp_path / "out", "dcp")
    found = dcp.FileSystemReader(tmp_path / "out").read_metadata()
    torch.distributed.checkpoint.format_utils.dcp_to_torch_save(tmp_path / "out", tmp_path / "whole.pt")
    content = torch.load(tmp_path / "whole.pt")
    writer = dcp.FileSystemWriter(tmp_path / "torchs", single_file_per_rank=True, thread_count=1)
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(content, storage_writer=writer, planner=planner, no_dist=True)
    torchs = dcp.FileSystemReader(tmp_path / "torchs").read_metadata()
    assert found.state_dict_metadata == torchs.state_dict_metadata
    assert found.storage_data.keys() == torchs.storage_data.keys()
    assert {index.index for index in found.storage_data} == {index.index for index in torchs.storage_data}


@pytest.mark.costly
def test_universal_layout_has_deepspeeds_files(saved, tmp_path):
    folder, state = saved
    out = command(
        "export", folder, tmp_path / "out", "--format", "universal", env={"PATH": ""}
    ).split()  # and no Python
    assert out == [str(tmp_path / "out" / name) for name in ("global_step2", "latest_universal")]
    assert (tmp_path / "out" / "latest_universal").read_text() == "global_step2"
    zero = tmp_path / "out" / "global_step2" / "zero"
    for name in {name for name, role in state if role == "master"}:
        assert sorted(os.listdir(zero / name)) == ["exp_avg.pt", "exp_avg_sq.pt", "fp32.pt", "step.pt"]
        for role, file in (("master", "fp32"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            assert torch.equal(torch.load(zero / name / f"{file}.pt")["param"], state[name, role])
        assert torch.load(zero / name / "step.pt") == 2
    group = torch.load(zero / "optimizer_state.pt")["param_groups"][0]
    assert group["lr"] == 0.01 and tuple(group["betas"]) == (0.9, 0.95) and group["weight_decay"] == 0.1
    counters = torch.load(zero.parent / "mp_rank_00_model_states.pt")
    assert counters["global_steps"] == 2 and torch.equal(counters["module"]["seen"], state["seen", "buffer"])


@pytest.mark.parametrize("layout", ["universal", "dcp"])
@pytest.mark.parametrize("place", ["under a file", "full"])
def test_a_place_that_cannot_be_written_is_one_error(saved, tmp_path, mount_disk, layout, place):
    out = mount_disk("8k") if place == "full" else tmp_path / "file" / "out"
    (tmp_path / "file").touch()
    text = f"{out}.*: No space left.*free some space" if place == "full" else f"create the folder {out}.*: Not a dir"
    with pytest.raises(deeptide.CheckpointError, match=text):
        checkpoint.export(saved[0], out, layout)
    assert place == "under a file" or not os.listdir(out)  # nothing half-written stays


@pytest.mark.costly
@pytest.mark.parametrize("layout", ["universal", "dcp"])
def test_damage_is_named_by_an_export_with_states(saved, tmp_path, layout):
    folder = saved[0]
    damaged = folder / "global_step2" / "rank_00001.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-3] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(deeptide.CheckpointError, match="is damaged: of the piece"):
        checkpoint.export(folder, tmp_path / "out", layout)


def load_universal(world, folder, stage):
    """Everything by name and role, of an engine that has trained nothing."""
    config = models.config(stage, optimizer=OPTIMIZER, checkpoint={"load_universal": True})
    engine = deeptide.initialize(model=models.make_model(kind=WithBuffer, seed=9), config=config, world=world)[0]
    path, _ = engine.load_checkpoint(folder)
    assert path is not None and engine.global_steps == 2
    names = [name for name, p in engine.module.named_parameters() if p.requires_grad]
    return {(name, role): engine._core.full_state(name, role) for name in names for role in ROLES}


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_exported_to_the_universal_layout_is_read_here(saved, tmp_path, stage):
    folder, state = saved
    checkpoint.export(folder, tmp_path / "out", "universal")
    loaded = run_ranks(2, load_universal, str(tmp_path / "out"), stage)[0]
    assert_equal(loaded, {key: value for key, value in state.items() if key in loaded})
    assert len(loaded) == sum(role in ROLES for _, role in state)


def test_command_shows_what_there_is(saved, tmp_path):
    folder, state = saved
    listed = json.loads(command("ls", folder, "--json"))
    assert [(c["tag"], c["latest"], c["world_size"]) for c in listed] == [
        ("global_step1", False, 2),
        ("global_step2", True, 2),
    ]
    assert "global_step2" in command("ls", folder)
    shown = json.loads(command("show", folder, "--json"))
    assert len(shown["tensors"]) == len(state) + 1  # the second rank's buffer
    assert "h.0.norm.bias as exp_avg_sq: 20, F32, 80 bytes" in command("show", folder, "h.0.norm.bias")
    assert command("verify", folder) == "whole\n"
    assert "values, " in command("diff", folder / "global_step1", folder, code=1)
    assert command("diff", folder, folder) == "equal\n"
    assert command("prune", folder, "--keep_last", 1, "--dry_run") == "would remove global_step1\n"
    assert command("export", folder, tmp_path / "out", "--dtype", "bf16") == f"{tmp_path}/out/model.safetensors\n"
    assert "expected one of ls, show" in command("list", code=2)
    assert "latest' nor a manifest.json" in command("show", tmp_path, code=126)


def test_command_names_a_damaged_tensor(saved):
    folder, _ = saved
    path = folder / "global_step2" / "rank_00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)
    told = command("verify", folder, code=1)
    assert "is damaged: of the piece" in told and str(path) in told
    told = run_ranks(2, refuse_to_load, str(folder))  # the rank whose share the block is names it to the other
    finder = next(rank for rank in range(2) if "is damaged" in told[rank])
    assert f"failed on rank {finder}" in told[1 - finder]


def refuse_to_load(world, folder):
    with pytest.raises(deeptide.CheckpointError) as error:
        load(world, folder)
    return str(error.value)


def load(world, folder):
    config = models.config(3, optimizer=OPTIMIZER)
    engine = deeptide.initialize(model=models.make_model(kind=WithBuffer), config=config, world=world)[0]
    engine.load_checkpoint(folder)


MIB = 1 << 20
LARGEST = 384 * MIB  # bytes of the tensor that is larger than what an export may take


def write_large(folder):
    """A checkpoint as version 2 wrote it, of one large tensor in two pieces, sparse on the disk."""
    os.makedirs(folder / "large")
    half = LARGEST // 8
    entry = {"name": "large", "role": "master", "shape": [2, half], "dtype": "F32", "pieces": []}
    for rank in range(2):
        name = f"rank_{rank:05d}.safetensors"
        header = {
            "__metadata__": {"save": "feed"},
            "large/master": {"dtype": "F32", "shape": [half], "data_offsets": [0, 4 * half]},
        }
        text = json.dumps(header).encode().ljust(248)
        with open(folder / "large" / name, "wb") as file:
            file.write((248).to_bytes(8, "little") + text)
            file.truncate(256 + 4 * half)
        entry["pieces"].append({"offsets": [rank * half], "sizes": [half], "file": name, "offset": 256})
    states = [{"coordinates": {"data": rank} if rank else {}, "state": "{}"} for rank in range(2)]
    manifest = {"format": "deeptide-checkpoint", "version": 2, "save": "feed", "world_size": 2, "state": "{}"}
    manifest |= {"client_state": "{}", "rank_states": states, "tensors": [entry]}
    (folder / "large" / "manifest.json").write_text(json.dumps(manifest))
    (folder / "latest").write_text("large")


@pytest.mark.parametrize("words", [("verify",), ("export", "out"), ("export", "out", "--format", "state_dict")])
def test_memory_stays_far_below_the_largest_tensor(tmp_path, words):
    write_large(tmp_path)
    name, *rest = words
    # The command's own text and stacks are 20 MiB of this; the export's blocks 24.
    limit = 128 * MIB
    command(
        name,
        tmp_path,
        *(["--dtype", "bf16"] if name == "export" else []),
        *[str(tmp_path / word) if word == "out" else word for word in rest],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    if name == "export":
        written = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
        assert LARGEST // 2 <= written < LARGEST // 2 + 4096
