# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Archives of checkpoints that DeepSpeed itself saved."""

import tarfile


def unpack(archive_path, folder):
    with tarfile.open(archive_path) as archive:
        if hasattr(tarfile, "data_filter"):  # not in the first versions of Python 3.11
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(folder)
    return folder
