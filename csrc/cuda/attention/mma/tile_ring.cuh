// When a stage of K and V may be read and written, without a barrier of all warps at every tile.
#pragma once

#include "../ptx.cuh"

namespace paged_attn::mma {

// Three stages in shared memory, each with a barrier there on which the copies of all threads arrive.  A warp copies
// tile t + 1 when it has read tile t - 1: once all copies of tile t have arrived, all warps have read tile t - 2, and
// its stage is free for tile t + 1.  So a warp may be almost a tile ahead of another one.
template <class C>
class TileRing {
 public:
  __device__ explicit TileRing(uint32_t barriers) : barriers_(barriers), phases_(0) {}

  // By one thread, before a barrier of all.
  __device__ void init() const {
    for (int stage = 0; stage < C::kMaxStages; ++stage) ptx::mbarrier_init(barriers_ + stage * 8, C::kThreads);
  }

  // All copies of this thread so far.
  __device__ void arrive(int stage) const { ptx::cp_async_mbarrier_arrive(barriers_ + stage * 8); }
  __device__ void wait(int stage) {
    ptx::mbarrier_wait(barriers_ + stage * 8, phases_ >> stage & 1);
    phases_ ^= 1u << stage;
  }

 private:
  uint32_t barriers_, phases_;  // a bit a stage
};

}  // namespace paged_attn::mma
