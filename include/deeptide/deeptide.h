// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The whole public C++ interface.
#pragma once

#include "deeptide/allocator.h"
#include "deeptide/autocast.h"
#include "deeptide/config.h"
#include "deeptide/data.h"
#include "deeptide/engine.h"
#include "deeptide/errors.h"
#include "deeptide/gathered_parameters.h"
#include "deeptide/ops.h"
#include "deeptide/version.h"
#include "deeptide/weights.h"
#include "deeptide/world.h"
#include "deeptide/zero.h"
