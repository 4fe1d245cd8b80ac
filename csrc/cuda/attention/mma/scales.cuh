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

// Of any kind.
__device__ inline float token_scale(const AttentionParams& p, const ScaleView& scale, int seq, int key, int head) {
  if (scale.data == nullptr) return 1.f;
  int64_t i = head * scale.strides.head;
  if (per_token(scale)) {
    const int64_t block = p.block_table[seq * p.block_table_stride + key / p.block_size];
    i += block * scale.strides.block + key % p.block_size * scale.strides.slot;
  }
  return scale.data[i];
}

}  // namespace paged_attn::mma
