// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Describes a saved tensor's values.
#include <algorithm>
#include <cmath>
#include <limits>

#include "checkpoint/offline/conversion.h"
#include "checkpoint/offline/writers/parts.h"

namespace deeptide {

CheckpointStatistics checkpoint_statistics(const CheckpointReader& reader, const CheckpointTensor& tensor) {
  constexpr size_t kFirst = 8;
  const auto dtype = reader.parts().logical(tensor).dtype;
  CheckpointStatistics statistics;
  double least = std::numeric_limits<double>::infinity(), most = -least, sum = 0.0, squares = 0.0;
  std::vector<double> values;
  checkpoint::for_each_block(reader, tensor, [&](int64_t, int64_t count, const char* data) {
    checkpoint::to_doubles(dtype, data, count, values);
    for (const double value : values) {
      if (statistics.first.size() < kFirst) statistics.first.push_back(value);
      if (!std::isfinite(value)) {
        ++statistics.num_others;
        continue;
      }
      ++statistics.num_finite;
      least = std::min(least, value);
      most = std::max(most, value);
      sum += value;
      squares += value * value;
    }
  });
  if (statistics.num_finite > 0) {
    statistics.least = least;
    statistics.most = most;
    statistics.mean = sum / static_cast<double>(statistics.num_finite);
    statistics.norm = std::sqrt(squares);
  }
  return statistics;
}

}  // namespace deeptide
