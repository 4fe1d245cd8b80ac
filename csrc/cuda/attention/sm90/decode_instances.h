// Which instances of the decode kernel exist.
#pragma once

#include <numeric>

#include "decode_launch.h"

namespace paged_attn::sm90 {

// The most packed rows for a head dimension: at most four times what a warp holds (DecodeTraits::kMostWarpRows).  0:
// there is no instance.
constexpr int most_rows(int head_dim, bool quantized) {
  switch (head_dim) {
    case 80:
    case 112:
      return quantized ? 0 : 32;  // rows of 8-bit caches are whole chunks of 32 bytes
    case 64:
    case 128:
      return 64;
    case 96:
    case 160:
    case 192:
    case 256:
      return 32;
    default:
      return 0;
  }
}

// Several heads of a block in a stage read longer stretches of memory, but leave fewer pieces to few sequences.
inline bool heads_share_stages(const DecodeArgs& a, int heads) {
  return a.max_rows <= 8 && a.p.num_seqs >= 4 * heads && a.p.num_kv_heads % heads == 0 && !a.p.batch_invariant;
}
inline bool two_heads_a_stage(const DecodeArgs& a) { return a.p.head_dim == 128 && heads_share_stages(a, 2); }

// The instance for a.p.head_dim and a.max_rows.  One cache type to a file: decode_<type>.cu.
template <class Cache>
void launch_for(DecodeArgs& a, Workspace& workspace, cudaStream_t stream);

template <class Cache, int kHeadDim, bool kTokenScales, RowOrder kOrder>
void launch_rows(DecodeArgs& a, Workspace& workspace, cudaStream_t stream) {
  constexpr int kMostRows = most_rows(kHeadDim, sizeof(Cache) == 1);
  if constexpr (kHeadDim == 128)
    if (two_heads_a_stage(a))
      return launch<DecodeTraits<Cache, kHeadDim, 8, 2, kTokenScales, kOrder>>(a, workspace, stream);
  if (a.max_rows <= 8) return launch<DecodeTraits<Cache, kHeadDim, 8, 1, kTokenScales, kOrder>>(a, workspace, stream);
  if (a.max_rows <= 16) return launch<DecodeTraits<Cache, kHeadDim, 16, 1, kTokenScales, kOrder>>(a, workspace, stream);
  if constexpr (kMostRows >= 32)
    if (a.max_rows <= 32)
      return launch<DecodeTraits<Cache, kHeadDim, 32, 1, kTokenScales, kOrder>>(a, workspace, stream);
  if constexpr (kMostRows >= 64)
    return launch<DecodeTraits<Cache, kHeadDim, 64, 1, kTokenScales, kOrder>>(a, workspace, stream);
}

template <class Cache, int kHeadDim>
void launch_head_dim(DecodeArgs& a, Workspace& workspace, cudaStream_t stream) {
  constexpr bool kQuantized = sizeof(Cache) == 1;
  constexpr int kRowBytes = kHeadDim * sizeof(Cache);
  if constexpr (most_rows(kHeadDim, kQuantized) > 0) {
    const auto launch_as = [&](auto order) {
      constexpr RowOrder kOrder = decltype(order)::value;
      if constexpr (kQuantized)
        if (a.p.k_scale.per_token()) return launch_rows<Cache, kHeadDim, true, kOrder>(a, workspace, stream);
      launch_rows<Cache, kHeadDim, false, kOrder>(a, workspace, stream);
    };
    if constexpr (kRowBytes % 128 != 0 && kRowBytes > 64) {  // lines pay for no other
      if (a.p.key_strides.slot == kHeadDim && a.p.value_strides.slot == kHeadDim)
        return launch_as(std::integral_constant<RowOrder, RowOrder::kBlockLines>());
      constexpr int kHeads = 128 / std::gcd(kRowBytes, 128);
      if (a.p.key_strides.head == kHeadDim && a.p.value_strides.head == kHeadDim && heads_share_stages(a, kHeads) &&
          !a.p.k_scale.per_token())
        return launch<DecodeTraits<Cache, kHeadDim, 8, kHeads, false, RowOrder::kTokenLines>>(a, workspace, stream);
    }
    launch_as(std::integral_constant<RowOrder, RowOrder::kChunks>());
  }
}

template <class Cache>
void launch_for(DecodeArgs& a, Workspace& workspace, cudaStream_t stream) {
  switch (a.p.head_dim) {
    case 64:
      return launch_head_dim<Cache, 64>(a, workspace, stream);
    case 80:
      return launch_head_dim<Cache, 80>(a, workspace, stream);
    case 96:
      return launch_head_dim<Cache, 96>(a, workspace, stream);
    case 112:
      return launch_head_dim<Cache, 112>(a, workspace, stream);
    case 128:
      return launch_head_dim<Cache, 128>(a, workspace, stream);
    case 160:
      return launch_head_dim<Cache, 160>(a, workspace, stream);
    case 192:
      return launch_head_dim<Cache, 192>(a, workspace, stream);
    case 256:
      return launch_head_dim<Cache, 256>(a, workspace, stream);
  }
}

}  // namespace paged_attn::sm90
