// One creator for every plugin type of ours.
#pragma once

#include <memory>

#include "fields.h"
#include "make_plugin.h"
#include "plugin.h"

namespace tokenweave::trt {

/// `PluginType`: see make_plugin; also
///   Status created()                            makes what the plugin needs besides its attributes
template <typename PluginType>
class Creator final : public nvinfer1::IPluginCreatorV3One {
 public:
  Creator() {
    fields_.visit(names_, nvinfer1::TensorRTPhase::kBUILD);
    collection_ = names_.names();
  }

  nvinfer1::IPluginV3* createPlugin(const char* name, const nvinfer1::PluginFieldCollection* given,
                                    nvinfer1::TensorRTPhase phase) noexcept override {
    std::unique_ptr<PluginType> plugin;
    const bool made = succeeds(PluginType::kName, [&]() -> Status {
      TW_RETURN_IF_ERROR(make_plugin(name, given, phase, &plugin));
      return named(name, plugin->created());
    });
    return made ? plugin.release() : nullptr;
  }

  const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override { return collection_; }
  const char* getPluginName() const noexcept override { return PluginType::kName; }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }

 private:
  typename PluginType::Fields fields_;
  FieldWriter names_;
  const nvinfer1::PluginFieldCollection* collection_ = nullptr;
};

}  // namespace tokenweave::trt
