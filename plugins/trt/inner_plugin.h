// A V2 plugin of another library, owned by one of ours.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <string>
#include <vector>

#include "status.h"

// V2 plugins are deprecated in TensorRT 10, and TensorRT-LLM's attention is one.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace tokenweave::trt {

/// What TensorRT's registry finds a creator by.
struct PluginId {
  std::string name, version, name_space;
};
/// Whether there is such a creator, of V2 plugins.
Status check_creator(const PluginId& id);

/// Owner of an IPluginV2DynamicExt, or of none. Whatever it went through is undone in the end.
class InnerPlugin {
 public:
  /// A new one, from a creator's fields.
  static Status create(const PluginId& id, const nvinfer1::PluginFieldCollection& fields, InnerPlugin* plugin);
  /// A new one, from what serialized() gave.
  static Status deserialize(const PluginId& id, const std::vector<uint8_t>& bytes, InnerPlugin* plugin);

  InnerPlugin() = default;
  InnerPlugin(InnerPlugin&& other) noexcept { swap(other); }
  InnerPlugin& operator=(InnerPlugin&& other) noexcept {
    swap(other);
    return *this;
  }
  ~InnerPlugin();

  /// None when the plugin does not clone itself.
  InnerPlugin clone() const;

  /// Once; later calls do nothing.
  Status initialize();
  /// To an execution context; once. Without an allocator: asked for one that a context lacks, TensorRT logs an error.
  void attach();
  std::vector<uint8_t> serialized() const;

  explicit operator bool() const { return plugin_ != nullptr; }
  nvinfer1::IPluginV2DynamicExt* operator->() const { return plugin_; }

 private:
  Status take(const PluginId& id, nvinfer1::IPluginV2* made);
  void swap(InnerPlugin& other) noexcept;

  nvinfer1::IPluginV2DynamicExt* plugin_ = nullptr;
  bool initialized_ = false, attached_ = false;
};

}  // namespace tokenweave::trt

#pragma GCC diagnostic pop
