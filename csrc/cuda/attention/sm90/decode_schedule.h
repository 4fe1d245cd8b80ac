// Who works on what: the list (sequence, group of KV heads, tile of tokens), flattened in this order, is cut into equal
// contiguous shares, one a CTA ("stream-K").  Every warp derives the share of its CTA from the lengths alone, so
// nothing is planned on the host and a captured graph stays valid for every length.
//
// With many sequences there are several such lists, each with an equal part of the heads, for as many columns of CTAs.
// CTA b belongs to the column b % columns, so neighbours read the heads of the same blocks at about the same time: the
// memory is quicker at what lies together.
//
// With batch_invariant, cuts fall only between the parts of an item, and those follow from the item's own length.
#pragma once

#include "../../warp.cuh"
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
  const auto at = [](int i, int stride) { return static_cast<int64_t>(i) * stride; };
  Sequence s;
  s.len = __ldg(p.seq_lens + at(seq, a.seq_lens_stride));
  s.query_begin = seq, s.query_len = 1;
  if (p.cu_seqlens_q) {
    s.query_begin = __ldg(p.cu_seqlens_q + at(seq, a.cu_seqlens_q_stride));
    s.query_len = __ldg(p.cu_seqlens_q + at(seq + 1, a.cu_seqlens_q_stride)) - s.query_begin;
  }
  const bool ours = (s.len > 0) & (s.query_len >= max(1, a.range.min_len)) & (s.query_len <= a.range.max_len);
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

// The first tile of an item at or after `offset` where a cut may fall.
template <class Traits>
__device__ __forceinline__ int cut_at(const DecodeArgs& a, int offset, int num_tiles) {
  if (!a.p.batch_invariant) return min(num_tiles, offset);
  const int part = part_tiles<Traits>(num_tiles);
  return min(num_tiles, (offset + part - 1) / part * part);
}

// Where this CTA stands.
struct CtaPlace {
  int column, index;  // in the column

  __device__ __forceinline__ static CtaPlace of(const DecodeArgs& a) {
    const int index = blockIdx.x * a.columns_inverse >> 16;
    return {static_cast<int>(blockIdx.x) - index * a.columns, index};
  }
  // Counted column by column, which is how slots are numbered.
  __device__ __forceinline__ int number(const DecodeArgs& a) const { return column * a.column_ctas + index; }
};

// A position in the share of a CTA.  The CTA `index` of a column owns the tiles from index * chunk to (index + 1) *
// chunk of its flattened list.
template <class Traits>
struct Walk {
  int seq, head_group, tile;  // tile of the item: its tokens begin at (s.first_tile + tile) * kTileTokens
  int first_head_group;       // of the column
  Sequence s;
  unsigned item_begin, end, chunk;  // where the item and the share begin and end in the list

  __device__ __forceinline__ bool done() const { return s.num_tiles == 0; }
  __device__ __forceinline__ bool in_last_item() const { return item_begin + s.num_tiles >= end; }
  __device__ __forceinline__ int limit(const DecodeArgs& a) const {  // tiles of the item below this one are ours
    return cut_at<Traits>(a, end - item_begin, s.num_tiles);
  }
  __device__ __forceinline__ int first_token() const { return (s.first_tile + tile) * Traits::kTileTokens; }

  __device__ __forceinline__ void next_item(const DecodeArgs& a) {
    if (in_last_item()) {
      s.num_tiles = 0;
      return;
    }
    item_begin += s.num_tiles;
    tile = 0;
    if (++head_group == first_head_group + a.column_head_groups) {
      head_group = first_head_group;
      do s = load_sequence<Traits>(a, ++seq);  // ends: the last sequence of a share is not empty
      while (s.num_tiles == 0);
    }
  }
  __device__ __forceinline__ void advance(const DecodeArgs& a, int tiles) {
    tile += tiles;
    while (!done() && tile >= limit(a)) {
      const int beyond = tile - s.num_tiles;
      next_item(a);
      tile = beyond;
    }
  }
};

// How many CTAs take part when the prefill kernel runs beside this one: as large a part of them as of the work, so that
// both end together.  A multiprocessor takes as long to decode with a key and its value as to multiply kBalance packed
// rows of prefill with them.  Rather too many: CTAs of prefill take over where decode ends, but not the other way
// round.
template <class Traits>
__device__ __forceinline__ unsigned ctas_beside_prefill(const DecodeArgs& a, unsigned total) {
  constexpr int kBalance = Traits::kRows == 8 ? 120 : 192;
  const AttentionParams& p = a.p;
  unsigned prefill = 0;  // in tiles
  for (int seq = threadIdx.x % 32; seq < p.num_seqs; seq += 32) {
    const Sequence s = load_sequence<Traits>(a, seq);
    if (s.len <= 0 || s.query_len <= a.range.max_len) continue;
    const unsigned keys = min(s.len - s.query_len / 2, s.query_len / 2 + a.window);
    prefill += min(1u << 20, (s.query_len * a.group / kBalance) * (keys / Traits::kTileTokens));
  }
  prefill = __shfl_sync(~0u, warp_inclusive_sum(prefill), 31) * a.column_head_groups;
  const uint64_t all = static_cast<uint64_t>(total) + prefill;
  return all == 0 ? gridDim.x
                  : max(1u, static_cast<unsigned>((total * static_cast<uint64_t>(gridDim.x) + all - 1) / all));
}

