// For tests/gpu: a plugin of libtokenweave_reference.so as TensorRT handles it, without TensorRT. The library is loaded
// from its file and used through the interfaces of TensorRT's headers.
#include <NvInferRuntime.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstring>
#include <vector>

namespace {

using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::IPluginCreator;
using nvinfer1::IPluginV2DynamicExt;
using nvinfer1::PluginTensorDesc;

IPluginCreator* find_creator(const char* library, const char* name) {
  void* const handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return nullptr;
  using GetCreators = nvinfer1::IPluginCreatorInterface* const* (*)(int32_t&);
  const auto get_creators = reinterpret_cast<GetCreators>(dlsym(handle, "getCreators"));
  if (get_creators == nullptr) return nullptr;
  int32_t count = 0;
  nvinfer1::IPluginCreatorInterface* const* const all = get_creators(count);
  for (int32_t i = 0; i < count; ++i) {
    auto* const creator = static_cast<IPluginCreator*>(all[i]);
    if (std::strcmp(creator->getPluginName(), name) == 0) return creator;
  }
  return nullptr;
}

/// What TensorRT does while it builds: every format is offered, and the largest shapes are announced.
bool configure(IPluginV2DynamicExt* plugin, const std::vector<PluginTensorDesc>& descs) {
  const auto inputs = static_cast<int32_t>(descs.size()) - 1;
  for (int32_t i = 0; i <= inputs; ++i) {
    if (!plugin->supportsFormatCombination(i, descs.data(), inputs, 1)) return false;
  }
  std::vector<DynamicPluginTensorDesc> bounds;
  for (const PluginTensorDesc& desc : descs) bounds.push_back({desc, desc.dims, desc.dims, desc.dims});
  plugin->configurePlugin(bounds.data(), inputs, &bounds[inputs], 1);
  return true;
}

IPluginV2DynamicExt* as_dynamic(nvinfer1::IPluginV2* plugin) { return static_cast<IPluginV2DynamicExt*>(plugin); }

}  // namespace

#define DRIVER_API extern "C" __attribute__((visibility("default")))

DRIVER_API int64_t driver_desc_bytes() { return sizeof(PluginTensorDesc); }

/// A plugin of an engine, attached to a context; null when one of its steps fails. `descs`: of the inputs with their
/// largest shapes, then of the output.
DRIVER_API void* driver_make(const char* library, const char* name, const nvinfer1::PluginField* fields,
                             int32_t num_fields, const PluginTensorDesc* descs, int32_t num_inputs) {
  IPluginCreator* const creator = find_creator(library, name);
  if (creator == nullptr) return nullptr;
  const nvinfer1::PluginFieldCollection collection{num_fields, fields};
  IPluginV2DynamicExt* const built = as_dynamic(creator->createPlugin("layer", &collection));
  if (built == nullptr) return nullptr;
  std::vector<uint8_t> bytes;
  if (configure(built, {descs, descs + num_inputs + 1})) {
    bytes.resize(built->getSerializationSize());
    built->serialize(bytes.data());
  }
  built->destroy();
  if (bytes.empty()) return nullptr;
  IPluginV2DynamicExt* const of_engine = as_dynamic(creator->deserializePlugin("layer", bytes.data(), bytes.size()));
  if (of_engine == nullptr) return nullptr;
  IPluginV2DynamicExt* const of_context = of_engine->initialize() == 0 ? of_engine->clone() : nullptr;
  of_engine->destroy();
  if (of_context != nullptr) of_context->attachToContext(nullptr, nullptr, nullptr);
  return of_context;
}

DRIVER_API int64_t driver_workspace_bytes(const void* plugin, const PluginTensorDesc* descs, int32_t num_inputs) {
  const auto* const one = static_cast<const IPluginV2DynamicExt*>(plugin);
  return static_cast<int64_t>(one->getWorkspaceSize(descs, num_inputs, descs + num_inputs, 1));
}

/// 0 when the plugin says so.
DRIVER_API int32_t driver_enqueue(void* plugin, const PluginTensorDesc* descs, int32_t num_inputs,
                                  const void* const* inputs, void* output, void* workspace, cudaStream_t stream) {
  return static_cast<IPluginV2DynamicExt*>(plugin)->enqueue(descs, descs + num_inputs, inputs, &output, workspace,
                                                            stream);
}

DRIVER_API void driver_destroy(void* plugin) { static_cast<IPluginV2DynamicExt*>(plugin)->destroy(); }
