// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Text as training samples: the bytes of a file or a folder, cut into windows of one length. The twin of corpus.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace gpt {

/// Sample i is (bytes, the same bytes one later), both of length `context`.
class Windows {
 public:
  Windows(std::string_view text, int64_t context);

  struct Batch {
    at::Tensor tokens, targets;
  };

  int64_t size() const;
  Batch batch(const std::vector<int64_t>& indices, at::Device device) const;

 private:
  at::Tensor bytes_;
  int64_t context_;
};

struct Corpus {
  Windows train;
  Windows held_out;  // the last part
};

/// `data`: a file or folder; absent: the source of Python's standard library, where `python3` says it is.
/// Errors: std::runtime_error when there is no text, or too little.
Corpus load_corpus(const std::optional<std::string>& data, int64_t context);

}  // namespace gpt
