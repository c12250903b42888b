#include "fake_tensorrt.h"

#include <dlfcn.h>

#include <string>
#include <utility>
#include <vector>

// V2 plugins are deprecated.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace tokenweave::test {
namespace {

int32_t version = 100600;
std::string logged, taken;
nvinfer1::IPluginCreatorInterface* only_creator = nullptr;
std::string only_namespace;
std::vector<nvinfer1::IPluginCreatorInterface*> loaded_creators;

struct Logger final : nvinfer1::ILogger {
  void log(Severity severity, const char* message) noexcept override {
    logged = std::to_string(static_cast<int>(severity)) + " " + message;
  }
};

struct Finder final : nvinfer1::ILoggerFinder {
  nvinfer1::ILogger* findLogger() override {
    static Logger logger;
    return &logger;
  }
};

/// Name and version.
std::pair<std::string, std::string> names(nvinfer1::IPluginCreatorInterface& creator) {
  if (std::string(creator.getInterfaceInfo().kind) == "PLUGIN CREATOR_V1") {
    auto& v2 = static_cast<nvinfer1::IPluginCreator&>(creator);
    return {v2.getPluginName(), v2.getPluginVersion()};
  }
  auto& v3 = static_cast<nvinfer1::IPluginCreatorV3One&>(creator);
  return {v3.getPluginName(), v3.getPluginVersion()};
}

std::string namespace_of(nvinfer1::IPluginCreatorInterface& creator) {
  if (std::string(creator.getInterfaceInfo().kind) == "PLUGIN CREATOR_V1")
    return static_cast<nvinfer1::IPluginCreator&>(creator).getPluginNamespace();
  return static_cast<nvinfer1::IPluginCreatorV3One&>(creator).getPluginNamespace();
}

/// Finds creators and loads libraries of them, and does nothing else.
struct Registry final : nvinfer1::IPluginRegistry {
  nvinfer1::IPluginCreatorInterface* getCreator(const char* name, const char* wanted_version,
                                                const char* name_space) noexcept override {
    for (nvinfer1::IPluginCreatorInterface* const creator : loaded_creators) {
      if (names(*creator) == std::pair<std::string, std::string>(name, wanted_version) &&
          namespace_of(*creator) == name_space) {
        return creator;
      }
    }
    if (only_creator == nullptr || name_space != only_namespace) return nullptr;
    return names(*only_creator) == std::pair<std::string, std::string>(name, wanted_version) ? only_creator : nullptr;
  }

  bool registerCreator(nvinfer1::IPluginCreator&, const char*) noexcept override { return false; }
  nvinfer1::IPluginCreator* const* getPluginCreatorList(int32_t*) const noexcept override { return nullptr; }
  nvinfer1::IPluginCreator* getPluginCreator(const char*, const char*, const char*) noexcept override {
    return nullptr;
  }
  void setErrorRecorder(nvinfer1::IErrorRecorder*) noexcept override {}
  nvinfer1::IErrorRecorder* getErrorRecorder() const noexcept override { return nullptr; }
  bool deregisterCreator(const nvinfer1::IPluginCreator&) noexcept override { return false; }
  bool isParentSearchEnabled() const override { return false; }
  void setParentSearchEnabled(bool) override {}
  PluginLibraryHandle loadLibrary(const char* path) noexcept override {
    void* const library = dlopen(path, RTLD_LAZY);
    using GetCreators = nvinfer1::IPluginCreatorInterface* const* (*)(int32_t&);
    const auto get = library != nullptr ? reinterpret_cast<GetCreators>(dlsym(library, "getCreators")) : nullptr;
    if (get == nullptr) return nullptr;
    int32_t count = 0;
    nvinfer1::IPluginCreatorInterface* const* const first = get(count);
    loaded_creators.insert(loaded_creators.end(), first, first + count);
    return library;
  }
  void deregisterLibrary(PluginLibraryHandle) noexcept override {}
  bool registerCreator(nvinfer1::IPluginCreatorInterface&, const char*) noexcept override { return false; }
  nvinfer1::IPluginCreatorInterface* const* getAllCreators(int32_t*) const noexcept override { return nullptr; }
  bool deregisterCreator(const nvinfer1::IPluginCreatorInterface&) noexcept override { return false; }
  nvinfer1::IPluginResource* acquirePluginResource(const char*, nvinfer1::IPluginResource*) noexcept override {
    return nullptr;
  }
  int32_t releasePluginResource(const char*) noexcept override { return -1; }
  nvinfer1::IPluginCreatorInterface* const* getAllCreatorsRecursive(int32_t*) noexcept override { return nullptr; }
};

}  // namespace

nvinfer1::ILoggerFinder* fake_logger_finder() {
  static Finder finder;
  return &finder;
}

const char* take_logged() {
  taken = std::move(logged);
  logged.clear();
  return taken.c_str();
}

void set_fake_version(int32_t value) { version = value; }

void set_fake_creator(nvinfer1::IPluginCreatorInterface* creator, const char* name_space) {
  only_creator = creator;
  only_namespace = name_space;
}

}  // namespace tokenweave::test

extern "C" {

__attribute__((visibility("default"))) int32_t getInferLibVersion() noexcept { return tokenweave::test::version; }

__attribute__((visibility("default"))) nvinfer1::IPluginRegistry* getPluginRegistry() noexcept {
  static tokenweave::test::Registry registry;
  return &registry;
}

}  // extern "C"
