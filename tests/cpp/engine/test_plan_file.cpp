#include <gtest/gtest.h>

#include "folder.h"
#include "tokenweave/plan_file.h"

namespace tokenweave::test {
namespace {

/// Of a plan "plan".
Manifest manifest() {
  Manifest made;
  made.rank = 1;
  made.plan_bytes = 4;
  made.plan_sha256 = vectors()["folders"]["manifest"]["plan_sha256"];
  return made;
}

TEST(PlanFile, IsReadWhenItIsTheManifests) {
  const Folder folder;
  folder.write("rank1.engine", "plan");
  const auto plan = PlanFile::open(folder.path(), manifest());
  ASSERT_TRUE(plan.ok()) << plan.status().message;
  EXPECT_EQ(std::string(static_cast<const char*>(plan->data()), plan->size()), "plan");
}

TEST(PlanFile, IsRefusedElse) {
  const Folder folder;
  const auto refusal = [&] { return folder.without_path(PlanFile::open(folder.path(), manifest()).status().message); };
  const std::string damaged = ". Fix: the engine file is damaged or of another build: copy it again, or build it again";
  EXPECT_EQ(refusal(), "rank1.engine: is missing. Fix: give the folder of a whole engine, or build it again");
  folder.write("rank1.engine", "");
  EXPECT_EQ(refusal(), "rank1.engine: plan_bytes: plan_bytes is 4, but 0 is needed here" + damaged);
  folder.write("rank1.engine", "plot");
  EXPECT_EQ(refusal().rfind("rank1.engine: plan_sha256: plan_sha256 is " + manifest().plan_sha256 + ", but ", 0), 0u)
      << refusal();
  std::filesystem::remove(folder.path() / "rank1.engine");
  std::filesystem::create_directory(folder.path() / "rank1.engine");
  EXPECT_NE(refusal(), "");
}

}  // namespace
}  // namespace tokenweave::test
