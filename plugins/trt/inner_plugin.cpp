#include "inner_plugin.h"

#include <cstring>
#include <utility>

#include "tensorrt_library.h"

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace tokenweave::trt {
namespace {

std::string text(const PluginId& id) {
  return "plugin '" + id.name + "' version '" + id.version + "' of namespace '" + id.name_space + "'";
}

Status find_creator(const PluginId& id, nvinfer1::IPluginCreator** creator) {
  nvinfer1::IPluginRegistry* registry = nullptr;
  TW_RETURN_IF_ERROR(plugin_registry(&registry));
  nvinfer1::IPluginCreatorInterface* const found =
      registry->getCreator(id.name.c_str(), id.version.c_str(), id.name_space.c_str());
  if (found == nullptr) {
    return error(TW_UNSUPPORTED, "no library has registered " + text(id) +
                                     ". Fix: load its library first (TensorRT-LLM's plugins, or "
                                     "libtokenweave_reference.so)");
  }
  if (std::strcmp(found->getInterfaceInfo().kind, "PLUGIN CREATOR_V1") != 0) {
    return error(TW_UNSUPPORTED, text(id) + " is no V2 plugin. Fix: weave with split_attention off");
  }
  *creator = static_cast<nvinfer1::IPluginCreator*>(found);
  return {};
}

/// The upper byte of getTensorRTVersion.
bool is_dynamic(const nvinfer1::IPluginV2& plugin) {
  const uint32_t kind = static_cast<uint32_t>(plugin.getTensorRTVersion()) >> 24;
  return kind == static_cast<uint32_t>(nvinfer1::PluginVersion::kV2_DYNAMICEXT);
}

}  // namespace

Status check_creator(const PluginId& id) {
  nvinfer1::IPluginCreator* creator = nullptr;
  return find_creator(id, &creator);
}

Status InnerPlugin::create(const PluginId& id, const nvinfer1::PluginFieldCollection& fields, InnerPlugin* plugin) {
  nvinfer1::IPluginCreator* creator = nullptr;
  TW_RETURN_IF_ERROR(find_creator(id, &creator));
  InnerPlugin made;
  TW_RETURN_IF_ERROR(made.take(id, creator->createPlugin(id.name.c_str(), &fields)));
  *plugin = std::move(made);
  return {};
}

Status InnerPlugin::deserialize(const PluginId& id, const std::vector<uint8_t>& bytes, InnerPlugin* plugin) {
  nvinfer1::IPluginCreator* creator = nullptr;
  TW_RETURN_IF_ERROR(find_creator(id, &creator));
  InnerPlugin made;
  TW_RETURN_IF_ERROR(made.take(id, creator->deserializePlugin(id.name.c_str(), bytes.data(), bytes.size())));
  *plugin = std::move(made);
  return {};
}

Status InnerPlugin::take(const PluginId& id, nvinfer1::IPluginV2* made) {
  if (made == nullptr) {
    return error(TW_INVALID_ARGUMENT, text(id) +
                                          " was refused by its own library, which logs why. Fix: use the release of "
                                          "that library that the network was made for");
  }
  if (!is_dynamic(*made)) {
    made->destroy();
    return error(TW_UNSUPPORTED, text(id) + " is no IPluginV2DynamicExt. Fix: weave with split_attention off");
  }
  plugin_ = static_cast<nvinfer1::IPluginV2DynamicExt*>(made);
  return {};
}

InnerPlugin::~InnerPlugin() {
  if (plugin_ == nullptr) return;
  if (attached_) plugin_->detachFromContext();
  if (initialized_) plugin_->terminate();
  plugin_->destroy();
}

void InnerPlugin::swap(InnerPlugin& other) noexcept {
  std::swap(plugin_, other.plugin_);
  std::swap(initialized_, other.initialized_);
  std::swap(attached_, other.attached_);
}

InnerPlugin InnerPlugin::clone() const {
  InnerPlugin copy;
  if (plugin_ != nullptr) copy.plugin_ = plugin_->clone();
  return copy;
}

Status InnerPlugin::initialize() {
  if (initialized_) return {};
  const int32_t failed = plugin_->initialize();
  if (failed != 0) return error(TW_INTERNAL, "its inner plugin's initialize returned " + std::to_string(failed));
  initialized_ = true;
  return {};
}

void InnerPlugin::attach() {
  plugin_->attachToContext(nullptr, nullptr, nullptr);
  attached_ = true;
}

std::vector<uint8_t> InnerPlugin::serialized() const {
  std::vector<uint8_t> bytes(plugin_->getSerializationSize());
  plugin_->serialize(bytes.data());
  return bytes;
}

}  // namespace tokenweave::trt
