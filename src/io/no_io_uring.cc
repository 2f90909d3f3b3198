// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Replaces io_uring.cc and queue_io_uring.cc in a build without liburing.
#include <stdexcept>

#include "io/io_engine.h"
#include "io/queue.h"

namespace deeptide::io {

void transfer_by_io_uring(const Pass&) { throw std::logic_error(io_uring_obstacle()); }

std::string io_uring_obstacle() { return "this build has no liburing"; }

bool has_io_uring() { return false; }

std::unique_ptr<Queue> make_ring_queue(int, int (*)()) { return nullptr; }

}  // namespace deeptide::io
