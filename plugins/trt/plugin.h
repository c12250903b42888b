// What all plugins of ours share: identity and capabilities.
#pragma once

#include <NvInferRuntime.h>
#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <utility>

#include "fields.h"
#include "guard.h"
#include "status.h"

namespace tokenweave::trt {

inline constexpr const char* kNamespace = "tokenweave";
inline constexpr const char* kVersion = "1";

enum class Half : int32_t { kPrefix = 0, kSuffix = 1, kWhole = 2 };

inline const char* name_of(Half half) {
  return half == Half::kPrefix ? "prefix" : half == Half::kSuffix ? "suffix" : "whole";
}

class Plugin : public nvinfer1::IPluginV3,
               public nvinfer1::IPluginV3OneCore,
               public nvinfer1::IPluginV3OneBuildV2,
               public nvinfer1::IPluginV3OneRuntime {
 public:
  nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept final;
  const char* getPluginVersion() const noexcept final { return kVersion; }
  const char* getPluginNamespace() const noexcept final { return kNamespace; }
  const char* getMetadataString() noexcept final { return where_.c_str(); }
  /// Nothing is prepared for a shape, unless a plugin overrides it.
  int32_t onShapeChange(const nvinfer1::PluginTensorDesc*, int32_t, const nvinfer1::PluginTensorDesc*,
                        int32_t) noexcept override {
    return 0;
  }

 protected:
  /// `where` names the layer in messages, for example "AllReduceRmsNorm site 3 suffix".
  Plugin(std::string where, nvinfer1::TensorRTPhase phase) : where_(std::move(where)), building_(is_building(phase)) {}

  bool building() const { return building_; }
  /// For enqueue: true in a build, where it does nothing; counts it.
  bool inert() const;

  /// 0 when `body` succeeds, as TensorRT's interface has it.
  template <typename Body>
  int32_t run(Body body) const noexcept {
    return succeeds(where_.c_str(), body) ? 0 : 1;
  }

 private:
  std::string where_;
  bool building_;
};

/// What every plugin does with its attributes. `Derived` has kName and a copy constructor.
template <typename Derived, typename FieldsOfDerived>
class PluginWithFields : public Plugin {
 public:
  using Fields = FieldsOfDerived;

  nvinfer1::IPluginV3* clone() noexcept final {
    std::unique_ptr<Derived> copy;
    run([&]() -> Status {
      copy = std::make_unique<Derived>(static_cast<const Derived&>(*this));
      return {};
    });
    return copy.release();
  }

  /// A copy; a plugin that needs more than its attributes in a context overrides it.
  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override { return clone(); }

  /// Nothing; a plugin that needs more than its attributes hides it.
  Status created() { return {}; }

  const char* getPluginName() const noexcept final { return Derived::kName; }

  const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept final {
    const nvinfer1::PluginFieldCollection* values = nullptr;
    run([&]() -> Status {
      serialized_ = std::make_unique<FieldWriter>();
      fields_.visit(*serialized_, nvinfer1::TensorRTPhase::kRUNTIME);
      values = serialized_->values();
      return {};
    });
    return values;
  }

 protected:
  PluginWithFields(std::string where, Fields&& fields, nvinfer1::TensorRTPhase phase)
      : Plugin(std::move(where), phase), fields_(std::move(fields)) {}
  /// What was handed out for serialisation points into the original's attributes: a copy makes its own.
  PluginWithFields(const PluginWithFields& other) : Plugin(other), fields_(other.fields_) {}

  Fields fields_;

 private:
  std::unique_ptr<FieldWriter> serialized_;
};

/// A layer's numbers of tensors, and what they should be.
struct TensorCounts {
  int32_t inputs, outputs;
};
Status check_counts(const TensorCounts& given, const TensorCounts& expected);

/// Bytes of a tensor of whole-byte elements: what our plugins pass on are activations and chains, never 4-bit data.
size_t bytes_of(const nvinfer1::PluginTensorDesc& desc);

/// Copies outputs that TensorRT did not alias to the input of the same index, and counts them.
Status copy_unaliased(const nvinfer1::PluginTensorDesc* descs, const void* const* inputs, void* const* outputs,
                      int32_t count, cudaStream_t stream);

}  // namespace tokenweave::trt
