// The decode kernel: a fixed grid of CTAs, each one producer warp that feeds a ring and kWarps consumers that drain it.
// docs/decode.md tells the story; the pieces are decode_{schedule,producer,tile,consumer,merge}.h.
#pragma once

#include "decode_traits.h"
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)  // others compile an empty kernel
#include "../empty_rows.cuh"
#include "decode_consumer.h"
#endif

namespace paged_attn::sm90 {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    decode_kernel(const __grid_constant__ CUtensorMap key_map, const __grid_constant__ CUtensorMap value_map,
                  const __grid_constant__ DecodeArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char shared[];
  using Element = std::conditional_t<Traits::kQuantized, __half, typename Traits::Cache>;  // zero is zero in either
  const Ring ring = Ring::at<Traits>(ptx::smem_address(shared));
  // Reading lengths and table before the kernel ahead has ended hides the schedule behind its tail, but is right only
  // where no kernel that may still run writes them.
  const bool early = a.p.metadata_ready;
  if (threadIdx.x == 0) ring.init<Traits>();
  ptx::pdl_launch_dependents();
  if (!early) ptx::pdl_wait();
  __syncthreads();
  const Walk<Traits> w = make_walk<Traits>(a);
  if (threadIdx.x / 32 == Traits::kWarps) {
    produce<Traits>(a, key_map, value_map, ring, w, early);
  } else {
    if (early) ptx::pdl_wait();
    if (a.range.owns_empty) write_empty_rows<Element>(a.p, Traits::kWarps * 32);  // the first stages are on their way
    Consumer<Traits>{a, shared}.run(ring, w);
  }
#endif
}

}  // namespace paged_attn::sm90
