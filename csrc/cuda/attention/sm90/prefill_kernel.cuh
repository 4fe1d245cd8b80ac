// The prefill kernel.
//
// A persistent CTA on every multiprocessor.  Producer warpgroups give registers away and load (prefill_load.cuh),
// the others compute 64 rows of the tile each (prefill_consume.cuh).  K and V of 8-bit caches are converted on their
// way (prefill_convert.cuh).
#pragma once

#include <cuda_runtime.h>

#include "../empty_rows.cuh"
#include "prefill_layout.cuh"
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)  // elsewhere the kernel is empty
#include "prefill_consume.cuh"
#include "prefill_convert.cuh"
#include "prefill_load.cuh"
#include "prefill_scales.cuh"
#endif

namespace paged_attn::sm90 {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    prefill_kernel(const __grid_constant__ CUtensorMap key_map, const __grid_constant__ CUtensorMap value_map,
                   const __grid_constant__ PrefillParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char dynamic_smem[];
  const PrefillSmem<Traits> smem{ptx::smem_address(dynamic_smem)};
  int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 - 4 * Traits::kFirstProducer;  // of producers
  if constexpr (Traits::kProducers > 1)  // that lanes agree saves registers, which are scarce there
    warpgroup = uniform(warpgroup), warp = uniform(warp);
  if (threadIdx.x == 0) {
    constexpr int kReaders = 4 * Traits::kConsumers;  // warps that read a stage
    constexpr int kKeyWriters =
        !Traits::kQuantized ? 1 : Traits::kKeyConverters + (Traits::kSharedGroups > 0 ? Traits::kValueConverters : 0);
    constexpr int kValueWriters = Traits::kQuantized ? Traits::kValueConverters : 1;
    for (int i = 0; i < Traits::kStages; ++i) {
      ptx::mbarrier_init(smem.key_full(i), kKeyWriters);
      ptx::mbarrier_init(smem.value_full(i), kValueWriters);
      ptx::mbarrier_init(smem.key_empty(i), kReaders);
      ptx::mbarrier_init(smem.value_empty(i), kReaders);
      if constexpr (Traits::kTokenScales) {
        ptx::mbarrier_init(smem.scales_full(i), 1);
        ptx::mbarrier_init(smem.scales_empty(i), kReaders);
      }
    }
    for (int i = 0; i < Traits::kStagingSlots; ++i) {
      ptx::mbarrier_init(smem.staging_full(i), 1);
      constexpr int kKeys = Traits::kKeyConverters, kValues = Traits::kValueConverters;
      ptx::mbarrier_init(smem.staging_empty(i), Traits::kPaired ? kKeys + kValues : i % 2 ? kValues : kKeys);
    }
    for (int i = 0; i < Traits::kTileSlots; ++i) {
      ptx::mbarrier_init(smem.tile_full(i), 1);
      ptx::mbarrier_init(smem.tile_empty(i), TileRing<Traits>::kReaders * (TileRing<Traits>::kLanesArrive ? 32 : 1));
    }
    ptx::mbarrier_init(smem.tile_wanted(), 1);
    for (int i = 0; i < Traits::kQueryBuffers; ++i)
      for (int w = 0; w < Traits::kConsumers; ++w) {
        ptx::mbarrier_init(smem.query_full(i, w), 32);
        ptx::mbarrier_init(smem.query_empty(i, w), 128);
      }
    ptx::mbarrier_init_fence();
    ptx::tensor_map_prefetch(&key_map);
    ptx::tensor_map_prefetch(&value_map);
  }
  ptx::pdl_launch_dependents();
  __syncthreads();
  if (!p.range.side_by_side) ptx::pdl_wait();
  if (p.range.owns_empty) write_empty_rows<typename Traits::T>(p.attention);

  if (Traits::kFirstProducer == 0 ? warpgroup < Traits::kProducers : warpgroup >= Traits::kFirstProducer) {
    ptx::give_registers<Traits::kProducerRegisters>();
    if constexpr (Traits::kTokenScales) {
      if (warp == 0)
        produce_tiles<Traits>(p, smem);
      else if (warp == 1)
        produce_queries<Traits>(p, smem);
      else if (warp == 2)
        produce_staged<Traits>(p, &key_map, &value_map, smem);
      else if (warp == 3)
        produce_scales<Traits>(p, smem);
      else
        convert<Traits>(p, smem, warp - 4);
    } else if constexpr (Traits::kQuantized) {
      if (warp == 0)
        produce_tiles_staged<Traits>(p, &key_map, &value_map, smem);
      else
        convert<Traits>(p, smem, warp - 1);
    } else if (warp == 0) {
      produce_tiles<Traits>(p, smem);
    } else if (warp == 1) {
      produce_keys<Traits>(p, &key_map, smem);
    } else if (warp == 2) {
      produce_values<Traits>(p, &value_map, smem);
    } else {
      produce_queries<Traits>(p, smem);
    }
  } else {
    ptx::take_registers<Traits::kConsumerRegisters>();
    PrefillConsumer<Traits>(p, smem).run();
  }
#endif
}

}  // namespace paged_attn::sm90
