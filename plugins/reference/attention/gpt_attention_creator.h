#pragma once

#include "gpt_attention_plugin.h"

namespace tokenweave::reference {

using GptAttentionCreator = CreatorV2<GptAttentionPlugin>;

}  // namespace tokenweave::reference
