// Sums over the lanes of a warp; what is the same in all of them.
#pragma once

namespace paged_attn {

// Of this lane's number and those of the lanes before it.  All lanes of the warp call it together.
template <class T>
__device__ __forceinline__ T warp_inclusive_sum(T x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const T below = __shfl_up_sync(~0u, x, d);
    if (lane >= d) x += below;
  }
  return x;
}

// What is the same in all lanes, said so that the assembler knows: in a uniform register.
template <class T>
__device__ __forceinline__ T uniform(T x) {
  return __shfl_sync(~0u, x, 0);
}

}  // namespace paged_attn
