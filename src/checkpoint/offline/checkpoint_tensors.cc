// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads tensors of checkpoints into torch's.
#include <ATen/ops/empty.h>

#include "checkpoint/format/checkpoint_paths.h"
#include "checkpoint/imports/open_checkpoint.h"
#include "checkpoint/offline/writers/parts.h"

namespace deeptide {

namespace {

at::Tensor read_elements(const CheckpointReader& reader, const CheckpointTensor& tensor, int64_t begin, int64_t end) {
  const auto dtype = reader.parts().logical(tensor).dtype;
  const bool fits = begin >= 0 && begin <= end && end <= tensor.numel;  // read_into() refuses the others
  at::Tensor values = at::empty({fits ? end - begin : 0}, at::TensorOptions().dtype(dtype).device(at::kCPU));
  reader.read_into(tensor, begin, end, values.mutable_data_ptr());
  return values;
}

}  // namespace

CheckpointReader CheckpointReader::open(const std::string& directory, const std::string& tag) {
  const std::string named = tag.empty() ? checkpoint::latest_tag(directory) : tag;
  const std::string folder = named.empty() ? directory : checkpoint::existing_folder(directory, named);
  auto foreign = checkpoint::foreign_contents(folder);
  if (!foreign) return CheckpointReader(directory, tag);
  return CheckpointReader(checkpoint::parts_of({folder, *std::move(foreign)}));
}

at::Tensor CheckpointReader::read(const CheckpointTensor& tensor) const {
  return read_elements(*this, tensor, 0, tensor.numel).view(tensor.shape);
}

at::Tensor CheckpointReader::read(const CheckpointTensor& tensor, int64_t begin, int64_t end) const {
  return read_elements(*this, tensor, begin, end);
}

}  // namespace deeptide
