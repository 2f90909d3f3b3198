// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A flat buffer whose blocks may lie in any tier; every reader and writer holds a lease.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>

namespace deeptide::tiers {

/// The home of memory: the device, the host's memory, files.
enum class Tier : uint8_t { device, cpu, nvme };

enum class Access : uint8_t {
  read,    // values are present
  write,   // values are undefined at first; all elements are written
  update,  // values are present and change
};

/// Elements [begin, begin + count) of a buffer. Units: elements.
struct Block {
  int64_t begin = 0;
  int64_t count = 0;

  int64_t end() const { return begin + count; }
};

/// Loads blocks and takes them back. A buffer asks for whole blocks or parts of one, each by one lease at a time.
class Store {
 public:
  virtual ~Store() = default;
  virtual Tier tier() const = 0;
  /// Returns the elements as a tensor (count,), valid until `close`. Errors: RuntimeError naming file and block.
  virtual at::Tensor open(Block block, Access access) = 0;
  virtual void close(Block block, Access access) noexcept = 0;
  /// Announces that `block` will be opened soon.
  virtual void prefetch(Block block) = 0;
  /// Announces that what changed will not change again soon.
  virtual void write_behind() {}
  /// Returns how many of `numel` elements are always in memory.
  virtual int64_t resident_numel(int64_t numel) const { return numel; }
  /// All elements (numel,) where they lie for good; undefined for a store that moves them.
  virtual at::Tensor in_place() const { return {}; }
  /// Starts to copy the elements to `target` (count,), a device's, in the order of its current lane's work. False: it
  /// did nothing, and the caller copies through a lease.
  virtual bool start_read(Block, const at::Tensor& /*target*/) { return false; }
  /// Starts to overwrite the elements by `source` (count,), likewise.
  virtual bool start_write(Block, const at::Tensor& /*source*/) { return false; }
  /// Copies the elements, which nobody writes meanwhile, to `target` (count,) on the CPU: from any thread, beside the
  /// leases of others, and into memory of no store.
  virtual void read_beside(Block block, const at::Tensor& target);
};

/// The right to a part of a buffer while the lease lives. Movable.
class Lease {
 public:
  Lease() = default;
  Lease(std::shared_ptr<Store> store, Block block, Access access)
      : store_(std::move(store)), block_(block), access_(access), tensor_(store_->open(block, access)) {}
  Lease(Lease&& other) noexcept = default;
  Lease& operator=(Lease&& other) noexcept;
  ~Lease() { end(); }

  /// Shapes: (count,). Invalid after the lease.
  const at::Tensor& tensor() const { return tensor_; }

 private:
  void end() noexcept;

  std::shared_ptr<Store> store_;
  Block block_;
  Access access_ = Access::read;
  at::Tensor tensor_;
};

/// (numel,) elements of one type, cut into blocks of a fixed size, the last shorter. Copies denote one buffer.
class Buffer {
 public:
  Buffer() = default;
  /// Uses `flat` (numel,), contiguous: one block, and a lease is a slice of it.
  static Buffer resident(at::Tensor flat);
  /// `block_numel`: how many elements `store` moves at a time.
  Buffer(std::shared_ptr<Store> store, int64_t numel, at::ScalarType dtype, int64_t block_numel);

  bool defined() const { return store_ != nullptr; }
  int64_t numel() const { return numel_; }
  at::ScalarType dtype() const { return dtype_; }
  Tier tier() const { return store_->tier(); }
  int64_t nbytes() const { return numel_ * static_cast<int64_t>(c10::elementSize(dtype_)); }

  /// The part of nbytes() that is always in memory.
  int64_t resident_bytes() const {
    return store_->resident_numel(numel_) * static_cast<int64_t>(c10::elementSize(dtype_));
  }

  int64_t block_numel() const { return block_numel_; }
  int64_t num_blocks() const { return block_numel_ == 0 ? 0 : (numel_ + block_numel_ - 1) / block_numel_; }
  Block block(int64_t index) const;

  /// Errors: internal if `range` is not within one block.
  Lease lease(Block range, Access access) const;
  /// All elements (numel,) where they lie, for as long as the buffer lives; undefined if they need leases.
  at::Tensor in_place() const { return store_->in_place(); }
  /// The elements in memory of their own (count,).
  at::Tensor copy(Block range) const;
  at::Tensor copy() const { return copy({0, numel_}); }
  /// Copies all elements to `target` (numel,): on a device in the order of its current lane's work.
  void copy_to(const at::Tensor& target) const;
  /// Copies elements that nobody writes meanwhile to `target` (count,) on the CPU, from any thread.
  void copy_beside(Block range, const at::Tensor& target) const;
  /// Overwrites the elements from `begin` on by `source` (count,).
  void copy_from(const at::Tensor& source, int64_t begin = 0) const;
  void prefetch(Block range) const { store_->prefetch(range); }
  void write_behind() const { store_->write_behind(); }
  const std::shared_ptr<Store>& store() const { return store_; }

 private:
  std::shared_ptr<Store> store_;
  int64_t numel_ = 0;
  at::ScalarType dtype_ = at::kFloat;
  int64_t block_numel_ = 0;
};

/// Calls `visit(block)` for the range, cut where a block of any of the buffers ends, and at multiples of `most`. All
/// have one numel; undefined ones are skipped.
template <typename Visit>
void for_each_block(std::span<const Buffer* const> buffers, Block range, Visit visit, int64_t most = INT64_MAX) {
  for (int64_t begin = range.begin; begin < range.begin + range.count;) {
    int64_t end = std::min(range.begin + range.count, most == INT64_MAX ? most : (begin / most + 1) * most);
    for (const Buffer* buffer : buffers) {
      if (buffer->defined()) end = std::min(end, (begin / buffer->block_numel() + 1) * buffer->block_numel());
    }
    visit(Block{begin, end - begin});
    begin = end;
  }
}

template <typename Visit>
void for_each_block(const Buffer& buffer, Block range, Visit visit) {
  const Buffer* const one[] = {&buffer};
  for_each_block(std::span<const Buffer* const>(one), range, visit);
}

}  // namespace deeptide::tiers
