# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Tells scikit-build-core what a wheel needs: numpy, and the minor version of torch that it is built against."""

from importlib.metadata import version


def dynamic_metadata(field: str, settings: dict[str, object]) -> list[str]:
    """The project's dependencies."""
    if field != "dependencies" or settings:
        raise ValueError(f"wheel_dependencies gives dependencies and takes no settings; got {field}, {settings}")
    minor = ".".join(version("torch").split(".")[:2])
    return [f"torch=={minor}.*", "numpy"]


def get_requires_for_dynamic_metadata(settings: dict[str, object]) -> list[str]:
    """The needs of this file besides the build requirements: none."""
    return []
