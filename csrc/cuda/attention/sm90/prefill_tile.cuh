// What a prefill tile is, which keys it walks, and the order in which the grid takes the tiles.
//
// The rows of a sequence and KV head are its (query token, head of the group) pairs in that order, whatever the group:
// row r is token r / group and head r % group.  A tile is kRows of them in turn.
#pragma once

#include <cfloat>
#include <climits>
#include <cstdint>

#include "../../../params.h"
#include "../../divisor.cuh"
#include "../../warp.cuh"
#include "../paths.h"
#include "../widen.cuh"

namespace paged_attn::sm90 {

constexpr int kWarpgroupRows = 64;
constexpr int kRowWarps = 8;     // of a tile, 16 rows each
constexpr int kMaxGroup = 512;   // so that row_of is exact
constexpr int kLeastSteps = 8;   // of a piece of a tile that is cut by keys
constexpr int kWantedSteps = 8;  // of a tile that are still to be loaded when the next one is taken

// What follows from x is worked out anew from here on, not kept in registers that are lacking.
template <class T>
__device__ __forceinline__ T forget(T& x) {
  asm volatile("" : "+r"(x));
  return x;
}

struct PrefillParams {
  AttentionParams attention;
  QueryRange range;
  unsigned* counters;  // [2], all ones between launches: tiles taken beyond those given at first; CTAs done
  // Of tiles cut by keys: a slot for every piece, at most one piece a CTA.  Null: none is cut.
  float4* partials;    // [slots, warps of a tile, columns / 8 + 1, 32]
  unsigned* arrivals;  // [slots, warps of a tile], all ones between launches: pieces done, in the slot of the first
  Divisor by_group, by_heads;
  int group;          // query heads a KV head
  int group_inverse;  // ceil(2^20 / group)
  int box_rows;       // token slots a tensor-map box: a power of two from 8 that divides block size and step
  int head_parts;     // boxes of whole rows: a KV head's distance in parts of 64 columns; 0: a box is of one part
  // A score is scale_log2 x q.k, in units of log2; with a soft cap, cap_log2 x tanh(cap_rate x q.k).
  float scale_log2, cap_log2, cap_rate;
  uint32_t block_inverse;  // ceil(2^32 / block_size), or 1 more
  // 8-bit K and V in one map, a box of both: which is the first, and where a head of a block is in the last dimension.
  bool paired, value_first;
  int block_places, head_places;
};

// Calls that have instances of their own.
inline bool has_score_mods(const PrefillParams& p) {
  return p.cap_log2 > 0.f || p.attention.alibi_slopes || !(p.scale_log2 > 0.f);
}

// The steps of kKeys keys that a tile walks, from the last down to the first; none where last < first.
struct Steps {
  int first, last;
  __device__ __forceinline__ bool none() const { return last < first; }
  __device__ __forceinline__ int near_end() const { return min(last, first + kWantedSteps - 1); }  // of those to load
};

// The pieces of a tile, `slot` being that of this one.
struct TilePieces {
  int slot, first_slot, count;  // count 1: the tile is whole
};

// Where the rows of a tile begin: `head` of the group, of query token `token`.
struct TileRows {
  int seq;  // negative: no more tiles
  int token, head, kv_head;
  int q_begin;  // row of `query` of the sequence's first query token
  int q_len, seq_len;
  float key_scale;  // of an 8-bit cache or a copy of it, one for all tokens; else 1; never 0

  // Position of the first query token; negative where there are more queries than keys.
  __device__ int first_position() const { return seq_len - q_len; }
};

// A tile, or a piece of one that is cut by keys.
struct Tile : TileRows {
  Steps steps;
  TilePieces pieces;
};

// The token, and the head of the group, of row `row` of a tile.
struct TokenHead {
  int token, head;
};
__device__ __forceinline__ TokenHead row_of(const PrefillParams& p, const TileRows& tile, int row) {
  const int r = tile.head + row;  // (r + 1) x group < 2^20, so the quotient is exact
  const int token = (r * p.group_inverse) >> 20;
  return {tile.token + token, r - token * p.group};
}

// Whether scales vary from token to token.
template <class Traits>
__device__ __forceinline__ bool has_token_scales(const PrefillParams& p) {
  if constexpr (!Traits::kTokenScales) return false;
  return !Traits::kScoreMods || p.attention.k_scale.per_token();
}

// Keys that the query tokens first_token .. last_token see, taken together, and each of them.
struct KeyRange {
  int any_begin, any_end;  // some token sees these
  int all_begin, all_end;  // every token sees these; may be empty
};
__device__ __forceinline__ KeyRange key_range(const AttentionParams& p, const TileRows& tile, int first_token,
                                              int last_token) {
  KeyRange r = {0, tile.seq_len, 0, tile.seq_len};
  if (p.causal) {
    r.any_end = min(tile.seq_len, tile.first_position() + last_token + 1);
    r.all_end = min(tile.seq_len, tile.first_position() + first_token + 1);
  }
  if (p.window_size > 0) {
    r.any_begin = max(0, tile.first_position() + first_token - p.window_size + 1);
    r.all_begin = max(0, tile.first_position() + last_token - p.window_size + 1);
  }
  return r;
}

// The first key that any query token of the sequence sees: blocks wholly before it may be gone.
__device__ __forceinline__ int first_visible_key(const AttentionParams& p, const TileRows& tile) {
  return p.window_size > 0 ? max(0, tile.first_position() - p.window_size + 1) : 0;
}

template <int kRows, int kKeys>
__device__ __forceinline__ Steps tile_steps(const PrefillParams& p, const TileRows& tile) {
  const KeyRange keys = key_range(p.attention, tile, tile.token, row_of(p, tile, kRows - 1).token);
  if (keys.any_end <= keys.any_begin) return {0, -1};
  return {keys.any_begin / kKeys, (keys.any_end - 1) / kKeys};
}

// All tiles, one sequence after the other, of 32 in turn the longest first; in a sequence the last tile of every head,
// then the last but one, and so on: with a causal mask the longest come first, and all heads read the same blocks at
// about the same time.  Used by a whole warp, with indices that never decrease: lane i holds sequence `base_seq + i`.
//
// When the grid has been filled a whole number of times, the tiles left over are cut by keys, into as many pieces as
// there are CTAs for each of them.  Pieces at about the same keys of a head run at the same time and read the same
// blocks; shares of other sizes would not, and the L2 cache is too slow for that.  The cut follows from lengths and
// grid alone.
template <class Traits>
class TileList {
 public:
  __device__ explicit TileList(const PrefillParams& p) : p_(p) {
    if (p.partials) {
      int tiles = 0;
      for (int seq = threadIdx.x % 32; seq < p.attention.num_seqs; seq += 32) tiles += load(seq);
      tiles = __reduce_add_sync(~0u, tiles);
      const int grid = static_cast<int>(gridDim.x), left = tiles % grid;
      whole_ = tiles - left;
      most_pieces_ = left > 0 ? grid / left : 1;
    }
    load_window();
  }

