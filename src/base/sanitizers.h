// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// DEEPTIDE_SANITIZED: a sanitizer has an allocator and shadow memory of its own. gcc and clang say so differently.
#pragma once

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define DEEPTIDE_SANITIZED
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define DEEPTIDE_SANITIZED
#endif
#endif
