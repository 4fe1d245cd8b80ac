// Launches an instance: its grid, and which of the kernels for a type and head dimension serves a call.
#pragma once

#include <algorithm>

#include "../launch.h"
#include "prefill.h"
#include "prefill_kernel.cuh"

namespace paged_attn::sm90 {

template <class Traits>
void launch_prefill_kernel(const PrefillParams& p, const PrefillMaps& maps, cudaStream_t stream) {
  const AttentionParams& a = p.attention;
  int64_t grid = current_device().sm_count;
  if (!p.partials) {  // no more CTAs than there can be tiles: every sequence has at most one that is not full
    const int64_t tiles = (static_cast<int64_t>(a.num_tokens) * p.group / Traits::kRows + a.num_seqs) * a.num_kv_heads;
    grid = std::max<int64_t>(1, std::min(grid, tiles));
  }
  launch_kernel(prefill_kernel<Traits>, static_cast<unsigned>(grid), Traits::kThreads, Traits::kSmemBytes, stream,
                a.pdl || p.range.side_by_side, maps.key, maps.value, p);
}

template <class T, int kHeadDim, bool kQuantized>
void launch_prefill_instance(const PrefillParams& p, const PrefillMaps& maps, cudaStream_t stream) {
  const bool token_scales = kQuantized && p.attention.k_scale.per_token();
  if (has_score_mods(p) || (kQuantized && !token_scales && !p.paired))  // the latter for its loads
    launch_prefill_kernel<PrefillTraits<T, kHeadDim, true, kQuantized, kQuantized>>(p, maps, stream);
  else if (token_scales)
    launch_prefill_kernel<PrefillTraits<T, kHeadDim, false, kQuantized, kQuantized>>(p, maps, stream);
  else
    launch_prefill_kernel<PrefillTraits<T, kHeadDim, false, kQuantized>>(p, maps, stream);
}

}  // namespace paged_attn::sm90
