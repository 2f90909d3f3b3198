// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The kernel's bodies as host code: host_kernels::sum, host_kernels::copy.
#include "numerics/kernels/copy_kernel.cu"
#include "numerics/sums/sum_kernel.cu"
