// The producer warps: one takes tiles, one loads K and one V by tensor loads, one loads Q by cp.async.  Those of 8-bit
// caches share the work out otherwise (prefill_convert.cuh).
#pragma once

#include <cuda.h>

#include "../ptx.cuh"
#include "prefill_layout.cuh"

namespace paged_attn::sm90 {

// The tiles of the CTA, through a ring of kTileSlots.  Consumers keep a slot until they are done with its tile.
template <class Traits>
struct TileRing {
  static constexpr int kReaders = Traits::kThreads / 32 - 1;  // warps: all but the one that writes
  static constexpr bool kLanesArrive = Traits::kQuantized;    // each for its own reads, as racecheck counts them

  PrefillSmem<Traits> smem;
  RingPosition<Traits::kTileSlots> position;

  // By the whole warp.
  __device__ __forceinline__ void write(const Tile& t) {
    ptx::mbarrier_wait(smem.tile_empty(position.slot()), position.parity() ^ 1);
    static_assert(sizeof(Tile) <= Traits::kTileBytes);
    if (threadIdx.x % 32 == 0) {
      const uint32_t slot = smem.tile(position.slot());
      ptx::store_shared_v4(slot, t.seq, t.token, t.head, t.kv_head);
      ptx::store_shared_v4(slot + 16, t.q_begin, t.q_len, t.seq_len, __float_as_int(t.key_scale));
      ptx::store_shared_v4(slot + 32, t.steps.first, t.steps.last, 0, 0);
      ptx::store_shared_v4(slot + 48, t.pieces.slot, t.pieces.first_slot, t.pieces.count, 0);
      ptx::mbarrier_arrive(smem.tile_full(position.slot()));
    }
    position.advance();
  }

  __device__ __forceinline__ void wait() { ptx::mbarrier_wait(smem.tile_full(position.slot()), position.parity()); }
  // Between wait and release, as often as wanted: shared memory keeps it, so that registers need not.
  __device__ __forceinline__ TileRows rows() const {
    const uint32_t slot = smem.tile(position.slot());
    TileRows t;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(t.seq), "=r"(t.token), "=r"(t.head), "=r"(t.kv_head)
                 : "r"(slot));
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(t.q_begin), "=r"(t.q_len), "=r"(t.seq_len), "=f"(t.key_scale)
                 : "r"(slot + 16));
    return t;
  }
  __device__ __forceinline__ Steps steps() const {
    const uint2 x = ptx::load_shared_v2(smem.tile(position.slot()) + 32);
    return {static_cast<int>(x.x), static_cast<int>(x.y)};
  }
  __device__ __forceinline__ TilePieces pieces() const {
    const uint4 x = ptx::load_shared_v4(smem.tile(position.slot()) + 48);
    return {static_cast<int>(x.x), static_cast<int>(x.y), static_cast<int>(x.z)};
  }
  __device__ __forceinline__ Tile read() const { return {rows(), steps(), pieces()}; }
  __device__ __forceinline__ float key_scale() const { return ptx::load_shared(smem.tile(position.slot()) + 28); }
  // By the whole warp.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (kLanesArrive || threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.tile_empty(position.slot()));
    position.advance();
  }
  __device__ __forceinline__ Tile next() {
    wait();
    const Tile t = read();
    release();
    return t;
  }
};

// What this lane loads of K and V in the steps of a tile, from the last down: a piece of box_rows slots of a block.
template <class Traits>
class PieceWalk {
 public:
  __device__ __forceinline__ PieceWalk(const PrefillParams& p, const TileRows& tile, const Steps& steps)
      : p_(p),
        steps_(steps),
        seq_len_(tile.seq_len),
        first_visible_(first_visible_key(p.attention, tile)),
        table_(p.attention.block_table + tile.seq * p.attention.block_table_stride) {
    const int first_key = steps.last * kKeys + row();
    next_place_ = first_key / p.attention.block_size, next_slot_ = first_key % p.attention.block_size;
    next_block_ = block_of(steps.last);
  }

  __device__ __forceinline__ void go_to(int step) {
    const AttentionParams& a = p_.attention;
    block = next_block_, slot = next_slot_;
    if constexpr (Traits::kQuantized) {  // without a division
      const int places = __umulhi(kKeys, p_.block_inverse);
      next_place_ -= places, next_slot_ -= kKeys - places * a.block_size;
    } else {
      next_place_ -= kKeys / a.block_size, next_slot_ -= kKeys % a.block_size;
    }
    if (next_slot_ < 0) next_slot_ += a.block_size, --next_place_;
    next_block_ = block_of(step - 1);
    if constexpr (Traits::kQuantized) {
      rows = __popc(__ballot_sync(~0u, block >= 0)) * p_.box_rows;
      return;
    }
    rows = kKeys;
    const int end = seq_len_ - step * kKeys, begin = max(0, first_visible_ - step * kKeys);
    if (end < kKeys || begin > 0) rows = ((min(kKeys, end) - 1) / p_.box_rows + 1 - begin / p_.box_rows) * p_.box_rows;
  }

