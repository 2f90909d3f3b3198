// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The whole public C++ interface.
#pragma once

#include "deeptide/allocator.h"
#include "deeptide/autocast.h"
#include "deeptide/batches.h"
#include "deeptide/checkpoint.h"
#include "deeptide/config.h"
#include "deeptide/curriculum.h"
#include "deeptide/curriculum_sampler.h"
#include "deeptide/data.h"
#include "deeptide/engine.h"
#include "deeptide/errors.h"
#include "deeptide/gathered_parameters.h"
#include "deeptide/indexed_dataset.h"
#include "deeptide/length_batches.h"
#include "deeptide/ops.h"
#include "deeptide/packing.h"
#include "deeptide/pipeline.h"
#include "deeptide/pipeline_schedule.h"
#include "deeptide/profiler.h"
#include "deeptide/reports.h"
#include "deeptide/snapshot.h"
#include "deeptide/version.h"
#include "deeptide/weights.h"
#include "deeptide/world.h"
#include "deeptide/zero.h"
