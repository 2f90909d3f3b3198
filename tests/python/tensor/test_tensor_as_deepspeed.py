# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ways to share layers: tp_model_init, and models that bring Megatron's layers and an mpu."""

import importlib
import random
import time

import cut
import models
import pytest
import torch
import torch.distributed as dist
from conftest import run_processes, run_ranks
from torch import nn
from torch.nn import functional as F

import deeptide
from deeptide.pipeline import PipelineModule
from deeptide.tensor import kept, make_team, mpu, team_of
from deeptide.tensor.cutting.slices import Slice, adding_names, slices_of

PRELOAD = ("deeptide.as_deepspeed.initialize", "deeptide.as_deepspeed.tensor.tensor_parallel", "deeptide.tensor.axis")
SIZE = 2


def deepspeed(name):
    return importlib.import_module(f"deeptide.as_deepspeed.{name}")


def rows(step):
    return models.batches(cut.STEPS, cut.MICRO)[step]


def train(engine):
    losses, norms = [], []
    for step in range(cut.STEPS):
        loss = engine(*rows(step))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def check(engine, kind=models.TinyModel):
    """Against the whole model, in a world of one."""
    found = train(engine)
    world = deeptide.make_world(dist.HashStore(), 0, 1)
    model = models.make_model(kind=kind)
    expected = train(deeptide.initialize(model=model, config=models.config(1, micro=cut.MICRO), world=world)[0])
    cut.near(found[0], expected[0], 1e-5, "losses")
    cut.near(found[1], expected[1], 1e-4, "norms")


def begin_by_tp_model_init():
    model = models.make_model()
    config = {**models.config(1, micro=cut.MICRO), "tensor_parallel": {"autotp_size": SIZE}}
    config["tensor_parallel"]["partition_config"] = {"use_default_specs": False, "layer_specs": cut.SPECS}
    assert deepspeed("tensor.tensor_parallel").tp_model_init(model, SIZE, torch.float32, config) is model
    assert team_of(model).size == SIZE
    assert model.h[0].up.weight.shape == (30, 20)
    engine = deepspeed("initialize").initialize(model=model, config=config)[0]
    assert engine.get_tensor_parallel_rank() == dist.get_rank()
    assert engine.dp_world_size == 1
    assert engine.mp_world_size == engine.autotp_size() == SIZE
    assert engine.mesh == {"pipe": 1, "data": 1, "tensor": SIZE}
    check(engine)


@pytest.mark.slow
def test_tp_model_init_cuts_as_initialize_does():
    run_processes(SIZE, begin_by_tp_model_init, preload=PRELOAD)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group=None):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group=None):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def halves(block, x, group=None):
    """A block of which each rank of the group has a slice."""
    hidden = F.gelu(block.up(_Copied.apply(block.norm(x), group)))
    return x + _Reduced.apply(F.linear(hidden, block.down.weight), group) + block.down.bias


class Megatron(models.TinyModel):
    """Its layers are cut by the program, which sums over its own group and marks the parameters as Megatron does."""

    def cut(self, rank):
        for block in self.h:
            self.cut_block(block, rank)
            block.forward = lambda x, block=block: self.run(block, x)

    @staticmethod
    def cut_block(block, rank):
        for parameter, dim in ((block.up.weight, 0), (block.up.bias, 0), (block.down.weight, 1)):
            part = parameter.shape[dim] // SIZE
            parameter.data = parameter.data.narrow(dim, rank * part, part).clone()
            parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1

    def run(self, block, x):
        return halves(block, x)


class Mpu:
    def __init__(self, shift=0):
        self.shift = shift

    def get_model_parallel_world_size(self):
        return SIZE

    def get_model_parallel_rank(self):
        return (dist.get_rank() + self.shift) % SIZE


class Recomputed(Megatron):
    """Backward computes its blocks again, from arguments that are kept."""

    def run(self, block, x):
        return deepspeed("training.checkpointing").checkpoint(lambda x: super(Recomputed, self).run(block, x), x)


