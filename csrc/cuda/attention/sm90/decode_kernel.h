// The decode kernel: a fixed grid of CTAs, each two producer warps that feed a ring and kWarps consumers that drain it.
// docs/decode.md says how it works; the pieces are decode_{schedule,producer,tile,consumer,merge}.h.
#pragma once

#include "decode_traits.h"
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)  // others compile an empty kernel
#include "decode_consumer.h"
#endif

namespace paged_attn::sm90 {

// At its start a kernel finds none of its parameters in the constant cache.  Asking for all lines at once costs one
// latency instead of one a line.  `sink`: anywhere in shared memory, so that the loads have a use.
__device__ __forceinline__ void touch_parameters(const DecodeArgs& a, unsigned* sink) {
  constexpr int kWords = sizeof(DecodeArgs) / 4, kLineWords = 16;
  const unsigned* words = reinterpret_cast<const unsigned*>(&a);
  unsigned x = words[kWords - 1];
#pragma unroll
  for (int i = 0; i < kWords; i += kLineWords) x ^= words[i];
  *sink = x;
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    decode_kernel(const __grid_constant__ CUtensorMap key_map, const __grid_constant__ CUtensorMap value_map,
                  const __grid_constant__ DecodeArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char shared[];
  const Ring ring = Ring::at<Traits>(ptx::smem_address(shared));
  if (threadIdx.x == 0) ring.init<Traits>();
  if (threadIdx.x == 32) {  // another warp: both take their time
    ptx::tensor_map_prefetch(&key_map);
    ptx::tensor_map_prefetch(&value_map);
  }
  touch_parameters(a, reinterpret_cast<unsigned*>(shared + Traits::kStatsOffset) + threadIdx.x / 32);
  __syncthreads();  // the barriers are initialised
  if (!a.range.side_by_side) ptx::pdl_launch_dependents();
  const int producer = static_cast<int>(threadIdx.x / 32) - Traits::kWarps;
  // Reading lengths and table before the kernel ahead has ended hides the schedule behind its tail, but is right only
  // where no kernel that may still run writes them.
  const bool early = a.p.metadata_ready;
  static_assert(sizeof(Walk<Traits>) <= Traits::kShareBytes);
  auto& share = *reinterpret_cast<Walk<Traits>*>(shared + Traits::kShareOffset);
  if (producer < 0) {
    if constexpr (Traits::kMoreRegisters) ptx::take_registers<Traits::kConsumerRegisters>();
    Consumer<Traits>{a, shared}.run(ring, share);
  } else {
    if constexpr (Traits::kMoreRegisters) {
      ptx::give_registers<Traits::kProducerRegisters>();
      if (producer >= Traits::kProducers) return;
    }
    produce<Traits>(a, producer ? &value_map : &key_map, producer, ring, share, early);
  }
#endif
}

}  // namespace paged_attn::sm90
