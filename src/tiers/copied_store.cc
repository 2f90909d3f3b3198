// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A store in front of the host's own: it knows which copies are under way.
#include "tiers/copied_store.h"

#include <utility>

namespace deeptide::tiers {

using at::Tensor;
using device::Lane;
using device::Mark;

void ReadsUnderWay::make_room() {
  std::lock_guard lock(mutex_);
  for (; !reads_.empty(); reads_.pop_front()) {
    const Mark& oldest = reads_.front().done;
    if (oldest.passed()) continue;
    if (static_cast<int64_t>(reads_.size()) < most_) return;
    oldest.wait();
  }
}

void ReadsUnderWay::add(const void* owner, Lease source, Mark done) {
  std::lock_guard lock(mutex_);
  reads_.push_back({owner, std::move(source), std::move(done)});
}

void ReadsUnderWay::wait_for(const void* owner) {
  std::lock_guard lock(mutex_);
  std::erase_if(reads_, [&](const Read& read) {
    if (read.owner != owner) return false;
    read.done.wait();
    return true;
  });
}

void ReadsUnderWay::order_before(const Lane& lane, const void* owner) {
  std::lock_guard lock(mutex_);
  for (const Read& read : reads_) {
    if (read.owner == owner) lane.wait_for(read.done);
  }
}

namespace {

class CopiedStore : public Store {
 public:
  CopiedStore(std::shared_ptr<Store> host, int64_t numel, std::shared_ptr<ReadsUnderWay> reads)
      : host_(std::move(host)), numel_(numel), reads_(std::move(reads)) {}

  ~CopiedStore() override {
    try {
      written_.wait();
      reads_->wait_for(this);
    } catch (const std::exception&) {  // a device that has failed copies no more
    }
  }
  CopiedStore(const CopiedStore&) = delete;

  Tier tier() const override { return host_->tier(); }
  int64_t resident_numel(int64_t numel) const override { return host_->resident_numel(numel); }

  Tensor open(Block block, Access access) override {
    written_.wait();
    if (access != Access::read) reads_->wait_for(this);
    return host_->open(block, access);
  }
  void close(Block block, Access access) noexcept override { host_->close(block, access); }
  void prefetch(Block block) override { host_->prefetch(block); }
  void write_behind() override { host_->write_behind(); }

  bool start_read(Block block, const Tensor& target) override {
    if (target.is_cpu()) return false;
    reads_->make_room();
    Lease source(host_, block, Access::read);
    const Lane lane = Lane::current(target.device());
    lane.wait_for(written_);
    target.copy_(source.tensor(), /*non_blocking=*/true);
    reads_->add(this, std::move(source), lane.mark());
    return true;
  }

  // A write that passes through to a file goes on from the host.
  bool start_write(Block block, const Tensor& source) override {
    if (source.is_cpu() || resident_numel(numel_) < numel_) return false;
    const Lane lane = Lane::current(source.device());
    lane.wait_for(written_);
    reads_->order_before(lane, this);
    const Lease target(host_, block, Access::write);
    target.tensor().copy_(source, /*non_blocking=*/true);
    written_ = lane.mark();
    return true;
  }

 private:
  std::shared_ptr<Store> host_;
  int64_t numel_;
  std::shared_ptr<ReadsUnderWay> reads_;
  Mark written_;  // by a device
};

}  // namespace

Buffer copied_buffer(const Buffer& host, std::shared_ptr<ReadsUnderWay> reads) {
  auto store = std::make_shared<CopiedStore>(host.store(), host.numel(), std::move(reads));
  return {std::move(store), host.numel(), host.dtype(), host.block_numel()};
}

}  // namespace deeptide::tiers
