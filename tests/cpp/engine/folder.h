// An engine's folder for a test, and the vectors that Python has written.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

namespace tokenweave::test {

inline const nlohmann::json& vectors() {
  static const nlohmann::json all = nlohmann::json::parse(std::ifstream(TOKENWEAVE_ENGINE_VECTORS));
  return all;
}

/// Empty at first, gone with the object.
class Folder {
 public:
  Folder() : path_(std::filesystem::path(testing::TempDir()) / ("engine_" + std::to_string(::getpid()))) {
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }

  const std::filesystem::path& path() const { return path_; }
  void write(const std::string& name, const std::string& text) const { std::ofstream(path_ / name) << text; }

  /// A message without the folder's own name.
  std::string without_path(std::string message) const {
    const std::string own = path_.string() + "/";
    for (size_t at = 0; (at = message.find(own)) != std::string::npos;) message.erase(at, own.size());
    return message;
  }

 private:
  std::filesystem::path path_;
};

}  // namespace tokenweave::test
