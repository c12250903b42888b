#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

namespace {

const std::string kPreload = "LD_PRELOAD=" PRELOAD " ";
const std::string kPlugins = "TOKENWEAVE_TRT_LIBRARY=" PLUGINS " ";
const std::string kKnown = "runtime 1, plugins 1\n", kUnknown = "runtime 1, plugins 0\n";

/// Both outputs of a command that ends well; `variables` as for env.
std::string run(const std::string& variables, const std::string& command) {
  FILE* const pipe =
      popen(("env -u LD_PRELOAD -u TOKENWEAVE_TRT_LIBRARY " + variables + command + " 2>&1").c_str(), "r");
  std::string output;
  std::array<char, 4096> part{};
  for (size_t count = 0; (count = fread(part.data(), 1, part.size(), pipe)) > 0;) output.append(part.data(), count);
  const int status = pclose(pipe);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << command << ": " << output;
  return output;
}

}  // namespace

TEST(Preload, GivesItsPluginsToABackendThatLinksTensorRt) {
  EXPECT_EQ(run("", HOST " " BACKEND), kUnknown + kUnknown);
  EXPECT_EQ(run(kPreload + kPlugins, HOST " " BACKEND), kKnown + kKnown);
}

TEST(Preload, GivesItsPluginsToABackendWhoseHostLoadedTensorRt) {
  EXPECT_EQ(run(kPreload + kPlugins, HOST " " STAND_IN " " UNLINKED_BACKEND), kKnown + kKnown);
}

TEST(Preload, FindsThePluginsBesideItself) {
  const std::filesystem::path folder = std::filesystem::path(testing::TempDir()) / "preload_beside";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  std::filesystem::create_symlink(PRELOAD, folder / "libtokenweave_preload.so");
  const std::string preload = "LD_PRELOAD=" + (folder / "libtokenweave_preload.so").string() + " ";
  const std::string without = run(preload, HOST " " BACKEND);
  EXPECT_NE(without.find((folder / "libtokenweave_trt.so").string() + ": cannot open"), std::string::npos) << without;
  std::filesystem::create_symlink(PLUGINS, folder / "libtokenweave_trt.so");
  EXPECT_EQ(run(preload, HOST " " BACKEND), kKnown + kKnown);
  std::filesystem::remove_all(folder);
}

TEST(Preload, ReportsAnErrorOnceAndLetsTheHostGoOn) {
  const std::string missing = run(kPreload + "TOKENWEAVE_TRT_LIBRARY=/nowhere.so ", HOST " " BACKEND);
  EXPECT_EQ(missing.rfind("[TokenWeave] preload: /nowhere.so: cannot open shared object file", 0), 0u) << missing;
  EXPECT_EQ(missing.find("[TokenWeave]", 1), std::string::npos) << missing;
  EXPECT_NE(missing.find("Fix: set TOKENWEAVE_TRT_LIBRARY"), std::string::npos) << missing;
  EXPECT_NE(missing.find(kUnknown + kUnknown), std::string::npos) << missing;
  // A library that has no plugins.
  const std::string other = run(kPreload + "TOKENWEAVE_TRT_LIBRARY=" PRELOAD " ", HOST " " BACKEND);
  EXPECT_NE(other.find("TensorRT does not take its plugins"), std::string::npos) << other;
  EXPECT_NE(other.find(kUnknown + kUnknown), std::string::npos) << other;
}

TEST(Preload, RefusesAnotherMajorVersion) {
  const std::string output = run(kPreload + kPlugins + "STAND_IN_VERSION=110000 ", HOST " " BACKEND);
  EXPECT_NE(output.find("are for TensorRT 10, the process runs one of version number 110000"), std::string::npos);
  EXPECT_NE(output.find(kUnknown + kUnknown), std::string::npos) << output;
}

TEST(Preload, CallersWithoutTensorRtGetNoRuntime) {
  // The function is there, but nothing to call.
  const std::string call =
      "python3 -c \"import ctypes; f = ctypes.CDLL(None).createInferRuntime_INTERNAL; f.restype = ctypes.c_void_p; "
      "print(f(None, 101600), f(None, 101600))\"";
  const std::string output = run(kPreload + kPlugins, call);
  EXPECT_NE(output.find("None None\n"), std::string::npos) << output;
  EXPECT_EQ(output.rfind("[TokenWeave] preload: no loaded library", 0), 0u) << output;
  EXPECT_EQ(output.find("[TokenWeave]", 1), std::string::npos) << output;
}

TEST(Preload, LeavesOtherProcessesAlone) {
  EXPECT_EQ(run(kPreload + kPlugins, "/bin/true"), "");
  EXPECT_EQ(run(kPreload + kPlugins, "python3 -c 'print(1)'"), "1\n");
  // Nothing else is loaded for its sake.
  const std::string maps = run(kPreload + kPlugins, "cat /proc/self/maps");
  EXPECT_NE(maps.find("libtokenweave_preload.so"), std::string::npos);
  for (const char* const library : {"libtokenweave_trt", "nvinfer", "libstdc++", "libcuda"}) {
    EXPECT_EQ(maps.find(library), std::string::npos) << library;
  }
}

TEST(Preload, GivesItsPluginsToTensorRt) {
  const char* const root = std::getenv("TENSORRT_ROOT");
  for (const char* const folder : {"", "/lib"}) {
    const std::filesystem::path path = std::string(root != nullptr ? root : "") + folder;
    if (root == nullptr || !std::filesystem::exists(path / "libnvinfer.so.10")) continue;
    const std::string real = "LD_LIBRARY_PATH=" + path.string() + " ";
    EXPECT_EQ(run(real, HOST " " BACKEND).find("plugins 1"), std::string::npos);
    const std::string output = run(real + kPreload + kPlugins, HOST " " BACKEND);
    EXPECT_NE(output.find("plugins 1"), std::string::npos) << output;
    EXPECT_EQ(output.find("plugins 0"), std::string::npos) << output;
    EXPECT_EQ(output.find("[TokenWeave]"), std::string::npos) << output;
    return;
  }
  GTEST_SKIP() << "no TensorRT 10: set TENSORRT_ROOT to a folder that has libnvinfer.so.10";
}
