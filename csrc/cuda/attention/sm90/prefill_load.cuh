// The producer warps: one takes tiles, one loads K and one V by tensor loads, one loads Q by cp.async.
#pragma once

#include <cuda.h>

#include "../ptx.cuh"
#include "prefill_layout.cuh"

namespace paged_attn::sm90 {

__device__ __forceinline__ void store_shared(uint32_t address, int x, int y, int z, int w) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// The tiles of the CTA, through a ring of two slots.  Consumers keep a slot until they are done with its tile, so a
// tile is taken no earlier than the one before it is begun.
template <class Traits>
struct TileRing {
  static constexpr int kReaders = Traits::kThreads / 32 - 1;  // warps: all but the one that writes

  PrefillSmem<Traits> smem;
  RingPosition<2> position;

  // By the whole warp.
  __device__ __forceinline__ void write(const Tile& t) {
    ptx::mbarrier_wait(smem.tile_empty(position.slot()), position.parity() ^ 1);
    if (threadIdx.x % 32 == 0) {
      const uint32_t slot = smem.tile(position.slot());
      store_shared(slot, t.seq, t.token, t.head, t.kv_head);
      store_shared(slot + 16, t.q_begin, t.q_len, t.seq_len, 0);
      ptx::mbarrier_arrive(smem.tile_full(position.slot()));
    }
    position.advance();
  }

  __device__ __forceinline__ void wait() { ptx::mbarrier_wait(smem.tile_full(position.slot()), position.parity()); }
  // Between wait and release, as often as wanted: shared memory keeps it, so that registers need not.
  __device__ __forceinline__ Tile read() const {
    const uint32_t slot = smem.tile(position.slot());
    Tile t;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(t.seq), "=r"(t.token), "=r"(t.head), "=r"(t.kv_head)
                 : "r"(slot));
    int unused;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(t.q_begin), "=r"(t.q_len), "=r"(t.seq_len), "=r"(unused)
                 : "r"(slot + 16));
    return t;
  }
  // By the whole warp.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.tile_empty(position.slot()));
    position.advance();
  }
  __device__ __forceinline__ Tile next() {
    wait();
    const Tile t = read();
    release();
    return t;
  }
};

// One tile's keys or values, box_rows tokens a lane.  Pieces without a token that the sequence may see are left out.
template <class Traits, class Full, class Empty, class Data>
__device__ __forceinline__ void load_blocks(const PrefillParams& p, const CUtensorMap* map, const Tile& tile,
                                            RingPosition<Traits::kStages>& ring, Full full, Empty empty, Data data) {
  constexpr int kKeys = Traits::kKeys;
  const AttentionParams& a = p.attention;
  const int first_visible = first_visible_key(a, tile);
  const Steps steps = tile_steps<Traits::kRows, kKeys>(p, tile);
  if (steps.last < steps.first) return;

  // Of this lane's piece: row in a step; then, walking down the steps, place in the table and slot in the block.
  const int lane = threadIdx.x % 32, row = lane * p.box_rows;
  const int32_t* table = a.block_table + tile.seq * a.block_table_stride;
  const int blocks_a_step = kKeys / a.block_size, slots_a_step = kKeys % a.block_size;
  int place = (steps.last * kKeys + row) / a.block_size, slot = (steps.last * kKeys + row) % a.block_size;
  auto block_of = [&](int step) {
    const int key = step * kKeys + row;
    const bool needed = step >= steps.first && row < kKeys && key < tile.seq_len && key + p.box_rows > first_visible;
    return needed ? __ldg(table + place) : -1;
  };
  int next_block = block_of(steps.last);
#pragma unroll 1
  for (int step = steps.last; step >= steps.first; --step) {
    const int block = next_block, block_slot = slot;
    place -= blocks_a_step;
    slot -= slots_a_step;
    if (slot < 0) slot += a.block_size, --place;
    next_block = block_of(step - 1);
    int bytes = Traits::kStageBytes;
    const int end = tile.seq_len - step * kKeys, begin = max(0, first_visible - step * kKeys);
    if (end < kKeys || begin > 0) {
      const int pieces = (min(kKeys, end) - 1) / p.box_rows + 1 - begin / p.box_rows;
      bytes = pieces * p.box_rows * Traits::kRowBytes;
    }
    ptx::mbarrier_wait(empty(ring.slot()), ring.parity() ^ 1);
    const uint32_t barrier = full(ring.slot()), dst = data(ring.slot()) + row * Traits::kRowBytes;
    if (lane == 0) ptx::mbarrier_arrive_expect_tx(barrier, bytes);
    __syncwarp();
    if (block >= 0) {
      if (p.head_parts > 0) {
        ptx::tensor_load_5d(dst, map, 0, 0, tile.kv_head * p.head_parts, block_slot / 8, block, barrier);
      } else {
#pragma unroll
        for (int i = 0; i < Traits::kParts; ++i)
          ptx::tensor_load_5d(dst + i * Traits::kPartBytes, map, i * 64, block_slot, tile.kv_head, block, 0, barrier);
      }
    }
    ring.advance();
  }
}