  __device__ __forceinline__ int row() const { return threadIdx.x % 32 * p_.box_rows; }  // of the step

  int block, slot;  // of the current step; block < 0: the sequence sees no token of the piece, and it is left out
  int rows;         // of all lanes

 private:
  static constexpr int kKeys = Traits::kKeys;

  __device__ __forceinline__ int block_of(int step) const {
    const int key = step * kKeys + row();
    const bool needed = step >= steps_.first && row() < kKeys && key < seq_len_ && key + p_.box_rows > first_visible_;
    if (!needed) return -1;
    // A negative id lies past the cache, as any that is too large: TMA reads 0 there.
    return min(static_cast<unsigned>(__ldg(table_ + next_place_)), static_cast<unsigned>(INT_MAX));
  }

  const PrefillParams& p_;
  const Steps steps_;
  const int seq_len_, first_visible_;
  const int32_t* const table_;
  int next_place_, next_slot_, next_block_;  // place: in the table
};

// One tile's keys or values.  `near_end` is called once, kWantedSteps before the end.
template <class Traits, class Full, class Empty, class Data, class NearEnd>
__device__ __forceinline__ void load_blocks(const PrefillParams& p, const CUtensorMap* map, const Tile& tile,
                                            RingPosition<Traits::kStages>& ring, Full full, Empty empty, Data data,
                                            NearEnd near_end) {
  const Steps steps = tile.steps;
  if (steps.none()) return;
  PieceWalk<Traits> piece(p, tile, steps);
#pragma unroll 1
  for (int step = steps.last; step >= steps.first; --step) {
    if (step == steps.near_end()) near_end();
    piece.go_to(step);
    ptx::mbarrier_wait(empty(ring.slot()), ring.parity() ^ 1);
    const uint32_t barrier = full(ring.slot()), dst = data(ring.slot()) + piece.row() / 8 * Traits::kRowGroupBytes;
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive_expect_tx(barrier, piece.rows * Traits::kRowBytes);
    __syncwarp();
    if (piece.block >= 0) {
      if (p.head_parts > 0) {
        ptx::tensor_load_5d(dst, map, 0, 0, tile.kv_head * p.head_parts, piece.slot / 8, piece.block, barrier);
      } else {
#pragma unroll
        for (int i = 0; i < Traits::kParts; ++i)
          ptx::tensor_load_5d(dst + i * Traits::kPartBytes, map, i * 64, piece.slot, tile.kv_head, piece.block, 0,
                              barrier);
      }
    }
    ring.advance();
  }
}

// By the whole warp that loads a tile, near its end.
template <class Traits>
__device__ __forceinline__ void want_tile(PrefillSmem<Traits> smem) {
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.tile_wanted());
}

// A tile is taken no earlier than the loads of the one before are near their end: whoever held one in advance would
// keep it from a CTA that has none.  `load` loads a tile, or waits for those who do, and takes the next one in between.
template <class Traits, class Load>
__device__ __forceinline__ void produce_tiles(const PrefillParams& p, PrefillSmem<Traits> smem, Load load) {
  TileRing<Traits> tiles{smem};
  TileList<Traits> list(p);
  const int lane = threadIdx.x % 32;
  // Beside the decode kernel many CTAs start late: then the first tile comes from the counter too.
  const int given = p.range.side_by_side ? 0 : gridDim.x;
  unsigned taken = blockIdx.x;
  // Of lane 0, which waits for it where it is used: the result of an atomicAdd would be awaited at once, for all lanes.
  const auto take = [&] { taken = lane == 0 ? given + atomicInc(p.counters, ~1u) + 1u : 0; };  // ~0 becomes 0
  if (given == 0) take();
  while (true) {
    Tile tile;
    const bool found = list.find(static_cast<int>(__shfl_sync(~0u, taken, 0)), tile);
    if (found) tiles.write(tile);
    if (tile.seq < 0) break;
    if (found && !tile.steps.none())
      load(tile, take);
    else
      take();
  }
  // The last CTA restores the counters: every other one has taken its last tile.
  if (lane == 0 && atomicAdd(p.counters + 1, 1u) + 1u == gridDim.x - 1) p.counters[0] = p.counters[1] = ~0u;
  if (p.range.side_by_side) ptx::pdl_wait();  // the end of this kernel is the end of both
}