  // An index counts tiles and, past those that are taken whole, pieces.  False: the tile has fewer pieces than that.
  __device__ bool find(int index, Tile& t) {
    const int slot = index - forget(whole_);
    if (slot >= 0) index = whole_ + slot / most_pieces_;
    while (index - base_ >= total_) {
      base_ += total_;
      base_seq_ += 32;
      if (base_seq_ >= p_.attention.num_seqs) {
        t.seq = -1;
        return true;
      }
      load_window();
    }
    const int in_window = index - base_;
    const int lane = __ffs(__ballot_sync(~0u, in_window >= end_ - tiles_ && in_window < end_)) - 1;
    const int local = in_window - __shfl_sync(~0u, end_ - tiles_, lane), order = p_.by_heads.quotient(local);
    t.seq = base_seq_ + lane;
    t.kv_head = local - order * p_.attention.num_kv_heads;
    t.q_begin = __shfl_sync(~0u, q_begin_, lane);
    t.q_len = __shfl_sync(~0u, q_len_, lane);
    t.seq_len = __shfl_sync(~0u, seq_len_, lane);
    const int first_row = (num_tiles(t.q_len) - 1 - order) * Traits::kRows;
    t.token = p_.by_group.quotient(first_row);
    t.head = first_row - t.token * p_.group;
    const float scale = head_scale(p_.attention.k_scale, t.kv_head);
    t.key_scale = scale == 0.f ? FLT_MIN : scale;  // 0 times a maximum of -inf would be NaN
    t.steps = tile_steps<Traits::kRows, Traits::kKeys>(p_, t);
    t.pieces = {0, 0, 1};
    if (slot >= 0) {
      const int last = t.steps.last, steps = last - t.steps.first + 1;
      const int first_slot = (index - whole_) * most_pieces_, piece = slot - first_slot;
      t.pieces = {slot, first_slot, max(1, min(most_pieces_, steps / kLeastSteps))};
      if (piece >= t.pieces.count) return false;
      t.steps = {last + 1 - steps * (piece + 1) / t.pieces.count, last - steps * piece / t.pieces.count};
    }
    return true;
  }

 private:
  // Of one head.
  __device__ int num_tiles(int q_len) const { return (q_len * p_.group + Traits::kRows - 1) / Traits::kRows; }

  // Reads the lengths of a sequence; returns its tiles of all heads.
  __device__ int load(int seq) {
    const AttentionParams& a = p_.attention;
    q_begin_ = seq;
    q_len_ = 1;
    seq_len_ = 0;
    if (seq < a.num_seqs) {
      seq_len_ = __ldg(a.seq_lens + seq * a.seq_lens_stride);
      if (a.cu_seqlens_q) {
        q_begin_ = __ldg(a.cu_seqlens_q + seq * a.cu_seqlens_q_stride);
        q_len_ = __ldg(a.cu_seqlens_q + (seq + 1) * a.cu_seqlens_q_stride) - q_begin_;
      }
    }
    const bool mine = seq_len_ > 0 && q_len_ > 0 && q_len_ >= p_.range.min_len && q_len_ <= p_.range.max_len;
    return mine ? num_tiles(q_len_) * a.num_kv_heads : 0;
  }
  __device__ void load_window() {
    const int lane = threadIdx.x % 32;
    tiles_ = load(base_seq_ + lane);
    end_ = total_ = 0;
    for (unsigned rest = __ballot_sync(~0u, tiles_ > 0); rest != 0; rest &= rest - 1) {
      const int other = __ffs(rest) - 1;
      const int tiles = __shfl_sync(~0u, tiles_, other), seq_len = __shfl_sync(~0u, seq_len_, other);
      if (seq_len > seq_len_ || (seq_len == seq_len_ && other <= lane)) end_ += tiles;
      total_ += tiles;
    }
  }

  const PrefillParams& p_;
  int base_seq_ = 0, base_ = 0, total_;  // tiles before base_seq_, and of the 32 sequences from there
  int tiles_, end_;                      // of this lane's sequence; tiles of the window up to and including it
  int q_begin_, q_len_, seq_len_;
  int whole_ = INT_MAX, most_pieces_ = 1;
};

}  // namespace paged_attn::sm90