template <class Traits>
__device__ __forceinline__ void produce_tiles(const PrefillParams& p, PrefillSmem<Traits> smem) {
  TileRing<Traits> tiles{smem};
  TileList<Traits::kRows> list(p);
  const int lane = threadIdx.x % 32;
  int index = blockIdx.x;
  while (true) {
    const Tile tile = list.find(index);
    tiles.write(tile);
    if (tile.seq < 0) break;
    if (lane == 0) index = gridDim.x + static_cast<int>(atomicAdd(p.counters, 1u) + 1u);
    index = __shfl_sync(~0u, index, 0);
  }
  // The last CTA restores the counters: every other one has taken its last tile.
  if (lane == 0 && atomicAdd(p.counters + 1, 1u) + 1u == gridDim.x - 1) p.counters[0] = p.counters[1] = ~0u;
}

template <class Traits>
__device__ __forceinline__ void produce_keys(const PrefillParams& p, const CUtensorMap* map, PrefillSmem<Traits> smem) {
  TileRing<Traits> tiles{smem};
  RingPosition<Traits::kStages> ring;
  for (Tile tile = tiles.next(); tile.seq >= 0; tile = tiles.next())
    load_blocks<Traits>(
        p, map, tile, ring, [&](int i) { return smem.key_full(i); }, [&](int i) { return smem.key_empty(i); },
        [&](int i) { return smem.key(i); });
}

template <class Traits>
__device__ __forceinline__ void produce_values(const PrefillParams& p, const CUtensorMap* map,
                                               PrefillSmem<Traits> smem) {
  TileRing<Traits> tiles{smem};
  RingPosition<Traits::kStages> ring;
  for (Tile tile = tiles.next(); tile.seq >= 0; tile = tiles.next())
    load_blocks<Traits>(
        p, map, tile, ring, [&](int i) { return smem.value_full(i); }, [&](int i) { return smem.value_empty(i); },
        [&](int i) { return smem.value(i); });
}

// The rows of a tile.  Those past the sequence, and columns past head_dim, become 0.
template <class Traits>
__device__ __forceinline__ void produce_queries(const PrefillParams& p, PrefillSmem<Traits> smem) {
  using T = typename Traits::T;
  constexpr int kChunks = Traits::kHeadDim / 8, kRowsAtOnce = 32 / kChunks;  // chunks of 16 bytes
  const AttentionParams& a = p.attention;
  const int lane = threadIdx.x % 32, chunk = lane % kChunks;
  TileRing<Traits> tiles{smem};
  RingPosition<Traits::kQueryBuffers> buffer;
  for (Tile tile = tiles.next(); tile.seq >= 0; tile = tiles.next()) {
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
#pragma unroll 2
      for (int r = lane / kChunks; r < 32; r += kRowsAtOnce) {
        const int64_t source = __shfl_sync(~0u, offset, r);
        const bool real = source >= 0 && chunk * 8 < a.head_dim;
        ptx::cp_async_16(dst + r * 128 + ((chunk ^ r) % 8) * 16, real ? query + source : a.query, real ? 16 : 0);
      }
      ptx::cp_async_commit();
    }
#pragma unroll
    for (int w = 0; w < Traits::kConsumers; ++w) {
      if (w == 0)
        ptx::cp_async_wait<kWarpgroupRows / 32>();
      else
        ptx::cp_async_wait<0>();
      if constexpr (!Traits::kQueryInRegisters) ptx::fence_proxy_async();  // wgmma reads it from shared memory
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(smem.query_full(buffer.slot(), w));
    }
    buffer.advance();
  }
}

}  // namespace paged_attn::sm90