// Where other warps load.
template <class Traits>
__device__ __forceinline__ void produce_tiles(const PrefillParams& p, PrefillSmem<Traits> smem) {
  uint32_t parity = 0;
  produce_tiles<Traits>(p, smem, [&](const Tile&, auto take) {
    ptx::mbarrier_wait(smem.tile_wanted(), parity);
    parity ^= 1;
    take();
  });
}

template <class Traits>
__device__ __forceinline__ void produce_keys(const PrefillParams& p, const CUtensorMap* map, PrefillSmem<Traits> smem) {
  TileRing<Traits> tiles{smem};
  RingPosition<Traits::kStages> ring;
  for (Tile tile = tiles.next(); tile.seq >= 0; tile = tiles.next())
    load_blocks<Traits>(
        p, map, tile, ring, [&](int i) { return smem.key_full(i); }, [&](int i) { return smem.key_empty(i); },
        [&](int i) { return smem.key(i); }, [&] { want_tile(smem); });
}

template <class Traits>
__device__ __forceinline__ void produce_values(const PrefillParams& p, const CUtensorMap* map,
                                               PrefillSmem<Traits> smem) {
  TileRing<Traits> tiles{smem};
  RingPosition<Traits::kStages> ring;
  for (Tile tile = tiles.next(); tile.seq >= 0; tile = tiles.next())
    load_blocks<Traits>(
        p, map, tile, ring, [&](int i) { return smem.value_full(i); }, [&](int i) { return smem.value_empty(i); },
        [&](int i) { return smem.value(i); }, [] {});
}

// The rows of a tile.  Those past the sequence, and columns past head_dim, become 0.
template <class Traits>
__device__ __forceinline__ void load_query(const PrefillParams& p, PrefillSmem<Traits> smem, const TileRows& tile,
                                           RingPosition<Traits::kQueryBuffers> buffer) {
  using T = typename Traits::T;
  constexpr int kLanes = Traits::kChunkLanes, kRowsAtOnce = 32 / kLanes;
  const AttentionParams& a = p.attention;
  int lane = threadIdx.x % 32;
  const int chunk = forget(lane) % kLanes;
  const T* query = static_cast<const T*>(a.query) + tile.q_begin * a.query_strides.token +
                   static_cast<int64_t>(tile.kv_head) * p.group * a.query_strides.head + chunk * 8;
#pragma unroll 1
  for (int i = 0; i < Traits::kRows; i += 32) {  // lane l finds row i + l, then all lanes copy the 32 rows
    const TokenHead at = row_of(p, tile, i + lane);
    const int64_t offset =
        at.token < tile.q_len ? at.token * a.query_strides.token + at.head * a.query_strides.head : -1;
    const int warpgroup = i / kWarpgroupRows;
    const uint32_t dst =
        smem.query(buffer.slot(), warpgroup) + chunk / 8 * Traits::kQueryPartBytes + i % kWarpgroupRows * 128;
    if (i % kWarpgroupRows == 0) ptx::mbarrier_wait(smem.query_empty(buffer.slot(), warpgroup), buffer.parity() ^ 1);
#pragma unroll(Traits::kQueryUnroll)
    for (int r = lane / kLanes; r < 32; r += kRowsAtOnce) {
      const int64_t source = __shfl_sync(~0u, offset, r);
      const bool real = source >= 0 && chunk * 8 < a.head_dim;
      if (chunk < Traits::kChunks)
        ptx::cp_async_16(dst + r * 128 + ((chunk ^ r) % 8) * 16, real ? query + source : a.query, real ? 16 : 0);
    }
    if constexpr (!Traits::kQuantized)
      ptx::cp_async_commit();
    else if (i % kWarpgroupRows + 32 == kWarpgroupRows)  // without a wait: consumers read Q themselves
      ptx::cp_async_mbarrier_arrive(smem.query_full(buffer.slot(), warpgroup));
  }
  if constexpr (!Traits::kQuantized) {
#pragma unroll
    for (int w = 0; w < Traits::kConsumers; ++w) {
      if (w == 0)
        ptx::cp_async_wait<kWarpgroupRows / 32>();
      else
        ptx::cp_async_wait<0>();
      if constexpr (!Traits::kQueryInRegisters) ptx::fence_proxy_async();  // wgmma reads it from shared memory
      ptx::mbarrier_arrive(smem.query_full(buffer.slot(), w));             // each lane for its own copies
    }
  }
}

template <class Traits>
__device__ __forceinline__ void produce_queries(const PrefillParams& p, PrefillSmem<Traits> smem) {
  TileRing<Traits> tiles{smem};
  RingPosition<Traits::kQueryBuffers> buffer;
  for (Tile tile = tiles.next(); tile.seq >= 0; tile = tiles.next()) {
    load_query<Traits>(p, smem, tile, buffer);
    buffer.advance();
  }
}

}  // namespace paged_attn::sm90
