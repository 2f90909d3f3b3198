# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Every export and import takes at most 256 MiB above the largest tensor, however much all tensors are together."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

import deeptide

MIB = 1 << 20
LARGEST, COUNT = 96, 6  # MiB of each tensor, and how many: more than the limit together
ABOVE = 256  # MiB


def write_checkpoint(folder, role="master"):
    """A checkpoint as version 2 wrote it, of zeros that take no room on the disk."""
    (folder / "large").mkdir(parents=True)
    numel = LARGEST * MIB // 4
    header, tensors = {"__metadata__": {"save": "feed"}}, []
    for number in range(COUNT):
        name = f"w{number // 3}" if role == "master" else f"w{number}"
        own = ("master", "exp_avg", "exp_avg_sq")[number % 3] if role == "master" else role
        kind = {"role": "moment", "moment": own} if own.startswith("exp_") else {"role": own}
        begin = 4 * numel * number
        header[f"{name}/{own}"] = {"dtype": "F32", "shape": [numel], "data_offsets": [begin, begin + 4 * numel]}
        piece = {"offsets": [0], "sizes": [numel], "file": "rank_00000.safetensors", "offset": 2048 + begin}
        tensors.append({"name": name, **kind, "shape": [2, numel // 2], "dtype": "F32", "pieces": [piece]})
    text = json.dumps(header).encode().ljust(2040)
    with open(folder / "large" / "rank_00000.safetensors", "wb") as file:
        file.write((2040).to_bytes(8, "little") + text)
        file.truncate(2048 + COUNT * 4 * numel)
    manifest = {"format": "deeptide-checkpoint", "version": 2, "save": "feed", "world_size": 1}
    manifest |= {"state": json.dumps({"global_steps": 1}), "client_state": "{}", "tensors": tensors}
    manifest["rank_states"] = [{"coordinates": {}, "state": "{}"}]
    (folder / "large" / "manifest.json").write_text(json.dumps(manifest))
    (folder / "latest").write_text("large")


def write_safetensors(folder):
    folder.mkdir()
    save_file({f"w{n}": torch.zeros(LARGEST, MIB // 4) for n in range(COUNT)}, folder / "model.safetensors")


def write_torch(folder):
    """The first one has its elements in another order."""
    folder.mkdir()
    state = {f"w{n}": torch.zeros(LARGEST, MIB // 4) for n in range(COUNT)}
    state["w0"] = state["w0"].view(MIB // 4, LARGEST).t()
    torch.save(state, folder / "pytorch_model.bin")


MEASURE = """
import sys, torch, deeptide
from deeptide import checkpoint

def memory(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) >> 10 for line in status if line.startswith(key))

with open("/proc/self/clear_refs", "w") as reset:
    reset.write("5")
before = memory("VmRSS")
what, source, out = sys.argv[1:]
if what == "import":
    deeptide.import_checkpoint(source, out)
else:
    checkpoint.export(source, out, what)
print(memory("VmHWM") - before)
"""


def check(what, source, out):
    done = subprocess.run([sys.executable, "-c", MEASURE, what, source, out], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout.split()[-1])
    assert peak <= LARGEST + ABOVE < LARGEST * COUNT, f"{peak} MiB"
    written = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return written // MIB


@pytest.mark.costly
@pytest.mark.parametrize("form", ["safetensors", "state_dict", "universal", "dcp"])
@pytest.mark.parametrize("role", ["master", "param"])
def test_an_export_takes_little_memory(tmp_path, form, role):
    write_checkpoint(tmp_path / "saved", role)
    written = check(form, tmp_path / "saved", tmp_path / "out")
    weights_alone = role == "master" and form in ("safetensors", "state_dict")
    twice = role == "param" and form == "universal"  # under the names of two stages
    assert written == LARGEST * (COUNT // 3 if weights_alone else 2 * COUNT if twice else COUNT)


def test_what_fills_a_universal_file_is_what_torch_reads(tmp_path):
    torch.manual_seed(0)
    state = {
        "brain": torch.randn(7, 5).bfloat16(),
        "counts": torch.arange(11),
        "empty": torch.empty(0, 3),
        "large": torch.randn(3, MIB),  # several blocks
        "scalar": torch.tensor(2.5),
    }
    save_file(state, tmp_path / "model.safetensors")
    made = deeptide.import_checkpoint(tmp_path / "model.safetensors", tmp_path / "saved")
    deeptide.checkpoint.export(made, tmp_path / "out", "universal")
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        found = torch.load(tmp_path / "out" / "weights" / name, weights_only=True)
        assert found["global_steps"] == 0
        assert found["module"].keys() == state.keys()
        for key, value in state.items():
            assert found["module"][key].dtype == value.dtype, key
            assert torch.equal(found["module"][key], value), key


@pytest.mark.costly
@pytest.mark.parametrize("write", [write_safetensors, write_torch])
def test_an_import_takes_little_memory(tmp_path, write):
    write(tmp_path / "model")
    assert check("import", tmp_path / "model", tmp_path / "out") == LARGEST * COUNT
