/// C++: the JSON files of an engine's folder, read and checked as trtllm_tokenweave.engine does, with its messages.
/// Needs nlohmann-json.
#pragma once

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tokenweave/status.h"

namespace tokenweave {

struct TensorSpec {
  std::string name;
  std::string mode;            ///< "INPUT" or "OUTPUT"
  std::string dtype;           ///< TensorRT's name of it ("BF16")
  std::vector<int64_t> shape;  ///< -1 where known only at run time
  /// Minimum, optimum and maximum of each optimisation profile; none for outputs.
  std::vector<std::array<std::vector<int64_t>, 3>> profiles;

  bool is_input() const { return mode == "INPUT"; }
};

/// rank{r}.json: what one rank's engine was built from and for.
struct Manifest {
  std::string library, tensorrt, cuda_driver;  ///< versions of the build
  std::string gpu, compute_capability;
  int32_t tp_size = 0, rank = 0;
  std::string dtype;         ///< of the activations
  std::string mode;          ///< what the weave made of the network: "weave", "fuse" or "stock"
  std::string table_sha256;  ///< of the packed tuning table that the engine carries
  std::vector<TensorSpec> tensors;
  std::string plan_sha256;
  uint64_t plan_bytes = 0;
  nlohmann::json shared;  ///< what has to be equal on all ranks: all but the rank and its plan
};

/// What a tuning table says, in short.
struct TableSummary {
  int32_t tp_size = 0, hidden_size = 0;
  std::string dtype;
  int32_t min_tokens = 0;  ///< steps below are never split
  size_t rows = 0;         ///< steps that no row covers follow the default rule
  size_t weave_rows = 0;   ///< rows of steps that are split
};

/// config.json: what all ranks share.
struct EngineConfig {
  int32_t tp_size = 0;
  TableSummary table;
  nlohmann::json model;  ///< what the builder of the network wants to find again
};

/// What a manifest must say to be loaded here.
struct ThisProcess {
  std::string library, tensorrt, gpu, compute_capability;
  int32_t rank = 0, tp_size = 1;
};

namespace detail {

constexpr const char* kRebuild = "build the engine again on this machine";

inline Status refuse(const std::string& where, const std::string& what, const std::string& fix) {
  return error(TW_INVALID_ARGUMENT, where + ": " + what + ". Fix: " + fix);
}

inline Status missing(const std::filesystem::path& path) {
  return refuse(path.string(), "is missing", "give the folder of a whole engine, or build it again");
}

inline Result<nlohmann::json> read_json(const std::filesystem::path& path) {
  std::error_code failure;
  if (!std::filesystem::exists(path, failure) && !failure) return missing(path);
  std::ifstream file(path);
  if (!file) return error(TW_INVALID_ARGUMENT, path.string() + ": cannot be read: " + std::strerror(errno));
  nlohmann::json data = nlohmann::json::parse(file, nullptr, false);
  if (data.is_discarded()) return refuse(path.string(), "is not JSON", kRebuild);
  const nlohmann::json version = data.is_object() ? data.value("format_version", nlohmann::json()) : nlohmann::json();
  if (version != 1) {
    const std::string found = version.is_null() ? "None" : version.dump();
    return refuse(path.string(), "format_version is " + found + ", expected 1", kRebuild);
  }
  return data;
}

/// Fills something from JSON; what is not as it should be becomes an error that names the file.
template <typename Fill>
Status parse(const std::filesystem::path& path, Fill fill) {
  try {
    fill();
    return {};
  } catch (const nlohmann::json::exception& exception) {
    return refuse(path.string(), exception.what(), kRebuild);
  }
}

/// Numbers of a version: "10.13.3.9" and "10.13.3.post1" give 10, 13, 3 and what follows, as far as it is numbers.
inline std::vector<int64_t> version_numbers(const std::string& version) {
  std::vector<int64_t> numbers;
  for (size_t at = 0; at < version.size() && version[at] >= '0' && version[at] <= '9';) {
    size_t length = 0;
    numbers.push_back(std::stoll(version.substr(at, 9), &length));
    at += length;
    if (at < version.size() && version[at] != '.') break;
    ++at;
  }
  return numbers;
}

/// Python's TensorRT names the build, or not; what only one of both names is not compared.
inline bool same_tensorrt(const std::string& built, const std::string& here) {
  std::vector<int64_t> left = version_numbers(built), right = version_numbers(here);
  const size_t common = std::min(left.size(), right.size());
  left.resize(common);
  right.resize(common);
  return common >= 3 && left == right;
}

inline std::string mpirun(int32_t ranks) { return "(mpirun -n " + std::to_string(ranks) + ")"; }

}  // namespace detail

inline std::filesystem::path plan_file(const std::filesystem::path& folder, int32_t rank) {
  return folder / ("rank" + std::to_string(rank) + ".engine");
}

inline std::filesystem::path manifest_file(const std::filesystem::path& folder, int32_t rank) {
  return folder / ("rank" + std::to_string(rank) + ".json");
}

/// config.json, of a group of `tp_size` ranks.
inline Result<EngineConfig> read_config(const std::filesystem::path& folder, int32_t tp_size) {
  const std::filesystem::path path = folder / "config.json";
  auto data = detail::read_json(path);
  if (!data.ok()) return data.status();
  EngineConfig config;
  TW_RETURN_IF_ERROR(detail::parse(path, [&] {
    data->at("tp_size").get_to(config.tp_size);
    config.model = data->value("model", nlohmann::json::object());
    const nlohmann::json &table = data->at("table"), &key = table.at("key");
    key.at("tp_size").get_to(config.table.tp_size);
    key.at("hidden_size").get_to(config.table.hidden_size);
    key.at("dtype").get_to(config.table.dtype);
    table.at("min_tokens").get_to(config.table.min_tokens);
    for (const nlohmann::json& row : table.at("rows")) {
      ++config.table.rows;
      if (row.at("mode") == "weave") ++config.table.weave_rows;
    }
  }));
  if (config.tp_size == tp_size) return config;
  const std::string built = std::to_string(config.tp_size), here = std::to_string(tp_size);
  return detail::refuse(path.string() + ": tp_size", "tp_size is " + built + ", but " + here + " ranks run",
                        "start " + built + " " + detail::mpirun(config.tp_size) + ", or build it for " + here);
}

inline Result<Manifest> read_manifest(const std::filesystem::path& folder, int32_t rank) {
  const std::filesystem::path path = manifest_file(folder, rank);
  auto data = detail::read_json(path);
  if (!data.ok()) return data.status();
  Manifest found;
  TW_RETURN_IF_ERROR(detail::parse(path, [&] {
    const nlohmann::json& json = *data;
    for (const auto& [name, field] : {std::pair<const char*, std::string*>{"library", &found.library},
                                      {"tensorrt", &found.tensorrt},
                                      {"cuda_driver", &found.cuda_driver},
                                      {"gpu", &found.gpu},
                                      {"compute_capability", &found.compute_capability},
                                      {"dtype", &found.dtype},
                                      {"mode", &found.mode},
                                      {"table_sha256", &found.table_sha256},
                                      {"plan_sha256", &found.plan_sha256}}) {
      json.at(name).get_to(*field);
    }
    json.at("tp_size").get_to(found.tp_size);
    json.at("rank").get_to(found.rank);
    json.at("plan_bytes").get_to(found.plan_bytes);
    for (const nlohmann::json& tensor : json.at("tensors")) {
      TensorSpec spec{tensor.at("name"), tensor.at("mode"), tensor.at("dtype"), tensor.at("shape"), {}};
      tensor.at("profiles").get_to(spec.profiles);
      found.tensors.push_back(std::move(spec));
    }
    found.shared = json;
    for (const char* const own : {"rank", "plan_sha256", "plan_bytes"}) found.shared.erase(own);
  }));
  return found;
}

/// Refuses an engine that was built for something else; `where` is the manifest's file.
inline Status check_manifest(const Manifest& manifest, const ThisProcess& here, const std::string& where) {
  const auto differs = [&](const std::string& field, const std::string& found, const std::string& wanted,
                           const std::string& fix) {
    return detail::refuse(where + ": " + field, field + " is " + found + ", but " + wanted + " is needed here", fix);
  };
  const std::string or_rebuild = std::string(", or ") + detail::kRebuild;
  if (manifest.library != here.library) {
    return differs("library", manifest.library, here.library,
                   "install trtllm-tokenweave " + manifest.library + or_rebuild);
  }
  if (!detail::same_tensorrt(manifest.tensorrt, here.tensorrt)) {
    return differs("tensorrt", manifest.tensorrt, here.tensorrt, "install TensorRT " + manifest.tensorrt + or_rebuild);
  }
  if (manifest.gpu != here.gpu) {
    return differs("gpu", manifest.gpu, here.gpu, "run it on a " + manifest.gpu + or_rebuild);
  }
  if (manifest.compute_capability != here.compute_capability) {
    return differs("compute_capability", manifest.compute_capability, here.compute_capability,
                   "run it on such a GPU" + or_rebuild);
  }
  if (manifest.tp_size != here.tp_size) {
    const std::string built = std::to_string(manifest.tp_size);
    return differs("tp_size", built, std::to_string(here.tp_size),
                   "start " + built + " ranks " + detail::mpirun(manifest.tp_size) + ", or build it for this many");
  }
  if (manifest.rank != here.rank) {
    return differs("rank", std::to_string(manifest.rank), std::to_string(here.rank), "do not rename engine files");
  }
  return {};
}

/// Refuses engines that were not built together, as far as the other ranks' manifests lie in the same folder.
inline Status check_ranks(const std::filesystem::path& folder, const Manifest& manifest) {
  for (int32_t rank = 0; rank < manifest.tp_size; ++rank) {
    std::error_code failure;
    if (rank == manifest.rank || !std::filesystem::exists(manifest_file(folder, rank), failure)) continue;
    const auto other = read_manifest(folder, rank);
    if (!other.ok()) return other.status();
    for (const auto& [field, mine] : manifest.shared.items()) {
      if (other->shared.contains(field) && other->shared.at(field) == mine) continue;
      return detail::refuse(
          folder.string(),
          field + " differs between rank " + std::to_string(manifest.rank) + " and rank " + std::to_string(rank),
          "build the engines of all ranks together");
    }
  }
  return {};
}

}  // namespace tokenweave
