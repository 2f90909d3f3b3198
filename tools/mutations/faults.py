# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Deliberate faults, and tests of `make test` that notice each; `make mutations` tries them all."""

from typing import NamedTuple


class Fault(NamedTuple):
    """One replacement in one file, where the old text occurs once. Each of `tests` must fail with it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


FAULTS = [
    Fault(
        name="division by micro-batches left out",
        file="src/engine/design/design.cc",
        old="1.0 / static_cast<double>(batch.accumulation * row->divisor)",
        new="1.0 / static_cast<double>(row->divisor)",
        tests=("tests/python/engine/test_stages.py::test_stage_trains_as_plain_torch",),
    ),
    Fault(
        name="a tie's sum dropped",
        file="python/deeptide/pipeline/cutting/ties.py",
        old="sums = [_added(held, new) for held, new in zip(sums, got, strict=True)]",
        new="sums = [held for held, new in zip(sums, got, strict=True)]",
        tests=("tests/python/pipeline/test_pipeline.py::test_tied_weights_are_one_parameter_on_all_stages",),
    ),
    Fault(
        name="a replicated gradient counted twice",
        file="python/deeptide/tensor/functions.py",
        old="""        return team.core.all_reduce(x, "forward")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None""",
        new="""        return team.core.all_reduce(x, "forward")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return 2 * gradient, None""",
        tests=("tests/python/tensor/test_tensor_training.py::test_a_shared_model_trains_as_the_whole_one",),
    ),
    Fault(
        name="generators swapped",
        file="python/deeptide/pipeline/passing/relay.py",
        old="random_numbers.set_states(own)",
        new="random_numbers.set_states(random_numbers.states())",
        tests=(
            "tests/python/pipeline/everywhere/test_generate.py::test_stages_sample_the_uncut_models_tokens_with_dropout_and_keep_their_generators",
        ),
    ),
    Fault(
        name="a mask of another micro-batch",
        file="python/deeptide/pipeline/step/stage_run.py",
        old="inputs = self._batches[micro_batch][0] if self._batches else None",
        new="inputs = self._batches[0][0] if self._batches else None",
        tests=(
            "tests/python/pipeline/partition/test_any_model.py::test_a_model_as_it_is_trains_as_the_uncut_one_bit_for_bit",
        ),
    ),
    Fault(
        name="a stale buffer",
        file="python/deeptide/pipeline/step/undo.py",
        old="module._buffers[name] = value.copy_(held)",
        new="module._buffers[name] = value",
        tests=("tests/python/pipeline/partition/test_values_that_skip.py",),
    ),
    Fault(
        name="half a gradient",
        file="python/deeptide/tensor/entry.py",
        old='self.sum = self.team.core.start_all_reduce(gradient, "backward")',
        new='self.sum = self.team.core.start_all_reduce(gradient / self.team.size, "backward")',
        tests=("tests/python/tensor/test_tensor_training.py::test_a_shared_model_trains_as_the_whole_one",),
    ),
    Fault(
        name="a moment's order permuted on import",
        file="src/checkpoint/imports/deepspeed_partitions.cc",
        old="const ForeignElements elements{rank.file, rank.name, tensor, first};",
        new="const ForeignElements elements{rank.file, rank.name, tensor, role == Role::master() ? first : 0};",
        tests=("tests/python/checkpoint/imports/test_moved_runs.py::test_a_run_moves_over_in_its_middle",),
    ),
    Fault(
        name="the wrong group's hyper-parameters",
        file="src/zero/steps/rule_step.cc",
        old="tools_.rule().step(segment, pass.hyper(run), pass.terms(run));",
        new="tools_.rule().step(segment, pass.groups.at(0), pass.terms(run));",
        tests=("tests/python/optim/test_optimizers.py::test_each_group_steps_by_its_own_values",),
    ),
    Fault(
        name="a boundary off by one",
        file="src/engine/step/stepper.cc",
        old="(parts_.progress.micro_steps + 1) % parts_.batch.accumulation == 0",
        new="parts_.progress.micro_steps % parts_.batch.accumulation == 0",
        tests=("tests/python/engine/test_stages.py::test_stage_trains_as_plain_torch",),
    ),
    Fault(
        name="a scale not agreed",
        file="src/engine/step/across_stages.cc",
        old="    all.squares += each.squares;",
        new="    all.squares = own.squares;",
        tests=(
            "tests/python/pipeline/test_pipeline.py::test_all_stages_skip_a_step_and_name_what_one_found",
            "tests/python/pipeline/test_pipeline.py::test_clipping_takes_the_norm_of_all_stages",
        ),
    ),
    Fault(
        name="a lost partial sum",
        file="python/deeptide/pipeline/cutting/ties.py",
        old="self.sums[index] = gradient if held is None else held.add_(gradient)",
        new="self.sums[index] = gradient if held is None else gradient",
        tests=("tests/python/pipeline/test_pipeline.py::test_tied_weights_are_one_parameter_on_all_stages",),
    ),
]