// Where all items have the same `tiles`: a share with which cuts meet the ends of items, if it is larger by 1/32 at
// most.
__device__ __forceinline__ unsigned aligned_share(unsigned share, unsigned tiles) {
  const unsigned aligned = share < tiles ? tiles / (tiles / share) : (share + tiles - 1) / tiles * tiles;
  return aligned <= share + share / 32 && (aligned >= tiles || tiles % aligned == 0) ? aligned : share;
}

// The share of this CTA; by whole warps.
template <class Traits>
__device__ __forceinline__ Walk<Traits> make_walk(const DecodeArgs& a) {
  const int lane = threadIdx.x % 32, num_seqs = a.p.num_seqs;
  const int per_lane = (num_seqs + 31) / 32;  // consecutive sequences
  const auto cost = [&](int seq) -> unsigned {
    const int tiles = load_sequence<Traits>(a, min(seq, num_seqs - 1)).num_tiles;
    return seq < num_seqs ? tiles * a.column_head_groups : 0;
  };
  Walk<Traits> w = {};
  if (num_seqs == 0) return w;
  unsigned sum = cost(lane * per_lane), first = 0;
  if constexpr (Traits::kAlignedShares) first = __shfl_sync(~0u, sum, 0);  // of sequence 0
#pragma unroll 4
  for (int i = 1; i < per_lane; i++) sum += cost(lane * per_lane + i);
  const unsigned inclusive = warp_inclusive_sum(sum), total = __shfl_sync(~0u, inclusive, 31);
  unsigned chunk = __umulhi(total - 1, a.ctas_inverse) + 1;  // total / column_ctas, rounded up
  if (a.range.side_by_side) {
    const unsigned ctas = ctas_beside_prefill<Traits>(a, total);
    chunk = (total + ctas - 1) / ctas;
  }
  if (first > 0 && total == first * num_seqs) chunk = aligned_share(chunk, first / a.column_head_groups);
  w.chunk = max(chunk, static_cast<unsigned>(a.min_share));
  const CtaPlace place = CtaPlace::of(a);
  const unsigned begin = place.index * w.chunk;
  w.end = min(begin + w.chunk, total);
  if (begin >= total) return w;

  // The sequence that holds `begin`, and where it begins itself: first the lane that counted it, then among its own.
  const int owner = __ffs(__ballot_sync(~0u, begin >= inclusive - sum && begin < inclusive)) - 1;
  w.seq = owner * per_lane;
  w.item_begin = __shfl_sync(~0u, inclusive - sum, owner);
  for (int i = 0; per_lane > 1; i += 32) {
    const unsigned c = i + lane < per_lane ? cost(owner * per_lane + i + lane) : 0;
    const unsigned upto = w.item_begin + warp_inclusive_sum(c);
    const unsigned hit = __ballot_sync(~0u, begin >= upto - c && begin < upto);
    if (hit) {
      const int l = __ffs(hit) - 1;
      w.seq += i + l;
      w.item_begin = __shfl_sync(~0u, upto - c, l);
      break;
    }
    w.item_begin = __shfl_sync(~0u, upto, 31);
  }
  w.s = load_sequence<Traits>(a, w.seq);
  const int head_groups = (begin - w.item_begin) / w.s.num_tiles;
  w.first_head_group = place.column * a.column_head_groups;
  w.head_group = w.first_head_group + head_groups;
  w.item_begin += head_groups * w.s.num_tiles;
  w.tile = cut_at<Traits>(a, begin - w.item_begin, w.s.num_tiles);
  if (a.p.batch_invariant) w.advance(a, 0);  // the first cut may lie at the end of the item
  return w;
}

// The pieces of an item, in order: a piece is what a CTA owns of it, or one part if batch_invariant.  An item of one
// piece is finished where it is computed; otherwise all are published, and merged by the CTA of the last one.  A slot
// has one writer at a time:
// - Free cuts: CTA number b has slot b, for its piece of the item that began in an earlier CTA, and slot gridDim.x + b,
//   for its piece of the item that begins here and goes on.
// - batch_invariant: kMaxParts slots of the CTA that the item begins in.  It has two such runs: one for the item that
//   goes on in the next CTA, one for those that end in the same, one after the other.
struct Pieces {
  int base, count;  // the slot of piece k > 0 is base + k
  int first_slot;   // of piece 0

  template <class Traits>
  __device__ __forceinline__ static Pieces of(const DecodeArgs& a, const Walk<Traits>& w) {
    const int first = w.item_begin / w.chunk;  // CTA of the column
    const int first_cta = CtaPlace::of(a).column * a.column_ctas + first;
    if (!a.p.batch_invariant)
      return {first_cta, static_cast<int>((w.item_begin + w.s.num_tiles - 1) / w.chunk) - first + 1,
              static_cast<int>(gridDim.x) + first_cta};
    const int part = part_tiles<Traits>(w.s.num_tiles), count = (w.s.num_tiles + part - 1) / part;
    const int last = (w.item_begin + (count - 1) * part) / w.chunk;
    const int base = (first_cta * 2 + (last == first)) * kMaxParts;
    return {base, count, base};
  }
  __device__ __forceinline__ int slot(int piece) const { return piece == 0 ? first_slot : base + piece; }
  // batch_invariant: the item lies in one CTA.
  __device__ __forceinline__ bool in_one_cta() const { return base / kMaxParts & 1; }
};

}  // namespace paged_attn::sm90
