// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The differences between torch's minor versions, 2.9 to 2.13: all that this library needs to know of them.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <torch/version.h>

#include <cstdint>
#include <mutex>
#include <vector>

#include "base/invariant.h"

namespace deeptide::device {

namespace versions {

// Private before 2.13 as after it; an explicit instantiation may name it.
template <auto Member>
struct Flag {
  friend constexpr auto throws_on_access() { return Member; }
};
constexpr auto throws_on_access();
template struct Flag<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

}  // namespace versions

/// Ends what release_data_and_set_meta_custom_data_ptr_error_msg_ began: the data may be accessed again. Call it before
/// set_data_ptr_noswap, which looks at it.
template <typename Storage>
void allow_data_access(Storage& storage) {
  if constexpr (requires { storage.clear_data_ptr_access_error_msg_(); }) {
    storage.clear_data_ptr_access_error_msg_();
  } else {  // before 2.13
    storage.*versions::throws_on_access() = false;
  }
}

/// Put it before a boxed call whose stack may hold the only references to its arguments; RAII. Before 2.13, a kernel
/// that returns several of them (`out`) drops the arguments from the stack first, and copies its results afterwards.
class KeptArguments {
 public:
  explicit KeptArguments(const std::vector<c10::IValue>& stack) : kept_(stack) {}
  KeptArguments(const KeptArguments&) = delete;

 private:
  const std::vector<c10::IValue> kept_;
};

namespace versions {

// Belongs to torch's C interface, which stays the same; only a build for CUDA or ROCm has it. 0 is success.
extern "C" __attribute__((weak)) int32_t aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

template <typename Stream>
constexpr bool kStreamsTell = requires(const Stream& stream) { stream.native_handle(); };

}  // namespace versions

/// Whether native_handle has an answer on GPUs. Where it has none, no kernel of ours can follow torch's order of work.
inline bool tells_native_handles() {
  if constexpr (versions::kStreamsTell<c10::Stream>) {
    return true;
  } else {  // before 2.11
    return versions::aoti_torch_get_current_cuda_stream != nullptr;
  }
}

/// The stream as its device's own interface has it: a cudaStream_t, which is null for the default stream.
/// Error: DEEPTIDE_INVARIANT if tells_native_handles() is false.
template <typename Stream>
void* native_handle(const Stream& stream) {
  if constexpr (versions::kStreamsTell<Stream>) {
    return stream.native_handle();
  } else {  // before 2.11 torch tells the current one's only
    DEEPTIDE_INVARIANT(tells_native_handles(), "a kernel asks this torch for a stream");
    const c10::StreamGuard current(stream);
    void* handle = nullptr;
    const int32_t failure = versions::aoti_torch_get_current_cuda_stream(stream.device_index(), &handle);
    DEEPTIDE_INVARIANT(failure == 0, "torch does not tell the current stream of ", stream.device());
    return handle;
  }
}

/// The tensors that use a storage. With torch 2.13, an object of Python's that once showed the storage counts as one
/// more, for as long as the storage lives.
inline size_t num_users(const c10::Storage& storage) {
  const auto is_shown = [](const auto& slot) {
    if constexpr (requires { slot.load_pyobj(); }) {
      return slot.load_pyobj() != nullptr;
    } else {  // before: either of the two owns the other
      return false;
    }
  };
  return storage.use_count() - (is_shown(*storage.unsafeGetStorageImpl()->pyobj_slot()) ? 1 : 0);
}

/// Whether threads may start Gloo's collectives at once. Up to 2.11, torch's flight recorder looks the group up in a
/// map of all the process's groups, and enters it there, before it takes its lock: the map broke. 2.12.1 takes the lock
/// first; a build for 2.12 may run with 2.12.0.
constexpr bool kGlooStartsAtOnce = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13;

/// Hold it while a backend starts a collective, a send and a receive excepted; RAII. Do not hold the GIL: the recorder
/// takes it, to note the stack.
class CollectiveStart {
 public:
  /// `by_gloo`: others are not kept waiting, for NCCL's first collective of a group waits for its peers.
  explicit CollectiveStart(bool by_gloo) {
    if (!kGlooStartsAtOnce && by_gloo) lock_ = std::unique_lock(one_at_a_time());
  }
  CollectiveStart(const CollectiveStart&) = delete;

 private:
  static std::mutex& one_at_a_time() {
    static std::mutex mutex;
    return mutex;
  }

  std::unique_lock<std::mutex> lock_;
};

}  // namespace deeptide::device
