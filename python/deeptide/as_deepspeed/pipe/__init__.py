# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deepspeed.runtime.pipe, but for the module of layers, which is `deeptide.pipeline`'s."""
