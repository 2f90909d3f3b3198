# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Runs `deeptide checkpoint import`: what others saved into Deeptide's form, without model or group."""

from __future__ import annotations

import argparse
import sys

from deeptide._C import CheckpointError
from deeptide._model.weights import import_checkpoint


def main(arguments: list[str] | None = None) -> int:
    """Converts, prints the new folder and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="deeptide checkpoint import",
        description="Writes a checkpoint of DeepSpeed (ZeRO stages 0 to 3, pipelines, or universal), or weights of "
        "Hugging Face, in Deeptide's form. load_checkpoint reads either as it is, too.",
    )
    parser.add_argument(
        "source", help="the folder that DeepSpeed's save_checkpoint or save_pretrained was given, or a file"
    )
    parser.add_argument("directory", help="where to write: a folder of tags, as save_checkpoint is given")
    parser.add_argument(
        "-t", "--tag", default="", help="the checkpoint in source; without it the one of latest_universal or latest"
    )
    parser.add_argument(
        "--as",
        dest="new_tag",
        default="",
        metavar="TAG",
        help="its tag in directory; the same as there, of weights 'weights'",
    )
    options = parser.parse_args(arguments)
    try:
        print(import_checkpoint(options.source, options.directory, options.tag, options.new_tag))
    except CheckpointError as error:
        print(f"deeptide checkpoint import: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
