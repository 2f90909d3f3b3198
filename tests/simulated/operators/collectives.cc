// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs the host's collectives on the pages of device tensors.
#include "simulated/operators/collectives.h"

#include <condition_variable>
#include <mutex>
#include <utility>

#include "simulated/operators/operands.h"

namespace deeptide::simulated {

using at::Tensor;

namespace {

using HostWork = c10::intrusive_ptr<c10d::Work>;

class StreamWork : public c10d::Work {
 public:
  explicit StreamWork(Event done) : done_(std::move(done)) {}
  bool isCompleted() override { return Machine::instance().query(done_); }
  bool wait(std::chrono::milliseconds) override {
    Machine::instance().wait(done_, current_stream());
    return true;
  }
  std::exception_ptr exception() const override { return nullptr; }

 private:
  Event done_;
};

/// The place where stuck collectives stay.
class Abortable {
 public:
  void abort() {
    const std::lock_guard lock(mutex_);
    aborted_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return aborted_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool aborted_ = false;
};

class Collectives : public c10d::Backend {
 public:
  explicit Collectives(c10::intrusive_ptr<c10d::Backend> host)
      : Backend(host->getRank(), host->getSize()), host_(std::move(host)), stream_(Machine::instance().new_stream()) {}

  ~Collectives() override { Machine::instance().free_stream(stream_); }
  Collectives(const Collectives&) = delete;

  const std::string getBackendName() const override { return "simulated"; }

  void abort() override { stuck_->abort(); }

  /// The host waits for it, as for NCCL's.
  HostWork barrier(const c10d::BarrierOptions&) override {
    meet("barrier");
    Event done;
    Operands nothing;
    nothing.run_on(stream_, "barrier", endless([host = host_] { return host->barrier(); }), HostWait::ordered, {});
    Machine::instance().record(done, stream_);
    return c10::make_intrusive<StreamWork>(std::move(done));
  }

  HostWork _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    return run("all-gather", output, input,
               [host = host_, options](Tensor& to, Tensor& from) { return host->_allgather_base(to, from, options); });
  }

  HostWork alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits,
                         std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override {
    return run("all-to-all", output, input,
               [host = host_, output_splits, input_splits, options](Tensor& to, Tensor& from) mutable {
                 return host->alltoall_base(to, from, output_splits, input_splits, options);
               });
  }

  HostWork _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return run("reduce-scatter", output, input, [host = host_, options](Tensor& to, Tensor& from) {
      return host->_reduce_scatter_base(to, from, options);
    });
  }

  HostWork broadcast(std::vector<Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    return run("broadcast", tensors[0], tensors[0], [host = host_, options](Tensor& to, Tensor&) {
      std::vector<Tensor> both{to};
      return host->broadcast(both, options);
    });
  }

 private:
  using Collective = std::function<HostWork(Tensor& output, Tensor& input)>;

  /// The ranks connect, once.
  void meet(const char* name) {
    if (std::exchange(has_met_, true)) return;
    host_->barrier()->wait();
    Machine::instance().note_host_wait(std::string("first collective, ") + name);
  }

  /// A task that runs the collective to its end.
  std::function<void()> endless(std::function<HostWork()> start) const {
    return [start = std::move(start), stuck = stuck_] {
      if (Machine::instance().stuck_collectives() == Stuck::always) return stuck->wait();
      try {
        start()->wait();
      } catch (const std::exception&) {
        if (Machine::instance().stuck_collectives() == Stuck::never) throw;
        stuck->wait();
      }
    };
  }

  HostWork run(const char* name, const Tensor& output, const Tensor& input, const Collective& collective) {
    meet(name);
    Machine& machine = Machine::instance();
    Event issued, done;
    machine.record(issued, current_stream());
    machine.wait(issued, stream_);
    Operands operands;
    Tensor from = operands.cpu(input, false), to = operands.cpu(output, true);
    const auto task = endless([collective, from, to]() mutable { return collective(to, from); });
    const Cost cost{Engine::link, std::max(input.nbytes(), output.nbytes()), 0};
    operands.run_on(stream_, name, task, HostWait::no, cost);
    machine.record(done, stream_);
    machine.start(done);  // peers wait for it, whatever this host does
    return c10::make_intrusive<StreamWork>(std::move(done));
  }

  c10::intrusive_ptr<c10d::Backend> host_;
  int stream_;
  bool has_met_ = false;
  std::shared_ptr<Abortable> stuck_ = std::make_shared<Abortable>();
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_collectives(c10::intrusive_ptr<c10d::Backend> host) {
  return c10::make_intrusive<Collectives>(std::move(host));
}

}  // namespace deeptide::simulated
