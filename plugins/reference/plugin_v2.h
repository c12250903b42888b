// What the plugins here share: TensorRT-LLM's plugins are IPluginV2DynamicExt, TensorRT's older kind.
#pragma once

#include <NvInferRuntime.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fields.h"
#include "guard.h"
#include "make_plugin.h"
#include "packed_fields.h"
#include "status.h"

namespace tokenweave::reference {

inline constexpr const char* kNamespace = "tensorrt_llm";
inline constexpr const char* kVersion = "1";

/// How many a tensor has.
inline size_t elements(const nvinfer1::Dims& dims) {
  size_t count = 1;
  for (int32_t i = 0; i < dims.nbDims; ++i) count *= static_cast<size_t>(dims.d[i]);
  return count;
}

/// A plugin of which everything but its work is written. `Derived` has kName, a copy constructor, a constructor from
/// Fields and TensorRTPhase, and may hide start(). `Fields` is as make_plugin has it; attributes that configurePlugin
/// learns are visited in TensorRTPhase::kRUNTIME only.
///
/// A plugin that a creator made belongs to a build, and one that was deserialised to an engine, unless IS_BUILDING=1.
template <typename Derived, typename FieldsOfDerived>
class PluginV2 : public nvinfer1::IPluginV2DynamicExt {
 public:
  using Fields = FieldsOfDerived;

  const char* getPluginType() const noexcept final { return Derived::kName; }
  const char* getPluginVersion() const noexcept final { return kVersion; }
  void setPluginNamespace(const char* name) noexcept final {
    run([&]() -> Status {
      namespace_ = name;
      return {};
    });
  }
  const char* getPluginNamespace() const noexcept final { return namespace_.c_str(); }
  void destroy() noexcept final { delete static_cast<Derived*>(this); }

  nvinfer1::IPluginV2DynamicExt* clone() const noexcept final {
    std::unique_ptr<Derived> copy;
    run([&]() -> Status {
      copy = std::make_unique<Derived>(static_cast<const Derived&>(*this));
      return {};
    });
    return copy.release();
  }

  /// TensorRT initialises what it deserialised, and runs clones of it that it only attaches. Attaching cannot fail:
  /// enqueue does, then.
  int32_t initialize() noexcept final {
    return run([&]() -> Status { return building_ ? Status{} : static_cast<Derived*>(this)->start(); });
  }
  void attachToContext(cudnnContext*, cublasContext*, nvinfer1::IGpuAllocator*) noexcept final { (void)initialize(); }
  void terminate() noexcept override {}

  size_t getSerializationSize() const noexcept final {
    size_t bytes = 0;
    run([&]() -> Status {
      bytes = packed().size();
      return {};
    });
    return bytes;
  }
  void serialize(void* buffer) const noexcept final {
    run([&]() -> Status {
      const std::vector<uint8_t> bytes = packed();
      std::memcpy(buffer, bytes.data(), bytes.size());
      return {};
    });
  }

  size_t getWorkspaceSize(const nvinfer1::PluginTensorDesc*, int32_t, const nvinfer1::PluginTensorDesc*,
                          int32_t) const noexcept override {
    return 0;
  }

 protected:
  PluginV2(std::string where, Fields&& fields, nvinfer1::TensorRTPhase phase)
      : fields_(std::move(fields)), where_(std::move(where)), building_(trt::is_building(phase)) {}
  PluginV2(const PluginV2&) = default;

  /// Gets what the plugin runs with; called outside of builds, maybe several times. May meet the other ranks.
  Status start() { return {}; }

  /// For enqueue: true in a build, where it does nothing.
  bool inert() const {
    static std::atomic<bool> warned{false};
    if (building_ && !warned.exchange(true)) trt::warn_of_skipping(where_);
    return building_;
  }

  /// 0 when `body`, which returns a Status, succeeds, as TensorRT's interface has it.
  template <typename Body>
  int32_t run(Body body) const noexcept {
    return trt::succeeds(where_.c_str(), body) ? 0 : 1;
  }

  Fields fields_;

 private:
  std::vector<uint8_t> packed() const {
    Fields fields = fields_;
    trt::FieldWriter writer;
    fields.visit(writer, nvinfer1::TensorRTPhase::kRUNTIME);
    return trt::PackedFields::write(*writer.values());
  }

  std::string where_;  // names the layer in messages
  std::string namespace_ = kNamespace;
  bool building_;
};

/// One creator for every such plugin type.
template <typename PluginType>
class CreatorV2 final : public nvinfer1::IPluginCreator {
 public:
  CreatorV2() {
    fields_.visit(names_, nvinfer1::TensorRTPhase::kBUILD);
    collection_ = names_.names();
  }

  const char* getPluginName() const noexcept override { return PluginType::kName; }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override { return collection_; }

  nvinfer1::IPluginV2* createPlugin(const char* name, const nvinfer1::PluginFieldCollection* given) noexcept override {
    std::unique_ptr<PluginType> plugin;
    trt::succeeds(PluginType::kName,
                  [&] { return trt::make_plugin(name, given, nvinfer1::TensorRTPhase::kBUILD, &plugin); });
    return plugin.release();
  }

  nvinfer1::IPluginV2* deserializePlugin(const char* name, const void* data, size_t bytes) noexcept override {
    std::unique_ptr<PluginType> plugin;
    trt::succeeds(PluginType::kName, [&]() -> Status {
      const auto* const first = static_cast<const uint8_t*>(data);
      trt::PackedFields stored;
      const Status read = trt::PackedFields::read({first, first + (first != nullptr ? bytes : 0)}, &stored);
      if (!read.ok()) return trt::named(name, error(read.code, read.message + ". Fix: rebuild the engine"));
      return trt::make_plugin(name, stored.collection(), nvinfer1::TensorRTPhase::kRUNTIME, &plugin);
    });
    return plugin.release();
  }

  /// The namespace is TensorRT-LLM's, whatever TensorRT's registry calls it.
  void setPluginNamespace(const char*) noexcept override {}
  const char* getPluginNamespace() const noexcept override { return kNamespace; }

 private:
  typename PluginType::Fields fields_;
  trt::FieldWriter names_;
  const nvinfer1::PluginFieldCollection* collection_ = nullptr;
};

}  // namespace tokenweave::reference
