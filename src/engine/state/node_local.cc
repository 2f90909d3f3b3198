// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Tells by files, not by hosts' names, which ranks share a folder.
#include "engine/state/node_local.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/libraries/format.h"
#include "base/libraries/nlohmann.h"
#include "checkpoint/format/checkpoint_paths.h"
#include "checkpoint/format/file_io.h"
#include "comm/mailbox.h"
#include "comm/texts.h"
#include "engine/bind/mesh_votes.h"

namespace deeptide::engine {

using checkpoint::PartElsewhere;
using nlohmann::json;

namespace {

comm::Site site(const char* what) { return {"checkpoint", what}; }

std::string manifest_path(const std::string& directory, const std::string& tag) {
  return checkpoint::existing_folder(directory, tag) + "/" + checkpoint::kManifestName;
}

std::string manifest_text(const std::string& directory, const std::string& tag) try {
  const std::string path = manifest_path(directory, tag);
  return checkpoint::exists(path) ? checkpoint::read_text(path) : "";
} catch (const CheckpointError&) {
  return "";  // another host's may do; a file that cannot be read is told of when it is wanted
}

/// A part of a tensor on its way: who wants it, and who reads it.
struct Delivery {
  int to;
  int from;
  PartElsewhere part;
};

/// Parts that ranks want of files which others have. All ranks have one manifest, so a tensor's number in its table
/// names it.
class Deliveries {
 public:
  Deliveries(Channels& channels, const checkpoint::Reader& reader) : channels_(channels), reader_(reader) {
    for (const checkpoint::Piece& piece : reader.table()) {
      numbers_[{piece.name, piece.role}] = std::ssize(ids_);
      ids_.push_back({piece.name, piece.role});
      types_.push_back(piece.data.dtype());
    }
  }

  /// Tells what this rank has, and what it wants.
  std::string text(const std::vector<PartElsewhere>& missing) const {
    json parts = json::array();
    for (const PartElsewhere& part : missing) {
      parts.push_back(
          {numbers_.at(part.id), part.file, part.extent, part.region.offsets, part.region.sizes, part.piece});
    }
    return write_json(json{{"files", reader_.files_here()}, {"parts", std::move(parts)}});
  }

  /// `told`: every rank's text. Ranks that have a file take turns to read it.
  /// Errors: CheckpointError for a file that no rank has.
  void assign(const std::vector<std::string>& told) {
    std::map<std::string, std::vector<int>> having;
    std::vector<json> all;
    for (size_t rank = 0; rank < told.size(); ++rank) {
      all.push_back(read_json(told[rank]));
      for (const auto& file : all.back()["files"]) having[file.get<std::string>()].push_back(static_cast<int>(rank));
    }
    for (size_t rank = 0; rank < all.size(); ++rank) {
      auto& list = by_rank_.emplace_back();
      for (const auto& ask : all[rank]["parts"]) {
        PartElsewhere part{ask[5], ids_.at(ask[0]), ask[1], ask[2], {ask[3], ask[4]}};
        const auto& ranks = having[part.file];
        if (ranks.empty()) {
          throw CheckpointError("no rank's host has " + part.file + " of the checkpoint, which has '" +
                                checkpoint::tensor_key(part.id) + "': start a rank on the host that wrote it");
        }
        list.push_back({static_cast<int>(rank), ranks[(rank + list.size()) % ranks.size()], std::move(part)});
      }
      turns_ = std::max(turns_, list.size());
    }
  }

  size_t turns() const { return turns_; }

  /// Collective: each rank receives one of its parts, so that a block per rank is in memory. Errors: CommError; what
  /// this rank could not read is in `failure`, since the other end waits for as many elements.
  void take_turn(size_t turn, comm::Mailbox& mail, const std::vector<checkpoint::Piece>& wanted, std::string& failure) {
    const Delivery* due = nullptr;
    comm::Mailbox::Letter letter;
    const int rank = channels_.world().rank;
    for (const auto& list : by_rank_) {
      if (turn >= list.size()) continue;
      const Delivery& delivery = list[turn];
      if (delivery.to == rank) {
        due = &delivery;
        letter = mail.receive_known(room_for(delivery.part), delivery.from);
      }
      if (delivery.from == rank) mail.send_known(read(delivery.part, failure), delivery.to);
    }
    if (due != nullptr) {
      const at::Tensor block = mail.wait(std::move(letter), site("waiting for another host's file"));
      reader_.fill(wanted[due->part.piece], due->part, block);
    }
    mail.flush(site("sending to other hosts"));
  }

