// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Finds by files, not by hosts' names, who shares a folder.
#include "engine/step/host_tables.h"

#include <string>
#include <vector>

#include "checkpoint/format/file_io.h"
#include "comm/texts.h"
#include "engine/bind/mesh_votes.h"

namespace deeptide::engine {

checkpoint::Manifest manifest_of_first(Channels& channels, checkpoint::Manifest own) {
  MeshVotes votes(channels);
  const auto share = [&](std::string& text) {
    if (channels.world().rank != 0) text.clear();
    text = comm::exchange_texts(votes, text, {"checkpoint", "exchanging the first rank's manifest"}).front();
  };
  share(own.state_json);
  share(own.client_state_json);
  return own;
}

bool share_tables(Channels& channels, Boundary& boundary, const checkpoint::SaveTarget& target) {
  const std::string growing = checkpoint::growing_path(target);
  const auto path = [&](int rank) { return growing + "/" + checkpoint::rank_table_name(rank); };
  const int own = channels.world().rank, size = channels.world().size;
  std::string table;
  boundary.together_on_all_stages("reading the table of this rank", [&] { table = checkpoint::read_text(path(own)); });
  MeshVotes votes(channels);
  const auto tables = comm::exchange_texts(votes, table, {"checkpoint", "exchanging the tables of all ranks"});
  std::vector<int> missing;
  int first = own;
  for (int rank = size - 1; rank >= 0; --rank) {
    if (checkpoint::exists(path(rank))) {
      first = rank;
    } else {
      missing.push_back(rank);
    }
  }
  const bool leads = first == own;
  boundary.together_on_all_stages("writing the tables of other hosts", [&] {
    if (!leads) return;
    if (own != 0) checkpoint::remove_other_saves(target);
    for (const int rank : missing) checkpoint::write_text(path(rank), tables[static_cast<size_t>(rank)]);
  });
  return leads;
}

}  // namespace deeptide::engine
