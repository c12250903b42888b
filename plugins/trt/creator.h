// One creator for every plugin type.
#pragma once

#include <memory>
#include <string>

#include "fields.h"
#include "plugin.h"

namespace tokenweave::trt {

/// `PluginType` has kName, a default constructible type Fields with
///   void visit(FieldVisitor&, TensorRTPhase)   lists the attributes of a phase
///   Status check(TensorRTPhase)                 checks them against one another, and derives what they imply
/// and a constructor from Fields and TensorRTPhase.
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
    const char* const layer = name != nullptr ? name : "";
    succeeds(PluginType::kName, [&]() -> Status {
      const auto named = [layer](Status status) {
        if (!status.ok() && *layer != '\0') status.message = "layer '" + std::string(layer) + "': " + status.message;
        return status;
      };
      typename PluginType::Fields fields;
      FieldReader reader(given);
      fields.visit(reader, phase);
      TW_RETURN_IF_ERROR(named(reader.status()));
      TW_RETURN_IF_ERROR(named(fields.check(phase)));
      plugin = std::make_unique<PluginType>(std::move(fields), phase);
      return {};
    });
    return plugin.release();
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
