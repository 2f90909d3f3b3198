# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Text as training samples: the bytes of a file or a folder, cut into windows of one length. corpus.cc is its twin."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

MAX_BYTES = 32 << 20
HELD_OUT = 0.05
# No text of the library itself, or tables of numbers.
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}


def standard_library() -> Path:
    """The source of Python's own standard library: real text that every machine with Python has."""
    return Path(sysconfig.get_path("stdlib"))


def text_files(root: Path) -> list[Path]:
    """A file itself, or a folder's visible files in the order of their paths' bytes."""
    if not root.is_dir():
        return [root]
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS and not name.startswith(".")]
        paths = (Path(folder, name) for name in names if not name.startswith("."))
        found += [path for path in paths if path.is_file()]
    return sorted(found, key=lambda path: os.fsencode(path.relative_to(root)))


def read_text(root: Path) -> bytes:
    """All text below `root`, at most MAX_BYTES; a file with a zero byte near its start is no text."""
    if not root.exists():
        raise FileNotFoundError(f"no text to learn from: {root} does not exist; give --data a file or a folder")
    text = bytearray()
    for path in text_files(root):
        content = path.read_bytes()
        if b"\0" not in content[:4096]:
            text += content
        if len(text) >= MAX_BYTES:
            break
    return bytes(text[:MAX_BYTES])


class Windows:
    """Sample i is (bytes, the same bytes one later), both of length `context`."""

    def __init__(self, text: bytes, context: int) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return max(len(self.bytes) - 1, 0) // self.context

    def batch(self, indices: list[int], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        starts = torch.tensor(indices)[:, None] * self.context
        window = self.bytes[starts + torch.arange(self.context + 1)].long().to(device)
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def load_corpus(data: str | None, context: int) -> tuple[Windows, Windows]:
    """The text to learn from, and the last part, held out. `data`: a file or folder; None: the standard library."""
    root = Path(data) if data else standard_library()
    text = read_text(root)
    cut = int(len(text) * (1 - HELD_OUT))
    train, held_out = Windows(text[:cut], context), Windows(text[cut:], context)
    if not len(held_out):
        raise ValueError(f"{root} holds {len(text)} bytes of text, expected at least {int(2 * context / HELD_OUT)}")
    return train, held_out
