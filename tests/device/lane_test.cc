// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The order of work on a device, seen by a backend that only writes down what it is asked for.
#include "device/lane.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "device/torch_versions.h"

namespace deeptide::device {
namespace {

/// The backend's calls so far: "record 1 on 5", "block 5 on 1".
std::vector<std::string>& journal() {
  static std::vector<std::string> lines;
  return lines;
}

/// PrivateUse1 without memory or operators: events are numbers, passed once they are set so.
class PaperDevice : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(++streams); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const c10::Stream before = stream(current);
    current = next.id();
    return before;
  }
  void record(void** event, const c10::Stream& on, c10::DeviceIndex, c10::EventFlag) const override {
    auto* number = new int(++events);
    *event = number;
    journal().push_back("record " + std::to_string(*number) + " on " + std::to_string(on.id()));
  }
  void block(void* event, const c10::Stream& on) const override {
    journal().push_back("block " + std::to_string(on.id()) + " on " + std::to_string(*static_cast<int*>(event)));
  }
  bool queryEvent(void* event) const override { return *static_cast<int*>(event) <= done; }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<int*>(event); }

  static c10::Device device() { return c10::Device(c10::DeviceType::PrivateUse1, 0); }
  static c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }

  static inline c10::StreamId current = 0, streams = 0;
  static inline int events = 0, done = 0;
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, PaperDevice);

/// The two streams' handles in the device's own interface.
char paper_handles[2];

class Lanes : public testing::Test {
 protected:
  void SetUp() override {
    journal().clear();
    PaperDevice::current = PaperDevice::streams = 0;
    PaperDevice::events = PaperDevice::done = 0;
  }
};

TEST_F(Lanes, OrderLaterWorkAfterAMarkWithoutTheHost) {
  const Lane compute = Lane::current(PaperDevice::device());
  const Lane copies = Lane::create(PaperDevice::device());
  const Mark written = compute.mark();
  copies.wait_for(written);
  EXPECT_EQ(journal(), (std::vector<std::string>{"record 1 on 0", "block 1 on 1"}));
  EXPECT_FALSE(written.passed());
  PaperDevice::done = 1;
  EXPECT_TRUE(written.passed());
}

TEST_F(Lanes, TakeTheOperatorsOfTheirScope) {
  const Lane copies = Lane::create(PaperDevice::device());
  {
    const Lane::Scope scope(copies);
    EXPECT_EQ(PaperDevice::current, 1);
    Lane::current(PaperDevice::device()).mark();
  }
  EXPECT_EQ(PaperDevice::current, 0);
  EXPECT_EQ(journal().front(), "record 1 on 1");
}

TEST_F(Lanes, AreFreeOnACpu) {
  const Lane lane = Lane::create(at::kCPU);
  const Mark mark = lane.mark();
  EXPECT_TRUE(mark.passed());
  Lane::current(at::kCPU).wait_for(mark);
  const Lane::Scope scope(lane);
  EXPECT_TRUE(journal().empty());
  EXPECT_EQ(lane.handle(), nullptr);
}

/// A stream as torch has it before 2.11, without native_handle.
struct EarlierStream {
  c10::Stream stream;
  operator c10::Stream() const { return stream; }
  c10::Device device() const { return stream.device(); }
  c10::DeviceIndex device_index() const { return stream.device_index(); }
};

TEST_F(Lanes, TellTheHandleOfAnyStreamWhereTorchTellsTheCurrentOnes) {
  EXPECT_TRUE(tells_native_handles());
  EXPECT_EQ(native_handle(EarlierStream{PaperDevice::stream(0)}), &paper_handles[0]);
  EXPECT_EQ(native_handle(EarlierStream{PaperDevice::stream(1)}), &paper_handles[1]);
  EXPECT_EQ(PaperDevice::current, 0);
  EXPECT_THROW(native_handle(EarlierStream{PaperDevice::stream(2)}), std::logic_error);
  EXPECT_EQ(PaperDevice::current, 0);
}

}  // namespace
}  // namespace deeptide::device

/// Like a GPU's torch, which the test's CPU build lacks: PaperDevice's stream, and none from its third stream on.
extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t /*device_index*/, void** stream) {
  using deeptide::device::PaperDevice;
  if (PaperDevice::current > 1) return 1;
  *stream = &deeptide::device::paper_handles[PaperDevice::current];
  return 0;
}
