// Who does what: the work list of a call and how CTAs share it.
//
// The query rows of a KV head's group are packed, row = query token x group + head within the group, so that K and V
// are read once a group.  A sequence's packed rows are cut into query tiles, the keys that a query tile sees into key
// tiles.  The list is (sequence, query tile, KV head, key tile), flattened in this order; an item is a query tile and a
// KV head.  make_plan writes the list's query tiles; everything else follows from it on the device.  Items are dealt
// whole or cut into equal contiguous shares of key tiles, one a CTA ("stream-K").
#pragma once

#include <cstdint>

#include "../../divisor.cuh"
#include "../paths.h"

namespace paged_attn::mma {

struct TileShape {
  int rows, keys;  // packed query rows and keys of a tile
};

// Head counts that are divided by.
struct Heads {
  Divisor group, kv;  // query heads of a KV head; KV heads

  Heads() = default;
  explicit Heads(const AttentionParams& p) : group(p.num_heads / p.num_kv_heads), kv(p.num_kv_heads) {}
};

// A query tile of the list.  An entry behind the last one holds the list's length in `begin`.
struct alignas(16) PlanEntry {
  int64_t begin;  // work before it, in (KV head, key tile) pairs
  int q_begin;    // first row of its sequence in `query`
  int q_len;      // query tokens of its sequence
  int seq_len;
  int seq;
  int first_row;  // of the sequence's packed rows
  int padding;
};

// In global memory, or, made by a CTA for itself alone, in shared memory.
struct Plan {
  int* num_entries;
  int* num_dealt;  // items that CTAs have taken
  PlanEntry* entries;
};

// The keys that a query tile needs.
struct KeySpan {
  int key_begin, key_end;    // seen by at least one row
  int tile_begin, tile_end;  // key tiles that hold them; never none, so that every row gets written
  int full_begin, full_end;  // seen by every row
};

__device__ inline KeySpan key_span(const AttentionParams& p, const Heads& heads, TileShape shape, const PlanEntry& e) {
  const int first_position = e.seq_len - e.q_len + heads.group.quotient(e.first_row);
  const int last_token = min(heads.group.quotient(e.first_row + shape.rows - 1), e.q_len - 1);
  const int last_position = e.seq_len - e.q_len + last_token;
  KeySpan s;
  s.key_begin = p.window_size > 0 ? max(0, first_position - p.window_size + 1) : 0;
  s.key_end = p.causal ? max(0, min(e.seq_len, last_position + 1)) : e.seq_len;
  s.full_begin = p.window_size > 0 ? max(0, last_position - p.window_size + 1) : 0;
  s.full_end = p.causal ? min(e.seq_len, first_position + 1) : e.seq_len;
  s.tile_begin = min(s.key_begin, max(s.key_end - 1, 0)) / shape.keys;
  s.tile_end = max(s.tile_begin + 1, (s.key_end + shape.keys - 1) / shape.keys);
  return s;
}

// batch_invariant: how the keys are cut, counted from key 0, whoever sees them: kMinUnits units of `tiles` key tiles,
// then half as many of twice their size, half as many of four times, and so on.  The number of units, and with it the
// memory for partials, grows with the logarithm of the longest possible sequence only.
struct Units {
  static constexpr int kMinUnits = 64;

  int tiles;  // 0: balanced cut

  __host__ __device__ int index(int tile) const {
    return kMinUnits / 2 * log2_size(tile) + (tile / tiles >> log2_size(tile));
  }
  __device__ int begin(int tile) const { return (tile / tiles >> log2_size(tile)) * tiles << log2_size(tile); }
  __device__ int end(int tile) const { return begin(tile) + (tiles << log2_size(tile)); }

 private:
  // In units of `tiles`, of the unit that holds `tile`.
  __host__ __device__ int log2_size(int tile) const {
    int log2 = 0;
    while (tile / tiles >> log2 >= kMinUnits) ++log2;
    return log2;
  }
};

// A run of key tiles of one query tile and KV head, done by one CTA without a break.
struct Piece {
  PlanEntry entry;
  KeySpan span;
  int num_rows;              // of the query tile
  int head;                  // KV head
  int tile_begin, tile_end;  // its key tiles
  bool first, last;          // holds the first, the last key tile of span

