// Inside the Hopper prefill path: the instances behind launch_prefill.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "prefill_tile.cuh"

namespace paged_attn::sm90 {

struct PrefillMaps {
  CUtensorMap key, value;
};

// kHeadDim: columns of an instance; a smaller head_dim is filled up with zeros.  kQuantized: any 8-bit cache, T is
// __half.  Explicitly instantiated in prefill_*_d*.cu.
template <class T, int kHeadDim, bool kQuantized = false>
void launch_prefill_instance(const PrefillParams& p, const PrefillMaps& maps, cudaStream_t stream);

}  // namespace paged_attn::sm90
