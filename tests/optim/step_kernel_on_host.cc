// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The kernel's bodies as host code: host_kernels::step.
#include "optim/updates/step_kernel.cu"
