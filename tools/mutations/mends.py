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
    seed: int


MENDS = [
    Mend(
        "a message owns its bytes",
        f"{_PASSING}/letters.py",
        "tensor.detach().cpu() if is_own else _copied(tensor)",
        "tensor.detach().cpu()",
        ("stages", "hands_buffer", "layers"),
        7340,
    ),
    Mend(
        "a block may write into what its stage received",
        f"{_PASSING}/letters.py",
        "lambda tensor: apply(tensor) if tensor.requires_grad else tensor",
        "lambda tensor: tensor",
        ("stages", "in_place"),
        7780,
    ),
    Mend(
        "hooks of a value that skips blocks run once",
        "python/deeptide/pipeline/cutting/derivatives.py",
        "    value.register_hook = register  # type: ignore[method-assign]\n",
        "",
        ("stages", "hook", "skip"),
        9574,
    ),
    Mend(
        "shared buffers that a forward writes are refused",
        "python/deeptide/pipeline/cutting/shared_buffers.py",
        "if (now is None) != (value is None) or (now is not None and not torch.equal(now, value)):",
        "if False:",
        ("stages", "shared_norm"),
        7271,
    ),
    Mend(
        "micro-batches of first and last stage are compared",
        "python/deeptide/pipeline/step/batches.py",
        "            if part[other] != part[readers[0]]:\n",
        "            if False:\n",
        ("stages", "collated", "layers", "draws", "torch"),
        10297,
    ),
    Mend(
        "recomputation draws Python's and NumPy's numbers again",
        "python/deeptide/activations/again.py",
        "torch.utils.checkpoint.checkpoint(repeatable(function), *values, use_reentrant=False)",
        "torch.utils.checkpoint.checkpoint(function, *values, use_reentrant=False)",
        ("recompute", "draws", "block"),
        7372,
    ),
    Mend(
        "recomputation finds buffers as they were",
        "python/deeptide/activations/again.py",
        "with self._buffers.as_they_were(before), self._timed():",
        "with self._timed():",
        ("recompute", "counter"),
        7489,
    ),
    Mend(
        "gradients that are parts on each tensor rank add up",
        f"{_CUTTING}/check.py",
        "        add_up(model, verdict.name, team)\n",
        "",
        ("tensor", "head_norm"),
        7080,
    ),
    Mend(
        "the start's check compares gradients",
        f"{_CUTTING}/check.py",
        "    for verdict in verdicts:\n",
        "    for verdict in ():\n",
        ("tensor", "head_norm"),
        7080,
    ),
    Mend(
        "state_dict() of a part is refused",
        "python/deeptide/_engine/cut_models.py",
        "    elif part:\n",
        "    elif False:\n",
        ("tensor", "state_dict"),
        7336,
    ),
    Mend(
        "zero_grad() of a module drops what the engine took",
        "python/deeptide/_engine/idioms.py",
        "            _drop(_parameters_of(self))\n",
        "            pass\n",
        ("other_backward",),
        7420,
    ),
    Mend(
        "p.grad shows the engine's gradient",
        "python/deeptide/_engine/idioms.py",
        "        return _look(parameter) if _engines else None\n",
        "        return None\n",
        ("halve",),
        7155,
    ),
]
