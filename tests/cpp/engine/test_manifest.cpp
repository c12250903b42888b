// Manifests are read and refused as Python reads and refuses them.
#include <gtest/gtest.h>

#include "folder.h"
#include "tokenweave/manifest.h"
#include "tokenweave/tokenweave.h"

namespace tokenweave::test {
namespace {

ThisProcess here() {
  const nlohmann::json& told = vectors()["here"];
  return {vectors()["folders"]["manifest"]["library"], told["tensorrt"], told["gpu"], told["compute_capability"], 1, 2};
}

/// As Engine::open does.
Status check(const Folder& folder) {
  const auto config = read_config(folder.path(), 2);
  if (!config.ok()) return config.status();
  const auto manifest = read_manifest(folder.path(), 1);
  if (!manifest.ok()) return manifest.status();
  TW_RETURN_IF_ERROR(check_manifest(*manifest, here(), manifest_file(folder.path(), 1).string()));
  return check_ranks(folder.path(), *manifest);
}

void write(const Folder& folder, const std::string& changed, const nlohmann::json& change) {
  for (const char* const name : {"config", "manifest"}) {
    const std::string file = std::string(name) == "config" ? "config.json" : "rank1.json";
    nlohmann::json data = vectors()["folders"][name];
    if (file == changed && change.is_null()) continue;
    if (file == changed) data.update(change);
    folder.write(file, data.dump());
  }
}

TEST(Manifest, IsReadWhole) {
  const Folder folder;
  write(folder, "", {});
  EXPECT_EQ(check(folder).message, "");
  const auto config = read_config(folder.path(), 2);
  ASSERT_TRUE(config.ok());
  EXPECT_EQ(config->table.hidden_size, 4096);
  EXPECT_EQ(config->table.dtype, "bfloat16");
  EXPECT_EQ(config->table.min_tokens, 1024);
  EXPECT_EQ(config->model["layers"], 1);
  const auto manifest = read_manifest(folder.path(), 1);
  ASSERT_TRUE(manifest.ok());
  EXPECT_EQ(manifest->mode, "weave");
  EXPECT_EQ(manifest->plan_bytes, 4u);
  ASSERT_EQ(manifest->tensors.size(), 2u);
  EXPECT_TRUE(manifest->tensors[0].is_input());
  EXPECT_EQ(manifest->tensors[0].profiles.at(0)[2], std::vector<int64_t>{64});
  EXPECT_FALSE(manifest->tensors[1].is_input());
  EXPECT_EQ(manifest->tensors[1].shape, (std::vector<int64_t>{-1, 96}));
}

TEST(Manifest, IsRefusedWithPythonsWords) {
  for (const nlohmann::json& one : vectors()["folders"]["refused"]) {
    const Folder folder;
    write(folder, one["file"], one["change"]);
    const Status status = check(folder);
    EXPECT_EQ(folder.without_path(status.message), one["error"]);
    EXPECT_EQ(status.code, TW_INVALID_ARGUMENT);
  }
}

TEST(Manifest, DamageIsAnErrorThatNamesTheFile) {
  const Folder folder;
  write(folder, "", {});
  folder.write("rank1.json", "{");
  EXPECT_EQ(folder.without_path(check(folder).message),
            "rank1.json: is not JSON. Fix: build the engine again on this machine");
  write(folder, "rank1.json", {{"plan_bytes", "many"}});
  EXPECT_EQ(folder.without_path(check(folder).message).rfind("rank1.json: ", 0), 0u);
  nlohmann::json without = vectors()["folders"]["config"];
  without.erase("table");
  write(folder, "", {});
  folder.write("config.json", without.dump());
  EXPECT_NE(check(folder).message.find("'table' not found"), std::string::npos) << check(folder).message;
}

TEST(Manifest, WhatCannotBeReadIsAnErrorNotAnException) {
  const Folder folder;
  const auto refusal = [](const std::filesystem::path& place) { return read_config(place, 2).status(); };
  EXPECT_EQ(
      folder.without_path(refusal(folder.path() / "none").message).rfind("none/config.json: is missing. Fix: ", 0), 0u);
  std::filesystem::create_symlink("config.json", folder.path() / "config.json");  // a loop
  EXPECT_EQ(folder.without_path(refusal(folder.path()).message),
            "config.json: cannot be read: Too many levels of symbolic links");
  EXPECT_EQ(refusal(folder.path()).code, TW_INVALID_ARGUMENT);
  EXPECT_NE(refusal(std::string(300, 'x')).message.find(": cannot be read: File name too long"), std::string::npos);
}

TEST(Manifest, TensorRtIsComparedAsFarAsBothNameIt) {
  EXPECT_TRUE(detail::same_tensorrt("10.13.3.9", "10.13.3.9"));
  EXPECT_TRUE(detail::same_tensorrt("10.6.0.post1", "10.6.0.26"));
  EXPECT_TRUE(detail::same_tensorrt("10.6.0", "10.6.0.26"));
  EXPECT_FALSE(detail::same_tensorrt("10.13.3.9", "10.13.3.10"));
  EXPECT_FALSE(detail::same_tensorrt("10.13.3", "10.13.2.9"));
  EXPECT_FALSE(detail::same_tensorrt("10", "10.6.0.26"));
  EXPECT_FALSE(detail::same_tensorrt("", "10.6.0.26"));
}

TEST(Manifest, RanksThatWereNotBuiltTogetherAreRefused) {
  const Folder folder;
  write(folder, "", {});
  nlohmann::json other = vectors()["folders"]["manifest"];
  other.update({{"rank", 0}, {"plan_sha256", std::string(64, '0')}, {"plan_bytes", 7}});
  folder.write("rank0.json", other.dump());
  EXPECT_EQ(check(folder).message, "");
  other["mode"] = "fuse";
  folder.write("rank0.json", other.dump());
  const std::string message = check(folder).message;
  EXPECT_NE(message.find(": mode differs between rank 1 and rank 0. Fix: build the engines of all ranks together"),
            std::string::npos)
      << message;
}

}  // namespace
}  // namespace tokenweave::test
