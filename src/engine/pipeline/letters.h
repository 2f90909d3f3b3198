// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Lists of tensors between the stages of a pipeline, each under a header that says what comes.
#pragma once

#include <ATen/core/Tensor.h>

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "deeptide/pipeline.h"
#include "deeptide/pipeline_stage.h"

namespace deeptide::engine {

enum class LetterKind : int64_t { activation, gradient, tied_weight, tied_gradient };

/// The subject of a letter: both ends name it, and the receiver compares.
struct Subject {
  LetterKind kind = LetterKind::activation;
  int64_t number = 0;  // the receiver's chunk; of ties, the parameter's
  int64_t micro_batch = 0;
  int64_t step = 0;
  auto operator<=>(const Subject&) const = default;
};

/// Sends and receives. Letters of one stage come in the order in which they were sent. Used by one thread.
class Letters {
 public:
  explicit Letters(PipelineStage& stage) : stage_(stage) {}

  /// `due`: how many letters come of which stage in this step; the first of each is asked for at once, and comes while
  /// this stage computes. mixes: one stage sends activations and gradients, in an order of its own.
  void begin(const std::map<int, int64_t>& due, bool mixes);
  /// Sends the tensors' values of this moment; returns at once. Undefined tensors arrive undefined. is_own: nobody
  /// writes to them later, so those in the host's memory are sent without a copy. Errors: ValueError for more tensors
  /// than a header tells of.
  void send(const Subject& subject, const Activations& tensors, int to, bool is_own = false);
  /// Waits for that letter. Tensors that require a gradient at the sender do so here. Errors: RuntimeError if another
  /// one comes: the stages' programs differ.
  Activations receive(const Subject& subject, int from);

 private:
  struct Shape {
    at::ScalarType type = at::kFloat;
    std::vector<int64_t> sizes;
    bool operator==(const Shape&) const = default;
    bool is_empty() const;
    at::Tensor memory() const;
  };
  using Shapes = std::vector<Shape>;  // of the defined tensors

  /// One direction between two stages: the shapes of the last letter. Where two letters had the same ones, the receiver
  /// asks for the next one's tensors before it has seen the header; a sender of others first sends empty ones of those.
  struct Line {
    std::optional<Shapes> shapes;
    bool is_steady = false;
    void note(const Shapes& now);
  };
  struct Asked {
    at::Tensor tensor;
    std::optional<int64_t> letter;  // none: it has no elements
  };
  struct Incoming {
    Asked header;
    std::vector<Asked> tensors;
  };
  struct Header;

  Asked ask(at::Tensor tensor, int from);
  at::Tensor take(const Asked& asked);
  void ask_for_next(int from);
  std::pair<Subject, Activations> next(int from);

  PipelineStage& stage_;
  std::map<int, Line> out_, in_;
  std::map<int, Incoming> asked_;
  std::map<int, int64_t> due_;
  std::map<std::pair<int, Subject>, Activations> aside_;
  bool mixes_ = false;
};

}  // namespace deeptide::engine