 private:
  at::Tensor room_for(const PartElsewhere& part) const {
    return at::empty({reader_.numel(part)}, at::TensorOptions().dtype(types_.at(numbers_.at(part.id))));
  }
  at::Tensor read(const PartElsewhere& part, std::string& failure) const try {
    return reader_.read_part(part);
  } catch (const CheckpointError& error) {
    failure = error.what();
    return room_for(part);
  }

  Channels& channels_;
  const checkpoint::Reader& reader_;
  std::map<checkpoint::TensorId, int64_t> numbers_;
  std::vector<checkpoint::TensorId> ids_;
  std::vector<at::ScalarType> types_;
  std::vector<std::vector<Delivery>> by_rank_;
  size_t turns_ = 0;
};

}  // namespace

std::string agree_on_tag(Channels& channels, const std::string& directory, const std::string& own) {
  MeshVotes votes(channels);
  const auto tags = comm::exchange_texts(votes, own, site("looking for the latest checkpoint"));
  std::vector<std::string> candidates;
  for (const std::string& tag : tags) {
    if (!tag.empty() && std::find(candidates.begin(), candidates.end(), tag) == candidates.end()) {
      candidates.push_back(tag);
    }
  }
  if (candidates.size() < 2) return candidates.empty() ? "" : candidates.front();
  for (const std::string& tag : candidates) {
    const bool has = own.empty() || checkpoint::exists(manifest_path(directory, tag));
    const auto found = votes.exchange(static_cast<uint8_t>(has), site("looking for a checkpoint"));
    if (std::all_of(found.begin(), found.end(), [](uint8_t each) { return each != 0; })) return tag;
  }
  throw CheckpointError(
      format_text("the hosts' folders {} have different latest checkpoints, by rank: {}; name the tag", directory,
                  join_text(tags, ", ")));
}

HostFolder look_at_hosts(Channels& channels, const std::string& directory, const std::string& tag) {
  MeshVotes votes(channels);
  HostFolder here{.folder = checkpoint::existing_folder(directory, tag)};
  const std::string own = manifest_text(directory, tag);
  const auto texts = comm::exchange_texts(votes, own, site("looking for the checkpoint's manifest"));
  for (const std::string& text : texts) {
    if (here.manifest.empty()) here.manifest = text;
    if (!text.empty() && text != here.manifest) {
      here.error = "the hosts have different checkpoints of tag '" + tag + "' in " + directory +
                   ": a run has died while it saved; load another tag";
    }
  }
  std::string files;
  if (checkpoint::exists(here.folder)) files = format_text("{}", join_text(checkpoint::list_folder(here.folder), "\n"));
  const auto listings = comm::exchange_texts(votes, files, site("comparing the hosts' files"));
  const auto before = listings.begin() + channels.world().rank;
  here.ranks = static_cast<int>(std::count(listings.begin(), listings.end(), files));
  here.index = static_cast<int>(std::count(listings.begin(), before, files));
  return here;
}

checkpoint::Reader HostFolder::open() const {
  if (!error.empty()) throw CheckpointError(error);
  const std::string path = folder + "/" + checkpoint::kManifestName;
  if (manifest.empty()) throw CheckpointError("no rank's host has " + path);
  return checkpoint::Reader::of_host(folder, checkpoint::decode_manifest(manifest, path));
}

void read_from_hosts(Channels& channels, Boundary& boundary, const checkpoint::Reader& reader,
                     const std::vector<checkpoint::Piece>& wanted, int readers) {
  Deliveries deliveries(channels, reader);
  std::string own;
  boundary.together_on_all_stages("reading the checkpoint",
                                  [&] { own = deliveries.text(reader.read_here(wanted, readers)); });
  MeshVotes votes(channels);
  const auto told = comm::exchange_texts(votes, own, site("asking other hosts for their files"));
  boundary.together_on_all_stages("looking for files on other hosts", [&] { deliveries.assign(told); });
  if (deliveries.turns() == 0) return;
  const auto letters = channels.open_letters();
  comm::Mailbox mail(*letters, at::kCPU);
  std::string failure;
  for (size_t turn = 0; turn < deliveries.turns(); ++turn) deliveries.take_turn(turn, mail, wanted, failure);
  boundary.together_on_all_stages("reading files for other hosts", [&] {
    if (!failure.empty()) throw CheckpointError(failure);
  });
}

}  // namespace deeptide::engine
