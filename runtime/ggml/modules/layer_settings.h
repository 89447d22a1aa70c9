// VK_EXT_layer_settings for Vulkan headers older than 1.3.272 (Debian 12 ships 1.3.239), which
// lack the three types that ggml-vulkan.cpp names. Layout and values are those of the Vulkan
// specification. Included before every C++ file of the build; empty where the headers have them.
#if defined(__cplusplus) && __has_include(<vulkan/vulkan_core.h>)
#include <vulkan/vulkan_core.h>

#ifndef VK_EXT_layer_settings
#include <cstdint>
#include <vector>

namespace vk {

enum class LayerSettingTypeEXT : int32_t { eBool32 = 0 };

struct LayerSettingEXT {
    const char * pLayerName;
    const char * pSettingName;
    LayerSettingTypeEXT type;
    uint32_t valueCount;
    const void * pValues;
};

struct LayerSettingsCreateInfoEXT {
    explicit LayerSettingsCreateInfoEXT(const std::vector<LayerSettingEXT> & settings)
        : settingCount(static_cast<uint32_t>(settings.size())), pSettings(settings.data()) {}

    VkStructureType sType = static_cast<VkStructureType>(1000496000);
    const void * pNext = nullptr;
    uint32_t settingCount;
    const LayerSettingEXT * pSettings;
};

}  // namespace vk
#endif
#endif
