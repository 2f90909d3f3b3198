// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Which files are text, in which order, and how they become windows: the same bytes as corpus.py reads.
#include "corpus.h"

#include <ATen/TensorIndexing.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <stdio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <stdexcept>

namespace gpt {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxBytes = 32 << 20;
constexpr double kHeldOut = 0.05;
constexpr size_t kSniffedBytes = 4096;

// No text of the library itself, or tables of numbers.
bool is_skipped_folder(const std::string& name) {
  static const std::set<std::string> kSkipped = {"__pycache__", "site-packages", "dist-packages", "test",
                                                 "tests",       "idle_test",     "encodings"};
  return kSkipped.count(name) > 0;
}

std::string standard_library() {
  constexpr const char* kAsk = "python3 -c 'import sysconfig; print(sysconfig.get_path(\"stdlib\"), end=\"\")'";
  std::string path;
  char chunk[256];
  FILE* pipe = popen(kAsk, "r");
  while (pipe && fgets(chunk, sizeof(chunk), pipe)) path += chunk;
  if (!pipe || pclose(pipe) != 0 || path.empty()) {
    throw std::runtime_error("python3 did not say where its standard library is; give --data a file or a folder");
  }
  return path;
}

// A file itself, or a folder's visible files in the order of their paths' bytes.
std::vector<fs::path> text_files(const fs::path& root) {
  if (!fs::is_directory(root)) return {root};
  std::vector<std::string> found;
  const auto options = fs::directory_options::skip_permission_denied;
  for (auto entry = fs::recursive_directory_iterator(root, options); entry != fs::end(entry); ++entry) {
    const std::string name = entry->path().filename();
    const bool hidden = name.front() == '.';
    if (entry->is_directory() && (hidden || is_skipped_folder(name))) {
      entry.disable_recursion_pending();
    } else if (entry->is_regular_file() && !hidden) {
      found.push_back(entry->path().lexically_relative(root));
    }
  }
  std::sort(found.begin(), found.end());
  std::vector<fs::path> paths;
  for (const std::string& relative : found) paths.push_back(root / relative);
  return paths;
}

std::string read_file(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw std::runtime_error("cannot read " + path.string() + ": " + std::strerror(errno));
  return {std::istreambuf_iterator<char>(stream), {}};
}

// All text below `root`, at most kMaxBytes; a file with a zero byte near its start is no text.
std::string read_text(const fs::path& root) {
  if (!fs::exists(root)) {
    throw std::runtime_error("no text to learn from: " + root.string() +
                             " does not exist; give --data a file or a folder");
  }
  std::string text;
  for (const fs::path& path : text_files(root)) {
    const std::string content = read_file(path);
    if (content.substr(0, kSniffedBytes).find('\0') == std::string::npos) text += content;
    if (text.size() >= kMaxBytes) break;
  }
  return text.substr(0, kMaxBytes);
}

}  // namespace

Windows::Windows(std::string_view text, int64_t context)
    : bytes_(at::empty({static_cast<int64_t>(text.size())}, at::kByte)), context_(context) {
  std::copy(text.begin(), text.end(), bytes_.data_ptr<uint8_t>());
}

int64_t Windows::size() const { return std::max<int64_t>(bytes_.numel() - 1, 0) / context_; }

Windows::Batch Windows::batch(const std::vector<int64_t>& indices, at::Device device) const {
  const auto starts = at::tensor(indices).unsqueeze(1) * context_;
  const auto window = bytes_.index({starts + at::arange(context_ + 1)}).to(at::kLong).to(device);
  return {window.slice(1, 0, -1).contiguous(), window.slice(1, 1).contiguous()};
}

Corpus load_corpus(const std::optional<std::string>& data, int64_t context) {
  const std::string root = data ? *data : standard_library();
  const std::string text = read_text(root);
  const auto cut = static_cast<size_t>(static_cast<double>(text.size()) * (1 - kHeldOut));
  const std::string_view all = text;
  Corpus corpus{Windows(all.substr(0, cut), context), Windows(all.substr(cut), context)};
  if (corpus.held_out.size() == 0) {
    throw std::runtime_error(root + " holds " + std::to_string(text.size()) + " bytes of text, expected at least " +
                             std::to_string(static_cast<int64_t>(2.0 * static_cast<double>(context) / kHeldOut)));
  }
  return corpus;
}

}  // namespace gpt
