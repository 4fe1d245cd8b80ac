// The decode kernel: a fixed grid of CTAs, each two producer warps that feed a ring and kWarps consumers that drain it.
// docs/decode.md says how it works; the pieces are decode_{schedule,producer,tile,consumer,merge}.h.
#pragma once

#include "decode_traits.h"
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)  // others compile an empty kernel
#include "decode_consumer.h"
#endif

namespace paged_attn::sm90 {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    decode_kernel(const __grid_constant__ CUtensorMap key_map, const __grid_constant__ CUtensorMap value_map,
                  const __grid_constant__ DecodeArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char shared[];
  const Ring ring = Ring::at<Traits>(ptx::smem_address(shared));
  if (threadIdx.x == 0) ring.init<Traits>();
  if (!a.range.side_by_side) ptx::pdl_launch_dependents();
  __syncthreads();
  const int producer = static_cast<int>(threadIdx.x / 32) - Traits::kWarps;
  // Reading lengths and table before the kernel ahead has ended hides the schedule behind its tail, but is right only
  // where no kernel that may still run writes them.
  const bool early = a.p.metadata_ready;
  Walk<Traits> share = {};
  if constexpr (!Traits::kRehearsal) {  // else consumers have something else to do first
    if (!early) ptx::pdl_wait();
    share = make_walk<Traits>(a);
  }
  if (producer < 0)
    Consumer<Traits>{a, shared}.run(ring, share, early);
  else
    produce<Traits>(a, producer ? &value_map : &key_map, producer, ring, share, early);
#endif
}

}  // namespace paged_attn::sm90
