// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs a kernel's body for each index, or for groups of 32 lanes: on a GPU where nvcc or hipcc reads this, elsewhere on
// the host in the same geometry, so that tests run the bodies without a GPU.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__) || defined(__HIPCC__)
#include <stdexcept>
#include <string>

#define DEEPTIDE_ON_DEVICE 1
#define DEEPTIDE_HOST_DEVICE __host__ __device__ __forceinline__
/// Before a loop of known length: an array that it indexes then lies in registers.
#define DEEPTIDE_UNROLLED _Pragma("unroll")
/// The namespace of a file's kernels: both forms of the file may be in one program.
#define DEEPTIDE_KERNELS device_kernels
#else
#define DEEPTIDE_HOST_DEVICE inline
#define DEEPTIDE_UNROLLED
#define DEEPTIDE_KERNELS host_kernels
#endif

namespace deeptide::numerics::kernel {

constexpr int kThreads = 256;  // per block
constexpr int kLanes = 32;     // per group
constexpr int kGroups = kThreads / kLanes;
constexpr int kQuarter = 8;  // lanes of a group that one thread takes, so that a group has four threads
constexpr int kQuarters = kLanes / kQuarter;
constexpr int kWideGroups = kThreads / kQuarters;
#ifdef DEEPTIDE_ON_DEVICE
constexpr int64_t kMostBlocks = 1 << 20;
#else
constexpr int64_t kMostBlocks = 3;  // so that tests come to every loop's second round
#endif

/// Blocks that cover `count` items, `per_block` at a time.
inline int64_t num_blocks(int64_t count, int64_t per_block) {
  const int64_t blocks = (count + per_block - 1) / per_block;
  return blocks < kMostBlocks ? blocks : kMostBlocks;
}

/// A thread's position in the grid.
struct Place {
  int64_t block;
  int64_t blocks;
  int thread;
};

/// The indices below `count` that belong to the thread at `place`.
template <typename Body>
DEEPTIDE_HOST_DEVICE void each_index(const Place& place, int64_t count, const Body& body) {
  const int64_t stride = place.blocks * kThreads;
  for (int64_t i = place.block * kThreads + place.thread; i < count; i += stride) body(i);
}

#ifdef DEEPTIDE_ON_DEVICE

__device__ __forceinline__ Place own_place() {
  return {static_cast<int64_t>(blockIdx.x), static_cast<int64_t>(gridDim.x), static_cast<int>(threadIdx.x)};
}

template <typename Body>
__global__ void __launch_bounds__(kThreads) index_kernel(int64_t count, Body body) {
  each_index(own_place(), count, body);
}

template <typename Body>
__global__ void __launch_bounds__(kThreads) group_kernel(int64_t count, Body body) {
  __shared__ double lanes[kGroups][kLanes];
  const Place place = own_place();
  const int row = place.thread / kLanes, lane = place.thread % kLanes;
  // All threads of a block go as many rounds, since they meet in each.
  for (int64_t first = place.block * kGroups; first < count; first += place.blocks * kGroups) {
    const int64_t group = first + row;
    if (group < count) lanes[row][lane] = body.lane(group, lane);
    __syncthreads();
    if (group < count && lane == 0) body.fold(group, lanes[row]);
    __syncthreads();
  }
}

template <typename Body>
__global__ void __launch_bounds__(kThreads) quarter_kernel(int64_t count, Body body) {
  __shared__ double lanes[kWideGroups][kLanes + 1];  // rows begin in different banks
  const Place place = own_place();
  const int row = place.thread / kQuarters, quarter = place.thread % kQuarters;
  for (int64_t first = place.block * kWideGroups; first < count; first += place.blocks * kWideGroups) {
    const int64_t group = first + row;
    if (group < count) {
      double own[kQuarter];
      body.quarter(group, quarter, own);
      DEEPTIDE_UNROLLED for (int k = 0; k < kQuarter; ++k) lanes[row][quarter * kQuarter + k] = own[k];
    }
    __syncthreads();
    if (group < count && quarter == 0) body.fold(group, lanes[row]);
    __syncthreads();
  }
}

/// Errors: std::runtime_error when the launch before was refused.
inline void check_launch() {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("deeptide: the GPU refused a kernel: ") + cudaGetErrorString(error));
  }
}

/// Whether this program's kernels have code for the current device, and its driver takes them.
template <typename Body>
bool is_runnable() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&index_kernel<Body>));
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());  // or the next call would report it
  return error == cudaSuccess;
}

/// body(i) for each i below `count`. `stream`: the device's own handle.
template <typename Body>
void launch_each(void* stream, int64_t count, const Body& body) {
  if (count == 0) return;
  const auto blocks = static_cast<unsigned>(num_blocks(count, kThreads));
  index_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(count, body);
  check_launch();
}

/// body.fold(group, lanes) for each group below `count`; lanes[l] is body.lane(group, l).
template <typename Body>
void launch_groups(void* stream, int64_t count, const Body& body) {
  if (count == 0) return;
  const auto blocks = static_cast<unsigned>(num_blocks(count, kGroups));
  group_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(count, body);
  check_launch();
}

/// The same, by four threads a group: body.quarter(group, q, lanes) gives the eight lanes from 8 q on.
template <typename Body>
void launch_quarters(void* stream, int64_t count, const Body& body) {
  if (count == 0) return;
  const auto blocks = static_cast<unsigned>(num_blocks(count, kWideGroups));
  quarter_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(count, body);
  check_launch();
}

#else

template <typename Body>
bool is_runnable() {
  return true;
}

/// Later blocks and threads first: no result may depend on their order.
template <typename Body>
void launch_each(void* /*stream*/, int64_t count, const Body& body) {
  const int64_t blocks = num_blocks(count, kThreads);
  for (int64_t block = blocks - 1; block >= 0; --block) {
    for (int thread = kThreads - 1; thread >= 0; --thread) each_index({block, blocks, thread}, count, body);
  }
}

template <typename Body>
void launch_groups(void* /*stream*/, int64_t count, const Body& body) {
  const int64_t blocks = num_blocks(count, kGroups);
  for (int64_t block = blocks - 1; block >= 0; --block) {
    for (int64_t first = block * kGroups; first < count; first += blocks * kGroups) {
      for (int64_t group = first; group < count && group < first + kGroups; ++group) {
        double lanes[kLanes];
        for (int lane = kLanes - 1; lane >= 0; --lane) lanes[lane] = body.lane(group, lane);
        body.fold(group, lanes);
      }
    }
  }
}

template <typename Body>
void launch_quarters(void* /*stream*/, int64_t count, const Body& body) {
  for (int64_t group = count - 1; group >= 0; --group) {
    double lanes[kLanes];
    for (int quarter = kQuarters - 1; quarter >= 0; --quarter) {
      body.quarter(group, quarter, lanes + static_cast<ptrdiff_t>(quarter) * kQuarter);
    }
    body.fold(group, lanes);
  }
}

#endif

}  // namespace deeptide::numerics::kernel
