# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Errors of pipelines."""


class PipelineError(RuntimeError):
    """A method of an engine that a stage of a pipeline does not have, or a model that cannot be cut into stages."""
