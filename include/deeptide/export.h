// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Marks what the shared library exports: every function and class of these headers whose code is in the library.
#pragma once

#if defined(__GNUC__)
#define DEEPTIDE_API __attribute__((visibility("default")))
#else
#define DEEPTIDE_API
#endif
