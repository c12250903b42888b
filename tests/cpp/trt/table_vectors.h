// The tuning tables of tests/vectors/table_lookup.json.
#pragma once

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "vectors.h"

namespace tokenweave::test {

/// The table of that name, and the steps that it is asked for.
inline const nlohmann::json& document(const std::string& name) {
  static const nlohmann::json all = nlohmann::json::parse(std::ifstream(TOKENWEAVE_TABLE_VECTORS));
  for (const nlohmann::json& table : all["tables"]) {
    if (table["name"] == name) return table;
  }
  throw std::out_of_range(name);
}

inline std::vector<uint8_t> packed(const std::string& name) { return bytes_of(document(name)["packed_hex"]); }

}  // namespace tokenweave::test
