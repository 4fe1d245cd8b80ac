// Rows that see no key because their sequence is empty or because they belong to none.
#pragma once

#include <cuda_runtime.h>

#include "../../params.h"

namespace paged_attn {

// Output 0 and LSE -inf (with a sink: the sink) for all heads of the tokens begin <= t < end; by the first `threads` of
// a CTA.
template <class T>
__device__ inline void write_empty_tokens(const AttentionParams& p, int begin, int end, int threads) {
  for (int t = begin; t < end; ++t) {
    T* out = static_cast<T*>(p.out) + t * p.out_strides.token;
#pragma unroll 1
    for (int i = threadIdx.x; i < p.num_heads * p.head_dim; i += threads)
      out[i / p.head_dim * p.out_strides.head + i % p.head_dim] = T(0.f);
    if (p.lse)
#pragma unroll 1
      for (int h = threadIdx.x; h < p.num_heads; h += threads)
        p.lse[static_cast<int64_t>(t) * p.num_heads + h] = p.sinks ? p.sinks[h] : -INFINITY;
  }
}

// All empty rows of the call, shared out among the CTAs of the grid.  Every CTA calls it, with its first `threads`.
template <class T>
__device__ inline void write_empty_rows(const AttentionParams& p, int threads = blockDim.x) {
  for (int s = blockIdx.x; s < p.num_seqs; s += gridDim.x) {
    if (p.seq_lens[s * p.seq_lens_stride] > 0) continue;
    const int begin = p.cu_seqlens_q ? p.cu_seqlens_q[s * p.cu_seqlens_q_stride] : s;
    const int end = p.cu_seqlens_q ? p.cu_seqlens_q[(s + 1) * p.cu_seqlens_q_stride] : s + 1;
    write_empty_tokens<T>(p, begin, end, threads);
  }
  if (p.cu_seqlens_q == nullptr) return;
  const int used = p.cu_seqlens_q[p.num_seqs * p.cu_seqlens_q_stride];
  for (int t = used + static_cast<int>(blockIdx.x); t < p.num_tokens; t += gridDim.x)
    write_empty_tokens<T>(p, t, t + 1, threads);
}

}  // namespace paged_attn
