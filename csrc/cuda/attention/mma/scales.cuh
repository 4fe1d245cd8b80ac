// Scales of a quantised cache.
#pragma once

#include "../../../params.h"

namespace paged_attn::mma {

__device__ inline bool per_token(const ScaleView& scale) {
  return scale.data && (scale.strides.slot != 0 || scale.strides.block != 0);
}

// Where it does not vary from token to token; else 1.
__device__ inline float head_scale(const ScaleView& scale, int head) {
  return scale.data && !per_token(scale) ? scale.data[head * scale.strides.head] : 1.f;
}

}  // namespace paged_attn::mma
