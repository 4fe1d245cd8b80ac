// Who works on what: the list (sequence, group of KV heads, tile of tokens), flattened in this order, is cut into equal
// contiguous shares, one a CTA ("stream-K").  Every warp derives the share of its CTA from the lengths alone, so
// nothing is planned on the host and a captured graph stays valid for every length.
//
// With batch_invariant, cuts fall only between the parts of an item, and those follow from the item's own length.
#pragma once

#include "decode_traits.h"

namespace paged_attn::sm90 {

// The query tokens of a sequence and the tiles that hold their visible keys.
struct Sequence {
  int query_begin, query_len, len;
  int first_key;   // the first key that some query token sees
  int first_tile;  // kTileTokens * first_tile <= first_key
  int num_tiles;   // 0: nothing to do here
};

// Without branches on what it loads, so that the loads of several sequences overlap.
template <class Traits>
__device__ __forceinline__ Sequence load_sequence(const DecodeArgs& a, int seq) {
  constexpr unsigned T = Traits::kTileTokens;
  const AttentionParams& p = a.p;
  const auto at = [](int i, int64_t stride) { return static_cast<int64_t>(i) * static_cast<int>(stride); };
  Sequence s;
  s.len = __ldg(p.seq_lens + at(seq, p.seq_lens_stride));
  s.query_begin = seq, s.query_len = 1;
  if (p.cu_seqlens_q) {
    s.query_begin = __ldg(p.cu_seqlens_q + at(seq, p.cu_seqlens_q_stride));
    s.query_len = __ldg(p.cu_seqlens_q + at(seq + 1, p.cu_seqlens_q_stride)) - s.query_begin;
  }
  const bool ours = s.len > 0 && s.query_len >= max(1, a.range.min_len) && s.query_len <= a.range.max_len;
  s.first_key = max(0, s.len - s.query_len - a.window + 1);
  s.first_tile = static_cast<unsigned>(s.first_key) / T;
  s.num_tiles = ours ? static_cast<unsigned>(s.len + T - 1) / T - s.first_tile : 0;
  return s;
}

// batch_invariant: tiles in a part of an item of `num_tiles`.
template <class Traits>
__device__ __forceinline__ int part_tiles(int num_tiles) {
  return max(kMinPartTokens / Traits::kTileTokens, (num_tiles + kMaxParts - 1) / kMaxParts);
}

__device__ __forceinline__ unsigned warp_inclusive_sum(unsigned x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const unsigned y = __shfl_up_sync(~0u, x, d);
    if (lane >= d) x += y;
  }
  return x;
}

// A position in a CTA's share.  An item begins at `item_begin` of the flattened list; CTA b owns the positions from
// b * chunk to (b + 1) * chunk.
template <class Traits>
struct Walk {
  int seq, head_group, tile;  // tile of the item: its tokens begin at (s.first_tile + tile) * kTileTokens
  Sequence s;
  int end_seq, end_head_group, end_tile;  // tiles below end_tile of the last item are still ours
  unsigned item_begin, chunk;
  bool done;

  __device__ __forceinline__ bool in_last_item() const { return seq == end_seq && head_group == end_head_group; }
  __device__ __forceinline__ int limit() const { return in_last_item() ? end_tile : s.num_tiles; }
  __device__ __forceinline__ int first_token() const { return (s.first_tile + tile) * Traits::kTileTokens; }

  __device__ __forceinline__ void next_item(const DecodeArgs& a) {
    if (in_last_item()) {
      done = true;
      return;
    }
    item_begin += s.num_tiles;
    tile = 0;
    if (++head_group == a.num_head_groups) {
      head_group = 0;
      do s = load_sequence<Traits>(a, ++seq);  // ends: the last sequence of a share is not empty
      while (s.num_tiles == 0);
    }
  }
  __device__ __forceinline__ void advance(const DecodeArgs& a, int tiles) {
    tile += tiles;
    while (!done && tile >= limit()) {
      const int beyond = tile - s.num_tiles;
      next_item(a);
      tile = beyond;
    }
  }
};

// The first tile at or after position `offset` of an item where a cut may fall.
template <class Traits>
__device__ __forceinline__ int cut_at(const DecodeArgs& a, int offset, int num_tiles) {
  if (a.max_parts == 1) return min(num_tiles, offset);
  const int part = part_tiles<Traits>(num_tiles);
  return min(num_tiles, (offset + part - 1) / part * part);
}

