# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of integers in files that Megatron and DeepSpeed read too, as numpy's arrays."""

from __future__ import annotations

import os
from typing import Any

import numpy
import torch

from deeptide import _C
from deeptide._C import ConfigError

DTYPES: dict[int, Any] = {
    1: numpy.uint8,
    2: numpy.int8,
    3: numpy.int16,
    4: numpy.int32,
    5: numpy.int64,
    6: numpy.uint16,
    7: numpy.uint32,
    8: numpy.uint64,
}
_TORCH = {torch.uint8: 1, torch.int8: 2, torch.int16: 3, torch.int32: 4, torch.int64: 5}
valid_dtypes = {*DTYPES.values(), *_TORCH}


def code(dtype: Any) -> int:
    """The code that files hold for a type of numpy's or torch's. Errors: ConfigError for one without a code."""
    if isinstance(dtype, torch.dtype):
        found = _TORCH.get(dtype, 0)
    else:
        found = next((number for number, known in DTYPES.items() if numpy.dtype(known) == numpy.dtype(dtype)), 0)
    if not found:
        raise ConfigError(f"indexed dataset: {dtype} is no type of its rows; give an integer type of at most 64 bits")
    return found


def find_fit_int_dtype(min_value: int, max_value: int) -> Any:
    """The smallest type of numpy's that holds both values; unsigned where the first is not negative."""
    return DTYPES[_C.smallest_row_type(int(min_value), int(max_value))]


def index_file_path(prefix_path: str) -> str:
    """The file of the rows."""
    return prefix_path + ".idx"


def data_file_path(prefix_path: str) -> str:
    """The file of the numbers."""
    return prefix_path + ".bin"


class MMapIndexedDataset(torch.utils.data.Dataset[Any]):
    """Row i as a numpy array, a slice as a list of them. `path`: without the suffix; skip_warmup has no effect."""

    def __init__(self, path: str, skip_warmup: bool = False) -> None:
        self._path = os.path.abspath(path)  # for workers that open it later
        self._rows = _C.IndexedDataset(self._path)
        self.dtype = DTYPES[self._rows.type_code]

    def __getstate__(self) -> str:
        return self._path

    def __setstate__(self, path: str) -> None:
        self.__init__(path)  # type: ignore[misc]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError("slices of an indexed dataset must be contiguous")
            return [self.get(row) for row in range(start, stop)]
        row = int(index)
        if row < 0:
            row += len(self)
        if not 0 <= row < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self.get(row)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Any:
        """`length` numbers of a row from `offset` on; all that follow without it. Read only."""
        row = numpy.frombuffer(self._rows.bytes(int(idx)), dtype=self.dtype)
        return row[offset:] if length is None else row[offset : offset + length]

    @property
    def sizes(self) -> Any:
        """The rows' lengths."""
        return numpy.frombuffer(self._rows.lengths(), dtype=numpy.int32)

    def size(self, index: int) -> int:
        """A row's length."""
        return int(self.sizes[index])

    @property
    def doc_idx(self) -> Any:
        """The rows at which documents begin."""
        return numpy.array(self._rows.documents(), dtype=numpy.int64)

    def get_doc_idx(self) -> Any:
        """The rows at which documents begin."""
        return self.doc_idx

    @property
    def supports_prefetch(self) -> bool:
        """Nothing has to be fetched: the files are mapped."""
        return False

    @staticmethod
    def exists(path: str) -> bool:
        """Whether both files are there."""
        return os.path.exists(index_file_path(path)) and os.path.exists(data_file_path(path))


class MMapIndexedDatasetBuilder:
    """Writes such files: rows, `end_document`, `finalize`. `out_file` ends in .bin."""

    def __init__(self, out_file: str, dtype: Any = numpy.int64) -> None:
        out_file = os.fspath(out_file)
        if not out_file.endswith(".bin"):
            raise ConfigError(f"indexed dataset: got out_file {out_file!r}, expected a name that ends in .bin")
        self._name = out_file[: -len(".bin")]
        self._dtype = DTYPES[code(dtype)]
        self._writer = _C.IndexedDatasetWriter(os.path.abspath(self._name), code(dtype))  # it writes the index at last

    def add_item(self, tensor: Any) -> None:
        """Adds a tensor or an array as one row."""
        self.add_item_numpy(tensor.numpy() if isinstance(tensor, torch.Tensor) else tensor)

    def add_items(self, arr_list: list[Any]) -> None:
        """Adds one row for each array."""
        for array in arr_list:
            self.add_item_numpy(array)

    def add_item_numpy(self, np_array: Any) -> None:
        """Adds an array as one row. Errors: ConfigError for a number that the type does not hold."""
        array = numpy.asarray(np_array)
        limits = numpy.iinfo(self._dtype)
        if array.size and (int(array.min()) < limits.min or int(array.max()) > limits.max):
            raise ConfigError(
                f"indexed dataset: {self._name}: numbers from {array.min()} to {array.max()} do not fit into "
                f"{numpy.dtype(self._dtype)}; build it with a larger type"
            )
        self._writer.add_bytes(array.astype(self._dtype).tobytes(order="C"))

    def end_document(self) -> None:
        """Ends a document after the last row."""
        self._writer.end_document()

    def merge_file_(self, another_file: str) -> None:
        """Appends the rows of other files, named without their suffix."""
        self._writer.append(os.fspath(another_file))

    def finalize(self, index_file: str | None = None) -> None:
        """Writes the index. `index_file` is the name beside the data's; another is an error."""
        if index_file is not None and os.fspath(index_file) != index_file_path(self._name):
            raise ConfigError(
                f"indexed dataset: got index file {index_file!r}, expected {index_file_path(self._name)!r}, beside "
                "the data"
            )
        self._writer.finish()


def write_rows(name: str, dtype: Any, rows: Any) -> None:
    """Writes files of one document. `rows`: an iterable of arrays."""
    builder = MMapIndexedDatasetBuilder(data_file_path(name), dtype)
    builder.add_items(list(rows))
    builder.end_document()
    builder.finalize()


def make_builder(out_file: str, impl: str = "mmap", vocab_size: int | None = None) -> MMapIndexedDatasetBuilder:
    """A builder whose type holds token ids below `vocab_size`. Errors: ConfigError for another `impl` than "mmap"."""
    if impl != "mmap":
        raise ConfigError(f"indexed dataset: got impl {impl!r}, expected 'mmap'; the older forms are not written here")
    small = vocab_size is not None and vocab_size < 65500
    return MMapIndexedDatasetBuilder(out_file, numpy.uint16 if small else numpy.int32)


def make_dataset(path: str, impl: str = "mmap", skip_warmup: bool = False) -> MMapIndexedDataset:
    """The files at `path`. Errors: ConfigError if they are missing, or of another `impl` than "mmap" or "infer"."""
    if impl not in ("mmap", "infer"):
        raise ConfigError(f"indexed dataset: got impl {impl!r}, expected 'mmap' or 'infer'")
    return MMapIndexedDataset(path, skip_warmup)
