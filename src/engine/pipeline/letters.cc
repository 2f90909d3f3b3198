// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Writes and reads headers; asks for the next letter while this stage computes.
#include "engine/pipeline/letters.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>

#include "base/libraries/format.h"

namespace deeptide::engine {
namespace {

constexpr int64_t kHeaderNumbers = 256;
constexpr int64_t kDefined = 1, kNeedsGradient = 2, kOnDevice = 4;

std::string text(const Subject& subject) {
  static constexpr std::array kKinds = {"activation", "gradient", "tied weight", "tied gradient"};
  return format_text("{} {} of micro-batch {} in step {}", kKinds.at(static_cast<size_t>(subject.kind)), subject.number,
                     subject.micro_batch, subject.step);
}

/// A copy on the host: the bytes leave later, and a layer may write to what it has returned, as to a buffer.
at::Tensor copied(const at::Tensor& tensor) {
  return tensor.detach().to(at::kCPU, tensor.scalar_type(), /*non_blocking=*/false, /*copy=*/true,
                            at::MemoryFormat::Contiguous);
}

}  // namespace

bool Letters::Shape::is_empty() const { return std::ranges::count(sizes, 0) > 0; }

at::Tensor Letters::Shape::memory() const { return at::empty(sizes, at::TensorOptions().dtype(type)); }

void Letters::Line::note(const Shapes& now) {
  is_steady = shapes == now;
  shapes = now;
}

/// A letter's first tensor: subject, and for each of the others flags, type and sizes.
struct Letters::Header {
  Subject subject;
  std::vector<int64_t> flags;
  Shapes shapes;

  static Header of(const Subject& subject, const Activations& tensors) {
    Header header{subject, {}, {}};
    for (const at::Tensor& tensor : tensors) {
      if (!tensor.defined()) {
        header.flags.push_back(0);
        continue;
      }
      header.flags.push_back(kDefined | (tensor.requires_grad() ? kNeedsGradient : 0) |
                             (tensor.is_cpu() ? 0 : kOnDevice));
      header.shapes.push_back({tensor.scalar_type(), tensor.sizes().vec()});
    }
    return header;
  }

  at::Tensor packed() const {
    std::vector<int64_t> numbers = {static_cast<int64_t>(subject.kind), subject.number, subject.micro_batch,
                                    subject.step, std::ssize(flags)};
    auto shape = shapes.begin();
    for (const int64_t flag : flags) {
      numbers.push_back(flag);
      if (flag == 0) continue;
      numbers.push_back(static_cast<int64_t>(shape->type));
      numbers.push_back(std::ssize(shape->sizes));
      numbers.insert(numbers.end(), shape->sizes.begin(), shape->sizes.end());
      ++shape;
    }
    TORCH_CHECK_VALUE(std::ssize(numbers) <= kHeaderNumbers, "a stage hands on ", flags.size(),
                      " tensors at once, whose shapes are more than a header tells of: hand on fewer");
    numbers.resize(kHeaderNumbers);
    at::Tensor tensor = at::empty({kHeaderNumbers}, at::kLong);
    std::ranges::copy(numbers, tensor.mutable_data_ptr<int64_t>());
    return tensor;
  }

  static Header unpacked(const at::Tensor& tensor) {
    const int64_t* next = tensor.const_data_ptr<int64_t>();
    Header header;
    header.subject.kind = static_cast<LetterKind>(*next++);
    header.subject.number = *next++;
    header.subject.micro_batch = *next++;
    header.subject.step = *next++;
    for (int64_t count = *next++; count > 0; --count) {
      header.flags.push_back(*next++);
      if (header.flags.back() == 0) continue;
      Shape shape;
      shape.type = static_cast<at::ScalarType>(*next++);
      const int64_t dims = *next++;
      shape.sizes.assign(next, next + dims);
      next += dims;
      header.shapes.push_back(std::move(shape));
    }
    return header;
  }
};

void Letters::begin(const std::map<int, int64_t>& due, bool mixes) {
  due_ = due;
  mixes_ = mixes;
  aside_.clear();
  for (const auto& [from, count] : due) {
    if (count > 0) ask_for_next(from);
  }
}

void Letters::send(const Subject& subject, const Activations& tensors, int to, bool is_own) {
  const Header header = Header::of(subject, tensors);
  Line& line = out_[to];
  const bool is_as_expected = line.is_steady && header.shapes == line.shapes;
  stage_.send(header.packed(), to);
  if (line.is_steady && !is_as_expected) {
    for (const Shape& shape : *line.shapes) {
      if (!shape.is_empty()) stage_.send(shape.memory(), to);
    }
  }
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.numel() > 0) stage_.send(is_own ? tensor.detach().cpu() : copied(tensor), to);
  }
  line.note(header.shapes);
}

Activations Letters::receive(const Subject& subject, int from) {
  if (auto kept = aside_.extract({from, subject})) return std::move(kept.mapped());
  for (;;) {
    auto [got, tensors] = next(from);
    if (got == subject) return std::move(tensors);
    if (!mixes_ || got.step != subject.step || due_[from] < 1) {
      throw std::runtime_error(format_text(
          "stage {} expected {} from stage {}, and got {}: the stages' programs differ; call train_batch and "
          "eval_batch alike on all ranks",
          stage_.index(), text(subject), from, text(got)));
    }
    aside_[{from, got}] = std::move(tensors);
  }
}

Letters::Asked Letters::ask(at::Tensor tensor, int from) {
  if (tensor.numel() == 0) return {std::move(tensor), std::nullopt};
  const int64_t letter = stage_.expect(tensor, from);
  return {std::move(tensor), letter};
}

at::Tensor Letters::take(const Asked& asked) { return asked.letter ? stage_.receive(*asked.letter) : asked.tensor; }

void Letters::ask_for_next(int from) {
  const Line& line = in_[from];
  Incoming incoming{ask(at::empty({kHeaderNumbers}, at::kLong), from), {}};
  if (line.is_steady) {
    for (const Shape& shape : *line.shapes) incoming.tensors.push_back(ask(shape.memory(), from));
  }
  asked_[from] = std::move(incoming);
}

std::pair<Subject, Activations> Letters::next(int from) {
  if (!asked_.contains(from)) ask_for_next(from);
  Incoming incoming = std::move(asked_.extract(from).mapped());
  const Header header = Header::unpacked(take(incoming.header));
  Line& line = in_[from];
  if (!line.is_steady || header.shapes != line.shapes) {
    for (const Asked& empty : incoming.tensors) take(empty);
    incoming.tensors.clear();
    for (const Shape& shape : header.shapes) incoming.tensors.push_back(ask(shape.memory(), from));
  }
  line.note(header.shapes);
  if (--due_[from] > 0) ask_for_next(from);
  Activations tensors;
  auto asked = incoming.tensors.begin();
  for (const int64_t flag : header.flags) {
    tensors.push_back(flag == 0 ? at::Tensor() : take(*asked++));
    if ((flag & kOnDevice) != 0) tensors.back() = tensors.back().to(stage_.device());
    if ((flag & kNeedsGradient) != 0) tensors.back().requires_grad_();
  }
  return {header.subject, std::move(tensors)};
}

}  // namespace deeptide::engine
