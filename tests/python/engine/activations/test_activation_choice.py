# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The choice of blocks to recompute, beside all choices there are, and beside a step that is played through."""

import itertools
import random

import pytest

from deeptide.activations.choice import Choice, Measured, alike, choose, peak, size


def played(blocks, again, outside, live):
    """The most that is held while forwards and backwards of `live` micro-batches pass, block by block."""
    held = most = 0
    for _ in range(live):
        held += outside
        for block, redone in zip(blocks, again, strict=True):
            held += block.input_bytes + (0 if redone else block.bytes)
    most = held
    for block, redone in reversed(list(zip(blocks, again, strict=True))):
        if redone:
            most = max(most, held + block.bytes)
        else:
            held -= block.bytes
    return most


def drawn(draw, count):
    return [
        Measured(
            draw.choice([10, 40, draw.randint(1, 90)]), draw.randint(0, 9), draw.choice([1, 3, draw.randint(1, 9)])
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(60))
def test_the_choice_is_the_best_of_all(seed):
    draw = random.Random(seed)
    blocks, outside, live = drawn(draw, draw.randint(1, 8)), draw.randint(0, 30), draw.choice([1, 1, 2, 3])
    every = list(itertools.product([False, True], repeat=len(blocks)))
    peaks = {again: peak(blocks, again, outside, live) for again in every}
    assert all(peaks[again] == played(blocks, again, outside, live) for again in every)
    least, most = min(peaks.values()), max(peaks.values())
    for budget in (least - 1, least, draw.randint(least, most)):
        found = choose(blocks, outside, live, budget)
        fitting = [again for again in every if peaks[again] <= budget]
        if peaks[every[-1]] > budget:
            assert found is None
            continue

        def time(again):
            return sum(block.nanoseconds for block, redone in zip(blocks, again, strict=True) if redone)

        assert peaks[tuple(found)] <= budget
        least = min(map(time, fitting))
        assert time(found) == least if live == 1 else time(found) <= (least + time(every[-1])) / 2


def test_of_equal_blocks_the_first_are_recomputed():
    blocks = [Measured(100, 10, 5)] * 6
    assert choose(blocks, 0, 1, 60 + 300) == [True, True, True, False, False, False]
    assert choose(blocks, 0, 1, 60 + 600) == [False] * 6
    # Another order needs more: the last one would be whole beside all that is kept.
    assert peak(blocks, [False] * 3 + [True] * 3, 0, 1) == 60 + 400


def test_many_blocks_are_chosen_in_no_time():
    draw = random.Random(1)
    blocks = [Measured(draw.randint(1, 10**9), 10**6, draw.randint(10**5, 10**8)) for _ in range(200)]
    whole = peak(blocks, [False] * 200, 0, 4)
    found = choose(blocks, 0, 4, whole // 2)
    assert peak(blocks, found, 0, 4) <= whole // 2 and 60 < sum(found) < 140


def test_noise_in_times_is_no_difference():
    blocks = [Measured(100, 1, 7), Measured(100, 1, 9), Measured(50, 1, 2), Measured(100, 1, 1000)]
    assert [block.nanoseconds for block in alike(blocks, ["a", "a", "a", "a"])] == [9, 9, 2, 9]
    assert [block.nanoseconds for block in alike(blocks, ["a", "b", "a", "a"])] == [7, 9, 2, 7]


def test_a_choice_says_itself():
    chosen = Choice("auto", ["h.0", "h.1", "h.2"], ["h.0"], 3 << 20, 2 << 20, 4 << 20, 1 << 20, 0.0125)
    assert str(chosen) == (
        "activations: 1 of 3 blocks are recomputed (h.0), 12.5 ms a micro-batch: 2.00 MiB of the 3.00 MiB allowed; "
        "without recomputation 4.00 MiB"
    )
    assert [size(count) for count in (None, 5, 2048, 3 << 30)] == ["0 bytes", "5 bytes", "2.00 KiB", "3.00 GiB"]
