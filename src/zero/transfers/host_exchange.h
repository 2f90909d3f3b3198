// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Gradients to the host and new parameters back, block by block, while the host steps other blocks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "device/lane.h"
#include "device/memory/memory.h"
#include "tiers/buffer.h"

namespace deeptide::zero {

/// Elements of a block: 4 MiB of fp32.
inline constexpr int64_t kHostBlockNumel = int64_t{1} << 20;

/// Page-locked blocks for both directions, each with a lane of its own. Used by one thread.
class HostExchange {
 public:
  /// `largest`: the most elements of a unit that this rank steps. `takes_gradients`: for `announce`; else they reach
  /// the host in another way.
  HostExchange(std::shared_ptr<device::Ledger> ledger, at::Device device, int64_t largest, bool takes_gradients = true);
  /// Returns once no copy uses a block.
  ~HostExchange();
  HostExchange(const HostExchange&) = delete;
  HostExchange& operator=(const HostExchange&) = delete;

  /// The page-locked memory. Units: bytes.
  static int64_t forecast(int64_t largest, bool takes_gradients = true);
  int64_t nbytes() const { return static_cast<int64_t>(arena_.nbytes()); }

  /// The copies of one step; RAII. Copies to the device run after all that the current lane did before it.
  class Step {
   public:
    explicit Step(HostExchange& exchange);
    ~Step();
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

    /// Announces that this gradient (N,) on the device will be read next: as many of its blocks as there is room for
    /// are copied, behind what the current lane has done. Its memory is not freed before `join`.
    void announce(int unit, at::Tensor gradient);
    /// Waits for a part of one block of an announced gradient, and returns it on the host, valid until the next call.
    /// Asked for in the order of what was announced; what is passed over is not copied.
    at::Tensor gradient(int unit, tiers::Block block);
    /// Memory on the host for new parameters, to hand to `send` next. Shapes: (count,), count <= kHostBlockNumel.
    at::Tensor parameters(int64_t count, at::ScalarType dtype);
    /// Starts to copy them to their place on the device.
    void send(const at::Tensor& parameters, const at::Tensor& target);
    /// Makes the current lane's later work follow all copies so far.
    void join() const;

   private:
    /// A gradient that was announced, from its block `next` on.
    struct Source {
      int unit = 0;
      at::Tensor gradient;
      int64_t next = 0;
    };
    /// A block on its way to the host, or there.
    struct Fetched {
      int unit = 0;
      int64_t index = 0;
      int64_t slot = 0;
      at::Tensor values;
      device::Mark arrived;
    };

    void fetch_ahead();
    void pass_over(int unit, int64_t index);

    HostExchange& exchange_;
    std::deque<Source> sources_;
    std::deque<Fetched> fetched_;
  };

 private:
  struct Slot {
    at::Tensor memory;        // bytes
    device::Mark free_after;  // passed: the host may write
  };

  std::shared_ptr<device::Ledger> ledger_;
  device::Lane out_, in_;              // to the host, to the device
  at::Tensor arena_;                   // page-locked
  std::vector<at::Tensor> gradients_;  // blocks as bytes; none unless they are taken
  std::vector<int64_t> idle_;          // of these
  std::vector<Slot> parameters_;
  size_t next_ = 0;  // of these
  at::Device device_;
};

}  // namespace deeptide::zero