  __device__ bool whole() const { return first && last; }
};

// The CTAs that share an item, one piece each.
struct Parts {
  int first_cta, count;
};

// The item that begins in a CTA and ends in a later one.
struct CutItem {
  PlanEntry entry;
  int head;       // KV head
  int num_parts;  // 0: there is none
};

// The pieces of one CTA, in order.  With `deals`, the items from the list's end on, its longest, are taken whole by
// whoever comes first, as many as fill the grid a whole number of times; the rest is cut.  With units
// (batch_invariant) a piece is what a query tile sees of a unit, and belongs to the CTA whose share holds
// their first tile, or all items are dealt: the cut of a row depends on the row alone.  All threads of a warp make a
// walk together; then one of them walks.
class Walk {
 public:
  __device__ Walk(const Heads& heads, const Plan& plan, bool deals, int min_share, Units units)
      : plan_(plan), units_(units), index_(0), next_begin_(0) {
    const int count = *plan.num_entries;
    num_items_ = count * heads.kv.value;
    num_cut_ = !deals ? num_items_ : units.tiles > 0 ? 0 : num_items_ % static_cast<int>(gridDim.x);
    const int whole = heads.kv.quotient(num_cut_), rest = num_cut_ - whole * heads.kv.value;  // entries; items
    int64_t total = plan.entries[whole].begin;
    if (rest > 0) total += rest * ((plan.entries[whole + 1].begin - total) / heads.kv.value);
    share_ = max((total + gridDim.x - 1) / gridDim.x, static_cast<int64_t>(min_share));
    position_ = min(share_ * blockIdx.x, total);
    end_ = min(position_ + share_, total);
    if (position_ < end_) {
      index_ = find(count);
      load();
    }
  }

  // A turn at the items that are dealt, for `next`; drawn early, so that it is there when it is needed.
  __device__ int draw() { return num_cut_ < num_items_ ? atomicAdd(plan_.num_dealt, 1) : 0; }

  __device__ bool next(const AttentionParams& p, const Heads& heads, TileShape shape, int turn, Piece& piece) {
    if (num_cut_ < num_items_) {
      const int item = num_items_ - 1 - turn;
      if (item >= num_cut_) {
        const int entry = heads.kv.quotient(item);
        fill(p, heads, shape, plan_.entries[entry], piece);
        piece.head = item - entry * heads.kv.value;
        piece.tile_begin = piece.span.tile_begin;
        piece.tile_end = piece.span.tile_end;
        piece.first = piece.last = true;
        return true;
      }
      num_items_ = num_cut_;
    }
    while (position_ < end_) {
      while (position_ >= next_begin_) {
        ++index_;
        load();
      }
      fill(p, heads, shape, entry_, piece);
      const unsigned tiles = piece.span.tile_end - piece.span.tile_begin;
      const unsigned offset = static_cast<unsigned>(position_ - entry_.begin);
      piece.head = offset / tiles;
      const int t = offset % tiles;
      piece.tile_begin = piece.span.tile_begin + t;
      const int unit_begin = units_.tiles > 0 ? units_.begin(piece.tile_begin) : 0;
      if (units_.tiles > 0) {
        piece.tile_end = min(piece.span.tile_end, units_.end(piece.tile_begin));
      } else {
        piece.tile_end = piece.tile_begin + static_cast<int>(min(static_cast<int64_t>(tiles - t), end_ - position_));
      }
      position_ += piece.tile_end - piece.tile_begin;
      piece.first = t == 0;
      piece.last = piece.tile_end == piece.span.tile_end;
      if (units_.tiles == 0 || piece.first || piece.tile_begin == unit_begin) return true;
    }
    return false;
  }

  // Of the balanced cut: the parts of the item of `piece`.
  __device__ Parts parts(const Piece& piece) const {
    const int tiles = piece.span.tile_end - piece.span.tile_begin;
    const int64_t begin = piece.entry.begin + int64_t{piece.head} * tiles;
    const int first = static_cast<int>(begin / share_), last = static_cast<int>((begin + tiles - 1) / share_);
    return {first, last - first + 1};
  }

 private:
  // The last entry that begins at or before position_; 32 probes a round.
  __device__ int find(int count) const {
    const int lane = threadIdx.x % 32;
    int low = 0, high = count;
    while (high - low > 1) {
      const int step = (high - low + 31) / 32;
      const int probe = low + lane * step;
      const unsigned hits = __ballot_sync(~0u, probe < high && plan_.entries[probe].begin <= position_);
      low += (31 - __clz(hits)) * step;
      high = min(high, low + step);
    }
    return low;
  }
  __device__ static void fill(const AttentionParams& p, const Heads& heads, TileShape shape, PlanEntry entry,
                              Piece& piece) {
    piece.entry = entry;
    piece.span = key_span(p, heads, shape, entry);
    piece.num_rows = min(shape.rows, entry.q_len * heads.group.value - entry.first_row);
  }
  __device__ void load() {
    entry_ = plan_.entries[index_];
    next_begin_ = plan_.entries[index_ + 1].begin;
  }

  Plan plan_;
  int num_items_, num_cut_;  // items of the list not known to be taken, and of those that are cut
  Units units_;
  int index_;
  int64_t share_, position_, end_, next_begin_;
  PlanEntry entry_;
};

// ---- Host
// A bound on the query tiles of a call.
inline int64_t max_plan_entries(const AttentionParams& p, QueryRange range, TileShape shape) {
  const int64_t group = p.num_heads / p.num_kv_heads;
  if (range.max_len * group <= shape.rows) return p.num_seqs;
  return p.num_tokens * group / shape.rows + p.num_seqs;
}
void launch_plan(const AttentionParams& p, QueryRange range, TileShape shape, const Plan& plan, cudaStream_t stream,
                 bool dependent);

}  // namespace paged_attn::mma
