// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Finds frozen pieces by the hash of their contents, links their files, and writes the new ones.
#include "checkpoint/save/frozen_files.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <utility>

#include "checkpoint/format/file_io.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/save/block_writer.h"

namespace deeptide::checkpoint {
namespace {

using at::Tensor;
using Paths = std::map<std::string, std::string>;

// Equal for equal pieces of any save and rank. The key has the offsets: two regions of a tensor may have equal bytes.
std::string header_of(const Piece& piece) {
  const std::string key = region_key(tensor_key({piece.name, piece.role}), piece.region);
  const int64_t bytes = piece.bytes();
  return encode_header({{key, {piece.data.dtype(), piece.region.sizes, 0, bytes}}},
                       {{"format", "pt"}, {"writer", "deeptide"}});
}

StoredPiece stored_as(const Piece& piece, const std::string& header, std::vector<ContentHash> hashes) {
  std::string text = header;
  for (const ContentHash& hash : hashes) text += hash.text();
  const std::string name = frozen_name(ContentHash::of(text.data(), std::ssize(text)).text());
  return {{piece.name, piece.role},
          piece.shape,
          piece.data.dtype(),
          {piece.region, name, std::ssize(header), std::move(hashes)},
          ContentHash::of(header.data(), std::ssize(header))};
}

std::vector<ContentHash> hashes_of(const PieceData& data, int64_t numel) {
  BlockHasher hasher;
  const Tensor& tensor = data.tensor();
  if (tensor.defined() && tensor.is_cpu() && tensor.is_contiguous()) {
    hasher.update(tensor.const_data_ptr(), static_cast<int64_t>(tensor.nbytes()));
    return hasher.finish();
  }
  const int64_t most = std::min(numel, kBlockBytes / element_bytes(data.dtype()));
  const Tensor block = at::empty({most}, at::TensorOptions().dtype(data.dtype()));
  const Tensor flat = tensor.defined() ? tensor.view({-1}) : tensor;
  for (int64_t begin = 0; begin < numel; begin += most) {
    const Tensor part = block.narrow(0, 0, std::min(most, numel - begin));
    if (flat.defined()) {
      part.copy_(flat.narrow(0, begin, part.numel()));
    } else {
      data.transfer()(begin, part);
    }
    hasher.update(part.const_data_ptr(), static_cast<int64_t>(part.nbytes()));
  }
  return hasher.finish();
}

// The frozen files that the folder's checkpoints have, by name.
Paths frozen_files(const std::string& directory) {
  Paths paths;
  if (!is_folder(directory)) return paths;
  for (const std::string& tag : list_folder(directory)) {
    const std::string folder = directory + "/" + tag;
    if (!exists(folder + "/" + kManifestName)) continue;
    for (const std::string& name : list_folder(folder)) {
      if (is_frozen_name(name)) paths[name] = folder + "/" + name;
    }
  }
  return paths;
}

// The name vouches for what was written; a file that lost its end or its header since then is written anew.
bool is_sound(const std::string& path, const std::string& header, int64_t bytes) {
  const File file = File::open(path);
  if (file.size() != std::ssize(header) + bytes) return false;
  std::string found(header.size(), '\0');
  file.read_at(found.data(), std::ssize(found), 0);
  return found == header;
}

// False where the file is not there, damaged or cannot be linked: the piece is written then, which tells what is wrong.
bool link_file(const Paths& paths, const std::string& growing, const std::string& name, const std::string& header,
               int64_t bytes) try {
  const auto found = paths.find(name);
  if (found == paths.end() || !is_sound(found->second, header, bytes)) return false;
  make_folders(growing);
  const std::string path = growing + "/" + name;
  return exists(path) || ::link(found->second.c_str(), path.c_str()) == 0;
} catch (const CheckpointError&) {
  return false;
}

}  // namespace

void link_stored(const SaveTarget& target, Snapshot& snapshot) {
  const at::NoGradGuard no_grad;
  const Paths paths = frozen_files(target.directory);
  if (paths.empty()) return;
  const std::string growing = growing_path(target);
  std::vector<Piece> left;
  for (Piece& piece : snapshot.pieces) {
    const int64_t numel = piece.region.numel();
    if (piece.apart && numel > 0) {
      const std::string header = header_of(piece);
      StoredPiece stored = stored_as(piece, header, hashes_of(piece.data, numel));
      if (link_file(paths, growing, stored.extent.file, header, numel * element_bytes(piece.data.dtype()))) {
        snapshot.stored.push_back(std::move(stored));
        continue;
      }
    }
    left.push_back(std::move(piece));
  }
  snapshot.pieces = std::move(left);
}

StoredPiece write_apart(const std::string& growing, int rank, const Piece& piece, int64_t buffer_bytes) {
  const std::string part = growing + "/" + shard_name(rank) + ".part";
  const std::string header = header_of(piece);
  BlockWriter writer(part, std::ssize(header) + piece.bytes(), buffer_bytes);
  writer.append(header.data(), std::ssize(header));
  writer.take_hashes();
  writer.append(piece.data, piece.region.numel());
  StoredPiece stored = stored_as(piece, header, writer.take_hashes());
  writer.finish();
  move_path(part, growing + "/" + stored.extent.file);
  return stored;
}

}  // namespace deeptide::checkpoint
