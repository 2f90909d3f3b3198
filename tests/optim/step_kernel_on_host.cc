// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The kernels' bodies as host code: host_kernels::step, host_kernels::lamb.
#include "optim/kernels/lamb_kernel.cu"
#include "optim/kernels/step_kernel.cu"
