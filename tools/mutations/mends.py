# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Code without which a legitimate model trains to other numbers; `make mutations ARGS=--mends` takes each out.

`tests/fuzz --models` must find each fault within ten minutes. seed: of a program that shows it.
"""

from typing import NamedTuple

_PASSING = "python/deeptide/pipeline/passing"
_CUTTING = "python/deeptide/tensor/cutting"


class Mend(NamedTuple):
    """One replacement in one file, where the old text occurs once.

    having: what programs have that may show it, in words of the fuzzer's --having. seed: of one that does.
    """

    name: str
    file: str
    old: str
    new: str
    having: tuple[str, ...]
    seed: int | None


MENDS = [
    Mend(
        "float masks of stages are compared",
        f"{_PASSING}/passage.py",
        "if not are_alike(theirs[1:4], own[1:4]):",
        "if False:",
        ("stages", "mask", "float32", "returned"),
        None,
    ),
    Mend(
        "arguments of blocks on both sides of a border are compared",
        f"{_PASSING}/passage.py",
        "if isinstance(theirs, int) or not is_alike or theirs[0] != own[0]:",
        "if isinstance(theirs, int):",
        ("stages", "mask", "returned"),
        None,
    ),
    Mend(
        "torch's numbers between blocks are refused",
        f"{_PASSING}/passage.py",
        "            self._guard.begin()\n",
        "",
        ("stages", "draws", "shared", "torch"),
        None,
    ),
    Mend(
        "Python's and NumPy's numbers between blocks are compared",
        f"{_PASSING}/passage.py",
        "if own[4] != self._drawn and own[4] != theirs[4]:",
        "if False:",
        ("stages", "draws", "shared", "python"),
        None,
    ),
    Mend(
        "a settled kind opens again",
        f"{_PASSING}/passage.py",
        "return self._lacks and not self._skips.is_open()",
        "return False",
        ("stages", "auxiliary"),
        None,
    ),
    Mend(
        "a message owns its bytes",
        f"{_PASSING}/letters.py",
        "tensor.detach().cpu() if is_own else _copied(tensor)",
        "tensor.detach().cpu()",
        ("stages", "hands_buffer", "layers"),
        None,
    ),
    Mend(
        "a block may write into what its stage received",
        f"{_PASSING}/letters.py",
        "lambda tensor: apply(tensor) if tensor.requires_grad else tensor",
        "lambda tensor: tensor",
        ("stages", "in_place"),
        None,
    ),
    Mend(
        "a value that is written on its way to a later stage is refused",
        f"{_PASSING}/skips.py",
        "            if version_of(tensor) != version:\n",
        "            if False:\n",
        ("stages", "skip", "in_place"),
        None,
    ),
    Mend(
        "hooks of a value that skips blocks run once",
        "python/deeptide/pipeline/cutting/derivatives.py",
        "    value.register_hook = register  # type: ignore[method-assign]\n",
        "",
        ("stages", "hook"),
        None,
    ),
    Mend(
        "derivatives over a stage's border are refused",
        "python/deeptide/pipeline/cutting/derivatives.py",
        "if received and not (inputs and all(self._is_complete(tensor, received) for tensor in inputs)):",
        "if False:",
        ("stages", "grad_inside"),
        None,
    ),
    Mend(
        "shared buffers that a forward writes are refused",
        "python/deeptide/pipeline/cutting/shared_buffers.py",
        "if (now is None) != (value is None) or (now is not None and not torch.equal(now, value)):",
        "if False:",
        ("stages", "shared_norm"),
        None,
    ),
    Mend(
        "micro-batches of first and last stage are compared",
        "python/deeptide/pipeline/step/batches.py",
        "            if part[other] != part[readers[0]]:\n",
        "            if False:\n",
        ("stages", "collated", "layers"),
        None,
    ),
    Mend(
        "recomputation draws Python's and NumPy's numbers again",
        "python/deeptide/activations/again.py",
        "torch.utils.checkpoint.checkpoint(repeatable(function), *values, use_reentrant=False)",
        "torch.utils.checkpoint.checkpoint(function, *values, use_reentrant=False)",
        ("recompute", "draws", "block"),
        None,
    ),
    Mend(
        "recomputation finds buffers as they were",
        "python/deeptide/activations/again.py",
        "with self._buffers.as_they_were(before), self._timed():",
        "with self._timed():",
        ("recompute", "counter"),
        None,
    ),
    Mend(
        "gradients that are parts on each tensor rank add up",
        f"{_CUTTING}/check.py",
        "        add_up(model, verdict.name, team)\n",
        "",
        ("tensor", "head_norm"),
        None,
    ),
    Mend(
        "the start's check compares gradients",
        f"{_CUTTING}/check.py",
        "    for verdict in verdicts:\n",
        "    for verdict in ():\n",
        ("tensor", "head_norm"),
        None,
    ),
    Mend(
        "tensor ranks draw alike",
        "python/deeptide/tensor/axis.py",
        "        _draw_alike(team)\n",
        "        pass\n",
        ("tensor", "draws"),
        None,
    ),
    Mend(
        "state_dict() of a part is refused",
        "python/deeptide/_engine/cut_models.py",
        "    elif part:\n",
        "    elif False:\n",
        ("tensor", "state_dict"),
        None,
    ),
    Mend(
        "zero_grad() of a module drops what the engine took",
        "python/deeptide/_engine/idioms.py",
        "            _drop(_parameters_of(self))\n",
        "            pass\n",
        ("other_backward",),
        None,
    ),
    Mend(
        "p.grad shows the engine's gradient",
        "python/deeptide/_engine/idioms.py",
        "        return _look(parameter) if _engines else None\n",
        "        return None\n",
        ("halve",),
        None,
    ),
    Mend(
        "a save in a handler is the last boundary",
        "src/engine/state/save.cc",
        "  if (within) restore_last_boundary(loose.buffers);\n",
        "",
        ("counter", "interrupt_accumulation"),
        None,
    ),
]
