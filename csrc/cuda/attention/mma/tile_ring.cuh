// Who may read and write a stage of K and V, without a barrier of all warps at every tile.
#pragma once

#include "../ptx.cuh"

namespace paged_attn::mma {

// Stages in shared memory, each with two barriers there: `full`, on which the copies of all threads arrive, and `free`,
// on which a warp arrives that has read the stage.  Stages are filled kLag tiles after they have become free, so that a
// warp may be so many tiles ahead of another one.
template <class C>
class TileRing {
 public:
  static constexpr int kLag = 2, kAhead = C::kMaxStages - kLag;

  __device__ explicit TileRing(uint32_t barriers) : barriers_(barriers), phases_(0) {}

  // By one thread, before a barrier of all.
  __device__ void init() const {
    for (int stage = 0; stage < C::kMaxStages; ++stage) {
      ptx::mbarrier_init(barriers_ + stage * 16, C::kThreads);
      ptx::mbarrier_init(barriers_ + stage * 16 + 8, C::kWarps);
    }
  }

  __device__ void wait_full(int stage) {
    ptx::mbarrier_wait(barriers_ + stage * 16, phases_ >> stage & 1);
    phases_ ^= 1u << stage;
  }
  // For what was in it when this warp read it last.
  __device__ void wait_free(int stage) const {
    ptx::mbarrier_wait(barriers_ + stage * 16 + 8, (phases_ >> stage & 1) ^ 1);
  }
  // All copies of this thread so far.
  __device__ void arrive_full(int stage) const { ptx::cp_async_mbarrier_arrive(barriers_ + stage * 16); }
  __device__ void arrive_free(int stage) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barriers_ + stage * 16 + 8);
  }

 private:
  uint32_t barriers_, phases_;  // a bit a stage
};

}  // namespace paged_attn::mma
