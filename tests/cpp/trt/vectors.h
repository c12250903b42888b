// What the files of tests/vectors have in common.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tokenweave::test {

inline std::vector<uint8_t> bytes_of(const std::string& hex) {
  std::vector<uint8_t> bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2)
    bytes.push_back(static_cast<uint8_t>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  return bytes;
}

}  // namespace tokenweave::test
