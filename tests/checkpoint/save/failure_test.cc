// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A save that fails, or whose process is killed, leaves the previous checkpoint as it was.
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>

#include "checkpoint/format/file_io.h"
#include "checkpoint/scratch.h"

namespace deeptide::checkpoint {
namespace {

using at::Tensor;

constexpr int64_t kSmall = 100;
constexpr int64_t kLarge = 4 << 20;

Tensor filled(int64_t numel, float value) { return at::full({numel}, value, at::kFloat); }

float saved_value(const std::string& directory, const std::string& tag) {
  const Tensor back = at::zeros({kSmall}, at::kFloat);
  Reader(directory, tag).read({whole("w", "param", back)});
  return back.const_data_ptr<float>()[kSmall - 1];
}

struct Unmount {
  ~Unmount() { ::umount2(path.c_str(), MNT_DETACH); }
  const std::string& path;
};

class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit = {bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    ::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_;
  sighandler_t handler_;
};

// A save over the same tag and one under another fail with `reason`; both leave the first one in place.
void expect_failed_saves_change_nothing(const std::string& directory, const std::string& reason) {
  for (const char* tag : {"t", "other"}) {
    const std::string text =
        error_of([&] { write_rank(directory, tag, 0, {whole("w", "param", filled(kLarge, 2))}, "{}"); });
    EXPECT_TRUE(contains(text, reason) && contains(text, "bytes at offset") && contains(text, directory)) << text;
    EXPECT_TRUE(contains(error_of([&] { commit(directory, tag, {}, true); }), "rank_00000.json"));
    abandon(directory, tag);
    EXPECT_FALSE(exists(growing(directory, tag)));
    EXPECT_EQ(latest_tag(directory), "t");
    EXPECT_EQ(saved_value(directory, "t"), 1);
  }
}

TEST(SaveFailure, KeepsThePreviousCheckpointWhenTheFilesystemIsFull) {
  Scratch scratch;
  if (::mount("tmpfs", scratch.path().c_str(), "tmpfs", 0, "size=1m") != 0) {
    GTEST_SKIP() << "mounting a small tmpfs needs root; the file size limit below covers the path";
  }
  const Unmount unmount{scratch.path()};
  save(scratch.path(), "t", {whole("w", "param", filled(kSmall, 1))});
  expect_failed_saves_change_nothing(scratch.path(), "No space left on device; free some space");
  save(scratch.path(), "t", {whole("w", "param", filled(kSmall, 3))});
  EXPECT_EQ(saved_value(scratch.path(), "t"), 3);
}

TEST(SaveFailure, KeepsThePreviousCheckpointWhenAFileMayNotGrow) {
  Scratch scratch;
  save(scratch.path(), "t", {whole("w", "param", filled(kSmall, 1))});
  const FileSizeLimit limit(1 << 20);
  expect_failed_saves_change_nothing(scratch.path(), "File too large; raise the file size limit");
}

// Counts what a save asks the kernel for, and refuses one such request.
int g_requests = 0, g_refused_request = -1, g_error = 0;
std::string g_refused_path;

int refuse_one(const char*, const std::string& path) {
  if (g_requests++ != g_refused_request) return 0;
  g_refused_path = path;
  return g_error;
}

struct Refusal {
  Refusal(int request, int error) {
    g_requests = 0;
    g_refused_request = request;
    g_error = error;
    refuse_with(refuse_one);
  }
  ~Refusal() { refuse_with(nullptr); }
};

TEST(SaveFailure, LosesNothingWhateverRequestFails) {
  Scratch scratch;
  std::vector<Piece> large = {whole("w", "param", filled(kLarge, 2)), whole("v", "param", filled(kLarge, 2))};
  large[1].apart = true;
  save(scratch.path(), "t", {whole("w", "param", filled(kLarge, 1)), whole("v", "param", filled(kLarge, 1))});
  int requests = 0;
  {
    const Refusal none(-1, 0);
    save(scratch.path(), "u", large);
    requests = g_requests;
  }
  ASSERT_GE(requests, 10);  // the blocks of a shard, its table, the manifest, the moves, `latest`
  for (const int error : {ENOSPC, EIO}) {
    for (int request = 0; request < requests; ++request) {
      std::string text;
      {
        const Refusal refusal(request, error);
        text = error_of([&] { save(scratch.path(), "t", large); });
        for (const std::string& name : list_folder(scratch.path())) {  // as a kill would leave it
          EXPECT_TRUE(name.starts_with("t") || name == "u" || name == "latest") << request << ": " << name;
        }
        abandon(scratch.path(), "t");
      }
      EXPECT_TRUE(contains(text, std::strerror(error)) && contains(text, g_refused_path)) << request << ": " << text;
      const Tensor w = at::zeros({kLarge}, at::kFloat), v = at::zeros({kLarge}, at::kFloat);
      Reader(scratch.path(), latest_tag(scratch.path())).read({whole("w", "param", w), whole("v", "param", v)});
      EXPECT_TRUE(same_bits(w, v)) << request;
      EXPECT_EQ(list_folder(scratch.path()).size(), 3u) << request;  // two checkpoints and `latest`
    }
  }
  save(scratch.path(), "t", large);
}

TEST(SaveFailure, NamesTheFolderThatMayNotBeWritten) {
  Scratch scratch;
  const std::string locked = scratch / "locked";
  make_folders(locked);
  ::chmod(scratch.path().c_str(), 0755);
  ::chmod(locked.c_str(), 0555);
  // Root may write anywhere, so the test becomes another user for a moment.
  const bool is_root = ::geteuid() == 0;
  const int left = is_root ? ::seteuid(65534) : 0;
  const std::string text = error_of([&] { write_rank(locked, "t", 0, {}, "{}"); });
  const int back = is_root ? ::seteuid(0) : 0;
  ASSERT_EQ(left + back, 0);
  EXPECT_TRUE(contains(text, growing(locked, "t") + ": Permission denied; check the folder's owner")) << text;
}

TEST(SaveFailure, CreatesTheFolderThatIsMissing) {
  Scratch scratch;
  save(scratch / "a/b/c", "t", {whole("w", "param", filled(kSmall, 1))});
  EXPECT_EQ(saved_value(scratch / "a/b/c", "t"), 1);
  EXPECT_EQ(latest_tag(scratch / "nowhere"), "");
  EXPECT_TRUE(contains(error_of([&] { Reader(scratch / "nowhere", "t"); }), "No such file"));
  EXPECT_TRUE(contains(error_of([&] { Reader(scratch / "a/b/c", "u"); }), "u/manifest.json"));
}

TEST(SaveFailure, SaysThatAFileIsInTheFoldersPlace) {
  Scratch scratch;
  write_text(scratch / "file", "x");
  EXPECT_TRUE(contains(error_of([&] { write_rank(scratch / "file", "t", 0, {}, "{}"); }), "Not a directory"));
}

TEST(SaveFailure, RefusesTagsThatAreNoFolderNames) {
  Scratch scratch;
  for (const char* tag : {"", ".", "..", "../up", "a/b", "/abs", "a..b", "line\nbreak"}) {
    EXPECT_TRUE(contains(error_of([&] { write_rank(scratch.path(), tag, 0, {}, "{}"); }), "cannot name a folder"))
        << tag;
    EXPECT_TRUE(contains(error_of([&] { commit(scratch.path(), tag, {}, true); }), "cannot name a folder")) << tag;
    EXPECT_TRUE(contains(error_of([&] { Reader(scratch.path(), tag); }), "cannot name a folder")) << tag;
    abandon(scratch.path(), tag);
  }
  for (const char* tag : {"latest", "t.tmp", "t.replaced"}) {
    EXPECT_TRUE(contains(error_of([&] { write_rank(scratch.path(), tag, 0, {}, "{}"); }), "is reserved")) << tag;
  }
  EXPECT_TRUE(contains(error_of([&] { write_rank("", "t", 0, {}, "{}"); }), "path is empty"));
  EXPECT_TRUE(std::filesystem::is_empty(scratch.path()));
  write_text(scratch / "latest", "../../etc");
  EXPECT_TRUE(contains(error_of([&] { latest_tag(scratch.path()); }), scratch / "latest"));
}

TEST(SaveFailure, RefusesToReplaceAFile) {
  Scratch scratch;
  write_text(scratch / "train.py", "y");
  const std::string text = error_of([&] { write_rank(scratch.path(), "train.py", 0, {}, "{}"); });
  EXPECT_TRUE(contains(text, scratch / "train.py: it is not a folder")) << text;
  abandon(scratch.path(), "train.py");
  EXPECT_EQ(read_text(scratch / "train.py"), "y");
}

TEST(SaveFailure, RefusesTextThatIsNotUtf8) {
  Scratch scratch;
  const Piece odd = whole("\xff\xfe", "param", filled(kSmall, 1));
  EXPECT_TRUE(contains(error_of([&] { write_rank(scratch.path(), "t", 0, {odd}, "{}"); }), "not UTF-8"));
  EXPECT_TRUE(contains(error_of([&] { write_rank(scratch.path(), "t", 0, {}, "\xff"); }), "not UTF-8"));
  write_rank(scratch.path(), "t", 0, {}, "{}");
  EXPECT_TRUE(
      contains(error_of([&] { commit(scratch.path(), "t", {.client_state_json = "\xff"}, true); }), "not UTF-8"));
  EXPECT_FALSE(exists(scratch / "t"));
}

TEST(SaveFailure, NamesTheRankThatDidNotWrite) {
  Scratch scratch;
  write_rank(scratch.path(), "t", 0, {}, "{}");
  const std::string text = error_of([&] { commit(scratch.path(), "t", {.world_size = 2}, true); });
  EXPECT_TRUE(contains(text, "rank_00001.json") && contains(text, "every rank sees")) << text;
}

TEST(SaveFailure, DropsWhatCrashedSavesOfTheTagLeft) {
  Scratch scratch;
  for (int rank = 0; rank < 3; ++rank) {
    write_rank({scratch.path(), "t", kNonce + 1}, {rank, {on_data_axis(rank), "{}"}, {}});
  }
  // Folders as version 1 left them, and as a removal that a crash interrupted left them.
  make_folders(scratch / "t.tmp");
  write_text(scratch / "t.tmp/rank_00001.safetensors", "x");
  make_folders(scratch / "t.0123456789abcdef.tmp.tmp");
  const std::vector<std::string> others = {"t.more." + nonce_text(1) + ".tmp", "t.0123.tmp", "tt.tmp", "t.tmp.old"};
  for (const std::string& name : others) make_folders(scratch / name);
  save(scratch.path(), "t", {whole("w", "param", filled(kSmall, 1))});
  EXPECT_EQ(list_folder(scratch / "t").size(), 2u);
  EXPECT_EQ(saved_value(scratch.path(), "t"), 1);
  EXPECT_EQ(list_folder(scratch.path()).size(), others.size() + 2);  // and the checkpoint and `latest`
  for (const std::string& name : others) EXPECT_TRUE(exists(scratch / name)) << name;
}

TEST(SaveFailure, LeavesAFolderOfTheUserThatIsNamedLikeAGrowingOne) {
  Scratch scratch;
  make_folders(scratch / "t.tmp");
  write_text(scratch / "t.tmp/rank_00001.safetensors", "x");
  write_text(scratch / "t.tmp/notes", "y");
  save(scratch.path(), "t", {whole("w", "param", filled(kSmall, 1))});
  EXPECT_EQ(read_text(scratch / "t.tmp/notes"), "y");
}

TEST(SaveFailure, MovesLatestOnlyWhenAsked) {
  Scratch scratch;
  save(scratch.path(), "one", {whole("w", "param", filled(kSmall, 1))});
  write_rank(scratch.path(), "two", 0, {whole("w", "param", filled(kSmall, 2))}, "{}");
  EXPECT_EQ(latest_tag(scratch.path()), "one");
  commit(scratch.path(), "two", {}, false);
  EXPECT_EQ(latest_tag(scratch.path()), "one");
  EXPECT_EQ(saved_value(scratch.path(), "two"), 2);
}

// The child saves generation after generation under one tag until it is killed; its tensors must agree at any moment.
TEST(SaveFailure, SurvivesAKillAtAnyMoment) {
  Scratch scratch;
  save(scratch.path(), "t", {whole("w", "param", filled(kSmall, -1)), whole("v", "param", filled(kSmall, -1))});
  for (int kill_after_ms : {1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144}) {
    Tensor generation = filled(kSmall, 0);
    float* values = generation.mutable_data_ptr<float>();
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      // noexcept: an error must end the child, not continue it as a second test runner.
      [&]() noexcept {
        for (int i = 0;; ++i) {
          for (int64_t k = 0; k < kSmall; ++k) values[k] = static_cast<float>(i);
          save(scratch.path(), "t", {whole("w", "param", generation), whole("v", "param", generation)});
        }
      }();
    }
    ::usleep(kill_after_ms * 1000);
    ::kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << "the child stopped by itself: " << status;
    EXPECT_EQ(latest_tag(scratch.path()), "t");
    const Tensor w = at::zeros({kSmall}, at::kFloat);
    const Tensor v = at::zeros({kSmall}, at::kFloat);
    Reader(scratch.path(), "t").read({whole("w", "param", w), whole("v", "param", v)});
    EXPECT_TRUE(same_bits(w, v));
  }
}

}  // namespace
}  // namespace deeptide::checkpoint
