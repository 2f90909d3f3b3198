# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deeptide.placement of parameters on an accelerator: its memory, the host's, and files, by sizes and shares."""

import models
import pytest
import torch.distributed as dist
from accelerated import DEVICE, ON_GPU, assert_bytes_as_planned, begin
from test_offload_on_accelerator import TO_HOST, make_engine, results_of, train
from test_offload_param_on_accelerator import FEW, Deep
from test_on_accelerator import check_order, far, run, unequal
from test_twin_flow_on_accelerator import split

pytestmark = pytest.mark.slow

NUMEL = sum(p.numel() for p in Deep().parameters())
UNIT = 270 * 271


def parameters(folder, **tiers):
    return {"placement": {"parameters": tiers, "nvme_path": folder}}


def tables(folder):
    return {
        "device and host": parameters(folder, device="50%", cpu="rest"),
        "three tiers": parameters(folder, device="30%", cpu="30%", nvme="rest"),
        "host and files": parameters(folder, cpu="40%", nvme="rest"),
        "all in files": parameters(folder, nvme="100%"),
    }


def compare(steps, gas, bf16, folder):
    """Wherever shards lie, and whoever steps them."""
    controls = begin()
    settings = {"gas": gas, "bf16": bf16, "gradient_clipping": 0.01, "kind": Deep}
    zero = {**FEW, **steps}
    controls.configure("random")
    expected = results_of(DEVICE, 3, zero=zero, **settings)
    for name, own in tables(folder).items():
        controls.configure("random", max_delay_us=300, guard_pinned=True)
        got = results_of(DEVICE, 3, zero=zero, deeptide=own, **settings)
        check_order(controls)
        if ON_GPU:
            assert far(expected, got, 2e-2) == [], name
        else:
            assert unequal(expected, got) == [], name
    dist.destroy_process_group()


@pytest.mark.costly
@pytest.mark.parametrize(
    ("world", "steps", "gas", "bf16"),
    [(1, {}, 1, False), (2, {}, 2, True), (1, TO_HOST, 2, True), (2, TO_HOST, 1, False), (2, split(0.5), 1, True)],
)
def test_three_tiers_change_no_bit(world, steps, gas, bf16, tmp_path):
    run(world, compare, steps, gas, bf16, str(tmp_path))


def account(bf16, steps, folder):
    """Each tier has its share, to one shard on the device; every byte is forecast and planned."""
    controls = begin()
    controls.configure("random")
    shard = UNIT * (2 if bf16 else 4) // dist.get_world_size()
    total = NUMEL * (2 if bf16 else 4) // dist.get_world_size()
    for own, on_device, in_files in (
        (parameters(folder, device="50%", cpu="rest"), 0.5 * total, 0),
        (parameters(folder, device=f"{3 * shard // 1024 + 4}KiB", cpu="rest"), 3 * shard, 0),
        (parameters(folder, device="30%", cpu="30%", nvme="rest"), 0.3 * total, 0.4 * total),
        (parameters(folder, cpu="100%"), 0, 0),
        (parameters(folder, nvme="100%"), 0, total),
    ):
        zero = {**FEW, **steps}
        engine = make_engine(DEVICE, 3, bf16=bf16, zero=zero, kind=Deep, deeptide=own)
        train(engine, DEVICE)
        planned = assert_bytes_as_planned(
            engine, models.make_model(kind=Deep), models.config(3, bf16=bf16, zero=zero, deeptide=own), own
        )
        for line in engine.memory():
            if line.role == "parameters":
                assert on_device - 1.1 * shard <= line.predicted_bytes <= 1.02 * on_device + 100, (own, line)
                # The rest of the device's share, and less than a block of the host's, go to files.
                files = planned.lines[line.role].file_bytes
                assert 0.98 * in_files <= files <= (in_files and 1.02 * in_files + 2.1 * shard + 4 * 2**20), own
        text = engine._core.summary()
        assert ("\n  parameters: " in text) and ((" on sim:0, " in text) == (on_device > 0) or ON_GPU), text
        engine.destroy()
    check_order(controls)
    dist.destroy_process_group()


@pytest.mark.parametrize(("world", "bf16", "steps"), [(1, True, {}), (2, False, TO_HOST)])
def test_tiers_keep_to_their_shares(world, bf16, steps, tmp_path):
    run(world, account, bf16, steps, str(tmp_path))