def recomputed(in_parts, on_cpu=False, contiguous=False):
    """(losses, norms, (elements kept, elements of the whole) of each argument that is kept in a part)."""
    parts, plain = [], kept._Part

    class Part(plain):
        def __new__(cls, values, sums, shape, device, *row):
            parts.append((values.numel(), shape.numel()))
            assert bool(row) == contiguous and (not row or row[0] is not None)
            return plain(values, sums, shape, device, *row)

    kept._Part = Part
    deepspeed("training.checkpointing").configure(
        partition_activations=in_parts,
        checkpoint_in_cpu=on_cpu,
        contiguous_checkpointing=contiguous,
        num_checkpoints=8,
    )
    try:
        model = models.make_model(kind=Recomputed)
        model.cut(dist.get_rank())
        engine = deepspeed("initialize").initialize(model=model, config=models.config(2, micro=cut.MICRO), mpu=Mpu())[0]
        losses, norms = train(engine)
        engine.destroy()
    finally:
        kept._Part = plain
        deepspeed("training.checkpointing").configure(
            partition_activations=False, checkpoint_in_cpu=False, contiguous_checkpointing=False
        )
    return losses, norms, parts


def begin_in_parts():
    deepspeed("initialize").init_distributed()
    kept._LEAST = 1
    whole, in_parts, on_cpu = recomputed(False), recomputed(True), recomputed(True, on_cpu=True)
    assert whole[2] == []
    assert in_parts[:2] == whole[:2]
    assert on_cpu == in_parts == recomputed(True, contiguous=True)
    assert len(in_parts[2]) >= cut.STEPS  # an argument of each block in each step
    assert all(own == -(-numel // SIZE) for own, numel in in_parts[2])


@pytest.mark.costly
def test_ranks_keep_a_part_of_each_argument_of_a_checkpoint():
    run_processes(SIZE, begin_in_parts, preload=(*PRELOAD, "deeptide.tensor.kept"))


def begin_with_other_arguments():
    deepspeed("initialize").init_distributed()
    with kept.partitioned(make_team(SIZE)):
        x = torch.full((64, 64), float(dist.get_rank()), requires_grad=True)
        try:
            x.square()
        except ValueError as error:
            assert "shape (64, 64) that is kept for backward differs among the 2 ranks" in str(error)
        else:
            raise AssertionError("it took them for equal")
        alike, apart = torch.ones(64, 65, requires_grad=True), x.detach()[:, :1].expand(64, 65).clone().requires_grad_()
        alike.square().sum().backward()
        loss = apart.square().sum()  # no longer the first of its shape
    try:
        loss.backward()
    except ValueError as error:
        assert "shape (64, 65) that is kept for backward differs among the 2 ranks" in str(error)
    else:
        raise AssertionError("it took the second ones of a shape for equal")


def test_arguments_that_are_not_alike_are_refused_a_part():
    run_processes(SIZE, begin_with_other_arguments, preload=(*PRELOAD, "deeptide.tensor.kept"))


def begin_by_mpu(folder):
    deepspeed("initialize").init_distributed()
    model = models.make_model(kind=Megatron)
    model.cut(dist.get_rank())
    config = models.config(1, micro=cut.MICRO)
    engine = deepspeed("initialize").initialize(model=model, config=config, mpu=Mpu())[0]
    check(engine, Megatron)
    engine.save_checkpoint(folder)
    shapes = {name: tuple(value.shape) for name, value in engine.module_state_dict().items()}
    whole = {name: tuple(value.shape) for name, value in models.make_model().state_dict().items()}
    assert shapes == whole, set(shapes.items()) ^ set(whole.items())
    for given, text in ((object(), "expected an object as Megatron's mpu"), (Mpu(1), "groups of 2 neighbours")):
        try:
            deepspeed("initialize").initialize(model=models.make_model(), config=config, mpu=given)
        except deeptide.ConfigError as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)


@pytest.mark.costly
def test_a_model_with_an_mpu_trains_and_saves_the_whole_parameters(tmp_path):
    run_processes(SIZE, begin_by_mpu, str(tmp_path), preload=PRELOAD)
    world = deeptide.make_world(dist.HashStore(), 0, 1)
    model, config = models.make_model(seed=4), models.config(0, micro=cut.MICRO)
    engine = deeptide.initialize(model=model, config=config, world=world)[0]
    assert engine.load_checkpoint(str(tmp_path))[0] is not None
    assert engine.global_steps == cut.STEPS


def begin_by_autotp_beside_an_mpu():
    """Trains like DeepSpeed's own examples of AutoTP a plain model, whose layers the configuration lets ranks share."""
    deepspeed("initialize").init_distributed()
    config = {**models.config(1, micro=cut.MICRO), "tensor_parallel": {"autotp_size": SIZE}, "data_parallel_size": 1}
    config["tensor_parallel"]["partition_config"] = {"use_default_specs": False, "layer_specs": cut.SPECS}
    alone = Mpu()
    alone.get_model_parallel_world_size = lambda: 1
    text = "its model-parallel groups have 1 ranks, and the configuration asks for 2"
    with pytest.raises(deeptide.ConfigError, match=text):
        deepspeed("initialize").initialize(model=models.make_model(), config=config, mpu=alone)
    engine = deepspeed("initialize").initialize(model=models.make_model(), config=config, mpu=Mpu())[0]
    assert engine.module.h[0].up.weight.shape == (30, 20)
    check(engine)
    whole = engine._consolidated_16bit_state_dict()
    assert whole["h.0.up.weight"].shape == (60, 20) if dist.get_rank() == 0 else whole is None


@pytest.mark.slow
def test_a_plain_model_with_an_mpu_is_cut_where_the_configuration_asks_for_it():
    run_processes(SIZE, begin_by_autotp_beside_an_mpu, preload=PRELOAD)


class Strolling(Megatron):
    """Its ranks are seldom where the others are, and their groups of the layers wait for nobody else."""

    pair = None

    def run(self, block, x):
        time.sleep(self.pace.choice((0.0, 0.02)))
        return halves(block, x, self.pair)


def begin_strolling():
    """Every data rank trains on the same batches, so the whole model's numbers are theirs.

    In the first step nobody knows which units come next, and ranks tell each other most.
    """
    deepspeed("initialize").init_distributed()
    rank = dist.get_rank()
    Strolling.pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // SIZE]
    few = {"stage3_max_live_parameters": 1, "stage3_prefetch_bucket_size": 4000}
    config = models.config(3, micro=cut.MICRO, zero=few, deeptide={"comm_timeout": 10})
    for attempt in range(8):
        model = models.make_model(kind=Strolling)
        model.cut(rank % SIZE)
        model.pace = random.Random(4 * attempt + rank)
        engine = deepspeed("initialize").initialize(model=model, config=config, mpu=Mpu())[0]
        assert engine.mesh == {"pipe": 1, "data": 2, "tensor": 2}
        check(engine)
        engine.destroy()


def test_layers_of_own_groups_wait_in_no_circle_at_stage_3():
    run_processes(2 * SIZE, begin_strolling, preload=PRELOAD)


class StagesMpu(Mpu):
    """Knows two stages, which consecutive ranks share."""

    stages = 2

    def get_pipeline_model_parallel_world_size(self):
        return self.stages

    def get_pipeline_model_parallel_rank(self):
        return (dist.get_rank() + 2 * self.shift) // SIZE % self.stages


class MarkedBlock(models.Block):
    """One block whose layers a group of the program's shares."""

    group = None

    def cut(self, rank):
        Megatron.cut_block(self, rank)

    def forward(self, x):
        if self.group is None:
            return super().forward(x)
        return halves(self, x, self.group)


def staged(num_stages, group, topology=None):
    """A PipelineModule of blocks; of two stages, whose blocks are cut."""
    layers = [nn.Linear(6, 20), *(MarkedBlock(20) for _ in range(4)), nn.Linear(20, 5)]
    for number, layer in enumerate(layers):
        draws = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draws) / 4)
        if group is not None and isinstance(layer, MarkedBlock):
            layer.cut(dist.get_rank() % SIZE)
            layer.group = group
    loss = lambda output, labels: F.mse_loss(output, labels)  # noqa: E731
    world = None if num_stages > 1 else deeptide.make_world(dist.HashStore(), 0, 1)
    place = {"num_stages": num_stages} if topology is None else {"topology": topology}
    return PipelineModule(layers, **place, loss_fn=loss, world=world), world


