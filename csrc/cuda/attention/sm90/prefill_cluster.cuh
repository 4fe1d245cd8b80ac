// What the two CTAs of a prefill cluster do to each other's shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace paged_attn::sm90 {

// The same shared-memory address in the CTA `rank` of the cluster.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, uint32_t rank) {
  uint32_t r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}

// Without ".release.cluster", whose fence costs hundreds of cycles in every warp and step: the barriers that use this
// protect memory that the arriving warp has only read.
__device__ __forceinline__ void cluster_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// 16 bytes to a cluster address, counted on a barrier of the same CTA.
__device__ __forceinline__ void cluster_store(uint32_t address, uint32_t barrier, int x, int y, int z, int w) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(address),
      "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// One box to the same place in every CTA of `mask`, counted on the barrier at the same place there.
__device__ __forceinline__ void tensor_load_multicast(uint32_t dst, const CUtensorMap* map, int c0, int c1, int c2,
                                                      int c3, uint32_t barrier, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, "
      "%3, %4, %5, %6}], [%7], %8;" ::"r"(dst),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(0), "r"(barrier), "h"(mask)
      : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace paged_attn::sm90
