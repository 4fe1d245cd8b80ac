// What a prefill tile is, which keys it walks, and the order in which the grid takes the tiles.
//
// The rows of a sequence and KV head are its (query token, head of the group) pairs in that order, whatever the group:
// row r is token r / group and head r % group.  A tile is kRows of them in turn.
#pragma once

#include <cfloat>
#include <cstdint>

#include "../../../params.h"
#include "../paths.h"

namespace paged_attn::sm90 {

constexpr int kWarpgroupRows = 64;
constexpr int kMaxGroup = 512;  // so that row_of is exact

struct PrefillParams {
  AttentionParams attention;
  QueryRange range;
  unsigned* counters;  // [2], all ones between launches: tiles taken beyond those given at first; CTAs done
  int group;           // query heads a KV head
  int group_inverse;   // ceil(2^20 / group)
  int box_rows;        // token slots a tensor-map box: a power of two from 8 that divides block size and step
  int head_parts;      // boxes of whole rows: a KV head's distance in parts of 64 columns; 0: a box is of one part
  // A score is scale_log2 x q.k, in units of log2; with a soft cap, cap_log2 x tanh(cap_rate x q.k).
  float scale_log2, cap_log2, cap_rate;
  uint32_t block_inverse;  // ceil(2^32 / block_size), or 1 more
};

// Where the rows of a tile begin: `head` of the group, of query token `token`.
struct Tile {
  int seq;  // negative: no more tiles
  int token, head, kv_head;
  int q_begin;  // row of `query` of the sequence's first query token
  int q_len, seq_len;
  float key_scale;  // of a quantised cache, one for all tokens; else 1; never 0

  // Position of the first query token; negative where there are more queries than keys.
  __device__ int first_position() const { return seq_len - q_len; }
};

// The token, and the head of the group, of row `row` of a tile.
struct TokenHead {
  int token, head;
};
__device__ __forceinline__ TokenHead row_of(const PrefillParams& p, const Tile& tile, int row) {
  const int r = tile.head + row;  // (r + 1) x group < 2^20, so the quotient is exact
  const int token = (r * p.group_inverse) >> 20;
  return {tile.token + token, r - token * p.group};
}

// Where it does not vary from token to token; else 1.
__device__ __forceinline__ float head_scale(const ScaleView& scale, int kv_head) {
  return scale.data && !scale.per_token() ? __ldg(scale.data + kv_head * scale.strides.head) : 1.f;
}

// Keys that the query tokens first_token .. last_token see, taken together, and each of them.
struct KeyRange {
  int any_begin, any_end;  // some token sees these
  int all_begin, all_end;  // every token sees these; may be empty
};
__device__ __forceinline__ KeyRange key_range(const AttentionParams& p, const Tile& tile, int first_token,
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
__device__ __forceinline__ int first_visible_key(const AttentionParams& p, const Tile& tile) {
  return p.window_size > 0 ? max(0, tile.first_position() - p.window_size + 1) : 0;
}

// The steps of kKeys keys that a tile walks, from the last down to the first; none where last < first.
struct Steps {
  int first, last;
};
template <int kRows, int kKeys>
__device__ __forceinline__ Steps tile_steps(const PrefillParams& p, const Tile& tile) {
  const KeyRange keys = key_range(p.attention, tile, tile.token, row_of(p, tile, kRows - 1).token);
  if (keys.any_end <= keys.any_begin) return {0, -1};
  return {keys.any_begin / kKeys, (keys.any_end - 1) / kKeys};
}

// All tiles, one sequence after the other; in a sequence the last tile of every head, then the last but one, and so on:
// with a causal mask the longest come first, and all heads read the same blocks at about the same time.  Used by a
// whole warp, with indices that never decrease: lane i holds sequence `base_seq + i`.
template <int kRows>
class TileList {
 public:
  __device__ explicit TileList(const PrefillParams& p) : p_(p) { load(); }

  __device__ Tile find(int index) {
    while (index - base_ >= total_) {
      base_ += total_;
      base_seq_ += 32;
      if (base_seq_ >= p_.attention.num_seqs) return {-1};
      load();
    }
    const int lane = __ffs(__ballot_sync(~0u, index - base_ < end_)) - 1;
    const int tiles = __shfl_sync(~0u, tiles_, lane);
    const int local = index - base_ - (__shfl_sync(~0u, end_, lane) - tiles);
    const int heads = p_.attention.num_kv_heads;
    Tile t;
    t.seq = base_seq_ + lane;
    const int first_row = (tiles / heads - 1 - local / heads) * kRows;
    t.token = first_row / p_.group;
    t.head = first_row % p_.group;
    t.kv_head = local % heads;
    t.q_begin = __shfl_sync(~0u, q_begin_, lane);
    t.q_len = __shfl_sync(~0u, q_len_, lane);
    t.seq_len = __shfl_sync(~0u, seq_len_, lane);
    const float scale = head_scale(p_.attention.k_scale, t.kv_head);
    t.key_scale = scale == 0.f ? FLT_MIN : scale;  // 0 times a maximum of -inf would be NaN
    return t;
  }

 private:
  __device__ void load() {
    const AttentionParams& a = p_.attention;
    const int lane = threadIdx.x % 32, seq = base_seq_ + lane;
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
    const bool mine = seq_len_ > 0 && q_len_ >= max(1, p_.range.min_len) && q_len_ <= p_.range.max_len;
    tiles_ = mine ? (q_len_ * p_.group + kRows - 1) / kRows * a.num_kv_heads : 0;
    end_ = tiles_;
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
      const int below = __shfl_up_sync(~0u, end_, i);
      if (lane >= i) end_ += below;
    }
    total_ = __shfl_sync(~0u, end_, 31);
  }

  const PrefillParams& p_;
  int base_seq_ = 0, base_ = 0, total_;  // tiles before base_seq_, and of the 32 sequences from there
  int tiles_, end_;                      // of this lane's sequence; tiles up to and including it
  int q_begin_, q_len_, seq_len_;
};

}  // namespace paged_attn::sm90