def steps_of_stages(engine, reads=True):
    draws = torch.Generator().manual_seed(2)
    given = iter([(torch.randn(2, 6, generator=draws), torch.randn(2, 5, generator=draws)) for _ in range(6)])
    given = given if reads else None
    return [(engine.train_batch(given).item(), engine.get_global_grad_norm()) for _ in range(3)]


def begin_with_stages():
    deepspeed("initialize").init_distributed()
    group = [dist.new_group([first, first + 1]) for first in (0, 2)][dist.get_rank() // 2]
    config = models.config(1, gas=2)
    for shift, stages, text in (
        (0, 3, "its pipeline has 3 stages, and the model 2"),
        (1, 2, "expected [01]: consecutive"),
    ):
        wrong = StagesMpu(shift)
        wrong.stages = stages
        with pytest.raises(deeptide.ConfigError, match=text):
            deeptide.initialize(model=staged(2, group)[0], config=config, mpu=wrong)
    engine = deeptide.initialize(model=staged(2, group)[0], config=config, mpu=StagesMpu())[0]
    assert engine.mesh == {"pipe": 2, "data": 1, "tensor": 2}
    found = steps_of_stages(engine)
    model, world = staged(1, None)
    expected = steps_of_stages(deeptide.initialize(model=model, config=config, world=world)[0])
    cut.near(found, expected, 1e-5, "losses and norms")


@pytest.mark.costly
def test_an_mpu_tells_of_the_models_stages():
    run_processes(2 * SIZE, begin_with_stages, preload=(*PRELOAD, "deeptide.pipeline.engine"))


def begin_by_topology():
    """Without an mpu, as Megatron-DeepSpeed does. The first of the ranks that share layers alone reads batches."""
    deepspeed("initialize").init_distributed()
    groups = [dist.new_group([first, first + 1]) for first in (0, 2)]
    group, is_first = groups[dist.get_rank() // 2], dist.get_rank() % 2 == 0
    grid = deepspeed("pipe.topology").PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    engine = deeptide.initialize(model=staged(2, group, grid)[0], config=models.config(1, gas=2))[0]
    assert engine.mesh == {"pipe": 2, "data": 1, "tensor": 2}

    def shared(batch):
        batch = (torch.empty(2, 6), torch.empty(2, 5)) if batch is None else batch
        for tensor in batch:
            dist.broadcast(tensor, dist.get_rank() // 2 * 2, group=group)
        return batch

    with pytest.raises(ValueError, match=r"need an iterator|has no micro-batches"):
        engine.train_batch()
    engine.set_batch_fn(lambda batch: batch[0])
    with pytest.raises(ValueError, match=r"given None, raised TypeError|has no micro-batches"):
        engine.train_batch()
    engine.set_batch_fn(shared)
    model, world = staged(1, None)
    whole = deeptide.initialize(model=model, config=models.config(1, gas=2), world=world)[0]
    cut.near(steps_of_stages(engine, is_first), steps_of_stages(whole), 1e-5, "losses and norms")


@pytest.mark.costly
def test_a_topology_tells_who_shares_layers():
    run_processes(2 * SIZE, begin_by_topology, preload=(*PRELOAD, "deeptide.pipeline.engine"))


class Marked(nn.Module):
    """Parameters as Megatron marks them, and names them."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.q_layernorm = nn.Linear(4, 4), nn.LayerNorm(4), nn.LayerNorm(4)
        self.norm.weight.sequence_parallel, self.norm.bias.sequence_parallel = True, False
        self.up.weight.tensor_model_parallel, self.up.weight.partition_dim = True, 0

    def universal_checkpoint_info(self):
        return {"parameter_with_2_sub_params_cat_dim_0": [r"up\.weight"]}


def test_marks_tell_whose_gradients_add_up_and_which_slices_are_pairs():
    def rank(world):
        model = Marked()
        tall = Mpu()
        tall.get_model_parallel_rank = lambda: world.rank
        mpu.adopt(model, tall, world, 60.0)
        return list(adding_names(model)), dict(slices_of(model))

    for adding, slices in run_ranks(SIZE, rank):
        assert adding == ["norm.weight", "q_layernorm.weight", "q_layernorm.bias"]
        assert slices == {"up.weight": Slice(0, (4, 4))}


def test_a_marked_parameter_needs_its_dimension():
    layer = nn.Linear(4, 4)
    layer.weight.model_parallel = True
    with pytest.raises(deeptide.ConfigError, match="partition_dim is None; expected 0 or 1"):
        mpu._slice_of("weight", layer.weight, 2)


class Dropped(nn.Module):
    """Dropout of what ranks have alike, and of what each has for itself."""

    def forward(self, x):
        x = F.dropout(x, 0.5)
        with deepspeed("training.checkpointing").get_cuda_rng_tracker().fork():
            return F.dropout(x, 0.5)


def begin_by_seeds():
    checkpointing = deepspeed("training.checkpointing")
    deepspeed("initialize").init_distributed()
    checkpointing.configure(mpu_=Mpu())
    checkpointing.model_parallel_cuda_manual_seed(7)
    states = checkpointing.get_cuda_rng_tracker().get_states()
    assert torch.equal(
        states["model-parallel-rng"], torch.Generator().manual_seed(7 + 2718 + dist.get_rank()).get_state()
    )
    alike, own = torch.rand(4), torch.empty(4)
    with checkpointing.get_cuda_rng_tracker().fork():
        own.copy_(torch.rand(4))
    for drawn, equal in ((alike, True), (own, False)):
        others = [torch.empty(4) for _ in range(SIZE)]
        dist.all_gather(others, drawn)
        assert torch.equal(*others) == equal
    for run in (checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint):
        x = torch.ones(1000, requires_grad=True)
        out = run(Dropped(), x)
        out.sum().backward()
        assert torch.equal(x.grad, out.detach()), "backward drops what forward dropped"
    before = checkpointing.get_cuda_rng_tracker().get_states()["model-parallel-rng"]
    checkpointing.model_parallel_reconfigure_tp_seed(7)
    assert not torch.equal(before, checkpointing.get_cuda_rng_tracker().get_states()["model-parallel-rng"])
    assert torch.equal(
        states["model-parallel-rng"], checkpointing.get_cuda_rng_tracker().get_states()["model-parallel-rng"]
    )
    for wrong in (lambda tracker: tracker.add("model-parallel-rng", 1), lambda tracker: tracker.fork("x").__enter__()):
        try:
            wrong(checkpointing.get_cuda_rng_tracker())
        except ValueError as error:
            assert "RngTracker" in str(error)
        else:
            raise AssertionError("a name twice, or none")


def test_a_tracker_draws_alike_and_apart_and_backward_draws_again():
    run_processes(SIZE, begin_by_seeds, preload=PRELOAD)
