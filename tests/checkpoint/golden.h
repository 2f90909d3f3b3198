// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The contents of the checkpoints under golden_v1 to golden_v4: two ranks, every role, any bit pattern.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace deeptide::checkpoint {

struct GoldenTensor {
  std::string name;
  std::string role;  // as text: "master", "exp_avg", "buffer"
  std::vector<int64_t> shape;
  at::ScalarType dtype;
  int64_t cut;  // rank 0 owns the elements before it, rank 1 the rest
};

constexpr const char* kGoldenState = R"({"global_steps":7,"loss":NaN,"seed":340282366920938463463374607431768211455})";
constexpr const char* kGoldenClientState = R"({"epoch": 3, "name": "größe"})";
inline std::string golden_rank_state(int rank) { return "{\"cpu\":\"0" + std::to_string(rank) + "\"}"; }

/// Version 1 holds it in ranges, like the others; from version 2 on each rank owns half of its columns.
constexpr const char* kGoldenBoxes = "columns";

/// `weights` is the type of the parameters that have no master.
inline std::vector<GoldenTensor> golden_tensors(at::ScalarType weights) {
  return {{"embed.weight", "master", {5, 7}, at::kFloat, 11},
          {"embed.weight", "exp_avg", {5, 7}, at::kFloat, 11},
          {"embed.weight", "exp_avg_sq", {5, 7}, at::kFloat, 11},
          {"h.0/odd@\"größe\"", "master", {2, 3, 4}, at::kFloat, 24},
          {"h.0/odd@\"größe\"", "exp_avg", {2, 3, 4}, at::kFloat, 24},
          {"h.0/odd@\"größe\"", "exp_avg_sq", {2, 3, 4}, at::kFloat, 24},
          {kGoldenBoxes, "master", {4, 6}, at::kFloat, 10},
          {"frozen", "param", {13}, weights, 0},
          {"scale", "param", {}, weights, 1},
          {"nothing", "param", {0, 4}, weights, 0}};
}

/// The buffers that each rank saves whole, for itself.
inline std::vector<GoldenTensor> golden_buffers() {
  return {{"seen", "buffer", {2}, at::kLong, 0}, {"mask", "buffer", {3, 1}, at::kBool, 0}};
}

inline int64_t golden_numel(const GoldenTensor& tensor) {
  int64_t numel = 1;
  for (int64_t size : tensor.shape) numel *= size;
  return numel;
}

/// The tensor's elements, flat: bits from a linear congruence that the key seeds. `rank` matters to buffers alone.
inline at::Tensor golden_data(const GoldenTensor& tensor, int rank = 0) {
  uint64_t state = 0x9E3779B97F4A7C15u + static_cast<uint64_t>(rank);
  for (char c : tensor.name + "/" + tensor.role) state = state * 31 + static_cast<unsigned char>(c);
  const at::Tensor data = at::empty({golden_numel(tensor)}, tensor.dtype);
  auto* bytes = static_cast<unsigned char*>(data.mutable_data_ptr());
  for (size_t i = 0; i < data.nbytes(); ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    bytes[i] = static_cast<unsigned char>(state >> 56) & (tensor.dtype == at::kBool ? 1 : 255);
  }
  return data;
}

}  // namespace deeptide::checkpoint