// The share of this CTA; by whole warps.
template <class Traits>
__device__ __forceinline__ Walk<Traits> make_walk(const DecodeArgs& a) {
  const int lane = threadIdx.x % 32, num_seqs = a.p.num_seqs;
  const int per_lane = (num_seqs + 31) / 32;  // consecutive sequences
  const auto cost = [&](int seq) -> unsigned {
    const int tiles = load_sequence<Traits>(a, min(seq, num_seqs - 1)).num_tiles;
    return seq < num_seqs ? tiles * a.num_head_groups : 0;
  };
  Walk<Traits> w = {};
  w.done = true;
  if (num_seqs == 0) return w;
  unsigned sum = 0;
#pragma unroll 4
  for (int i = 0; i < per_lane; i++) sum += cost(lane * per_lane + i);
  const unsigned inclusive = warp_inclusive_sum(sum), total = __shfl_sync(~0u, inclusive, 31);
  w.chunk = max((total + gridDim.x - 1) / gridDim.x, static_cast<unsigned>(a.min_share));
  const unsigned begin = blockIdx.x * w.chunk, end = min(begin + w.chunk, total);
  w.done = begin >= total;
  if (w.done) return w;

  // The sequence that holds position x, and where it begins.
  const auto locate = [&](unsigned x, int& seq, unsigned& seq_begin) {
    const int owner = __ffs(__ballot_sync(~0u, x >= inclusive - sum && x < inclusive)) - 1;
    unsigned base = __shfl_sync(~0u, inclusive - sum, owner);
    if (per_lane == 1) {
      seq = owner, seq_begin = base;
      return;
    }
    for (int i = 0;; i += 32) {
      const unsigned c = i + lane < per_lane ? cost(owner * per_lane + i + lane) : 0;
      const unsigned upto = base + warp_inclusive_sum(c);
      const unsigned hit = __ballot_sync(~0u, x >= upto - c && x < upto);
      if (hit) {
        const int l = __ffs(hit) - 1;
        seq = owner * per_lane + i + l;
        seq_begin = __shfl_sync(~0u, upto - c, l);
        return;
      }
      base = __shfl_sync(~0u, upto, 31);
    }
  };
  unsigned seq_begin = 0, last_begin = 0;
  locate(begin, w.seq, seq_begin);
  locate(end - 1, w.end_seq, last_begin);
  w.s = load_sequence<Traits>(a, w.seq);
  w.head_group = (begin - seq_begin) / w.s.num_tiles;
  w.item_begin = seq_begin + w.head_group * w.s.num_tiles;
  w.tile = cut_at<Traits>(a, begin - w.item_begin, w.s.num_tiles);
  const int last_tiles = load_sequence<Traits>(a, w.end_seq).num_tiles;
  w.end_head_group = (end - 1 - last_begin) / last_tiles;
  w.end_tile = cut_at<Traits>(a, end - (last_begin + w.end_head_group * last_tiles), last_tiles);
  if (a.max_parts > 1) w.advance(a, 0);  // the first cut may lie at the end of the item
  return w;
}

// The pieces of an item, in order: a piece is what a CTA owns of it, or one part if batch_invariant.  An item of one
// piece is finished where it is computed; otherwise every piece is published in a slot of its own and the CTA of the
// last piece merges them.  A CTA has two rows of slots: 0 for an item that an earlier CTA began, 1 for its own.
struct Pieces {
  unsigned item_begin, chunk;
  int part, count, first_cta, max_parts;

  template <class Traits>
  __device__ __forceinline__ static Pieces of(const DecodeArgs& a, const Walk<Traits>& w) {
    Pieces x;
    x.item_begin = w.item_begin, x.chunk = w.chunk, x.max_parts = a.max_parts;
    x.first_cta = w.item_begin / w.chunk;
    if (a.max_parts == 1) {
      x.part = w.s.num_tiles;
      x.count = (w.item_begin + w.s.num_tiles - 1) / w.chunk - x.first_cta + 1;
    } else {
      x.part = part_tiles<Traits>(w.s.num_tiles);
      x.count = (w.s.num_tiles + x.part - 1) / x.part;
    }
    return x;
  }
  // The piece that this CTA computes from `tile` on.
  __device__ __forceinline__ int index(int tile) const { return max_parts == 1 ? blockIdx.x - first_cta : tile / part; }
  __device__ __forceinline__ int slot(int piece) const {
    if (max_parts == 1) return (first_cta + piece) * 2 + (piece == 0);
    const int cta = (item_begin + piece * part) / chunk;
    const int before = cta == first_cta ? 0 : (cta * chunk - item_begin + part - 1) / part;  // pieces of earlier CTAs
    return (cta * 2 + (cta == first_cta)) * max_parts + piece - before;
  }
};

}  // namespace paged_attn::sm90
