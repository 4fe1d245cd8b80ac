// The producer warps: one takes tiles, one loads K and one V by multicast tensor loads, one loads Q by cp.async.
#pragma once

#include <cuda.h>

#include "../ptx.cuh"
#include "prefill_cluster.cuh"
#include "prefill_layout.cuh"

namespace paged_attn::sm90 {

// The tiles of a pair, through a ring of two slots: the first CTA takes them and stores them to both CTAs.  Consumers
// keep a slot until they are done with its tile, so that a tile is taken no earlier than the one before it is begun.
template <class Traits>
struct TileRing {
  // Warps that release a slot: all of both CTAs but the one that writes.
  static constexpr int kReaders = kClusterSize * Traits::kThreads / 32 - 1;

  PrefillSmem<Traits> smem;
  RingPosition<2> position;

  // By the whole warp.
  __device__ __forceinline__ void write(const Tile& t) {
    ptx::mbarrier_wait(smem.tile_empty(position.slot()), position.parity() ^ 1);
    const int lane = threadIdx.x % 32;
    const uint32_t slot = smem.tile(position.slot()), full = smem.tile_full(position.slot());
    if (lane == 0) ptx::mbarrier_arrive_expect_tx(full, Traits::kTileBytes);
    if (lane < kClusterSize) {
      const uint32_t barrier = cluster_address(full, lane);
      cluster_store(cluster_address(slot, lane), barrier, t.seq, t.first_row, t.kv_head, t.q_begin);
      cluster_store(cluster_address(slot + 16, lane), barrier, t.q_len, t.seq_len, 0, 0);
    }
    position.advance();
  }

  // Must be said once for every tile in the CTA that does not write, by one thread.
  __device__ __forceinline__ void expect() {
    ptx::mbarrier_arrive_expect_tx(smem.tile_full(position.slot()), Traits::kTileBytes);
  }
  __device__ __forceinline__ void wait() { ptx::mbarrier_wait(smem.tile_full(position.slot()), position.parity()); }
  // Between wait and release, as often as wanted: shared memory keeps it, so that registers need not.
  __device__ __forceinline__ Tile read() const {
    const uint32_t slot = smem.tile(position.slot());
    Tile t;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(t.seq), "=r"(t.first_row), "=r"(t.kv_head), "=r"(t.q_begin)
                 : "r"(slot));
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(t.q_len), "=r"(t.seq_len) : "r"(slot + 16));
    return t;
  }
  // By the whole warp.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) cluster_arrive(cluster_address(smem.tile_empty(position.slot()), 0));
    position.advance();
  }
  __device__ __forceinline__ Tile next() {
    wait();
    const Tile t = read();
    release();
    return t;
  }
};

// One tile's keys or values.  The boxes of a step are numbered (piece of box_rows tokens, part); the CTAs of a pair
// load every other one, a lane each, to both.  Boxes without a token that the sequence may see are left out.
template <class Traits, class Full, class Empty, class Data>
__device__ __forceinline__ void load_blocks(const PrefillParams& p, const CUtensorMap* map, const Tile& tile, int rank,
                                            RingPosition<Traits::kStages>& ring, Full full, Empty empty, Data data) {
  constexpr int kKeys = Traits::kKeys;
  const AttentionParams& a = p.attention;
  const int lane = threadIdx.x % 32, box = lane * kClusterSize + rank, part = box % Traits::kParts;
  const int row = box / Traits::kParts * p.box_rows;  // in the step
  const int first_visible = first_visible_key(a, tile);
  const int32_t* table = a.block_table + tile.seq * a.block_table_stride;
  const Steps steps = tile_steps<kKeys>(p, tile);

  auto block_of = [&](int step) {
    const int key = step * kKeys + row;
    const bool needed = step >= steps.first && row < kKeys && key < tile.seq_len && key + p.box_rows > first_visible;
    return needed ? __ldg(table + key / a.block_size) : -1;
  };
  int block = block_of(steps.last);
  for (int step = steps.last; step >= steps.first; --step) {
    const int next_block = block_of(step - 1);
    ptx::mbarrier_wait(empty(ring.slot()), ring.parity() ^ 1);
    if (lane == 0) {
      const int end = min(kKeys, tile.seq_len - step * kKeys), begin = max(0, first_visible - step * kKeys);
      const int pieces = (end + p.box_rows - 1) / p.box_rows - begin / p.box_rows;
      ptx::mbarrier_arrive_expect_tx(full(ring.slot()), pieces * p.box_rows * Traits::kHeadDim * 2);
    }
    __syncwarp();
    if (block >= 0)
      tensor_load_multicast(data(ring.slot()) + part * Traits::kPartBytes + row * 128, map, part * 64,
                            (step * kKeys + row) % a.block_size, tile.kv_head, block, full(ring.slot()),
                            (1 << kClusterSize) - 1);
    block = next_block;
    ring.advance();
  }
}

// In the first CTA of a pair; the other one's warp receives.
template <class Traits>
__device__ __forceinline__ void produce_tiles(const PrefillParams& p, PrefillSmem<Traits> smem, int rank) {
  TileRing<Traits> tiles{smem};
  const int lane = threadIdx.x % 32;
  if (rank != 0) {
    do {
      if (lane == 0) tiles.expect();
    } while (tiles.next().seq >= 0);
    return;
  }
  TileList list(p);
  const int pairs = gridDim.x / kClusterSize;
  int index = blockIdx.x / kClusterSize;
  while (true) {
    const Tile tile = list.find(index);
    tiles.write(tile);
    if (tile.seq < 0) break;
    if (lane == 0) index = pairs + static_cast<int>(atomicAdd(p.counters, 1u) + 1u);
    index = __shfl_sync(~0u, index, 0);
  }
  // The last pair restores the counters: every other one has taken its last tile.
  if (lane == 0 && atomicAdd(p.counters + 1, 1u) + 1u == static_cast<unsigned>(pairs - 1))
    p.counters[0] = p.counters[1] = ~0u;
}

template <class Traits>
__device__ __forceinline__ void produce_keys(const PrefillParams& p, const CUtensorMap* map, PrefillSmem<Traits> smem,
                                             int rank) {
  TileRing<Traits> tiles{smem};
  RingPosition<Traits::kStages> ring;
  for (Tile tile = tiles.next(); tile.seq >= 0; tile = tiles.next())
    load_blocks<Traits>(
        p, map, tile, rank, ring, [&](int i) { return smem.key_full(i); }, [&](int i) { return smem.key_empty(i); },
        [&](int i) { return smem.key(i); });
}

template <class Traits>
__device__ __forceinline__ void produce_values(const PrefillParams& p, const CUtensorMap* map, PrefillSmem<Traits> smem,
                                               int rank) {
  TileRing<Traits> tiles{smem};
  RingPosition<Traits::kStages> ring;
  for (Tile tile = tiles.next(); tile.seq >= 0; tile = tiles.next())
    load_blocks<Traits>(
        p, map, tile, rank, ring, [&](int i) { return smem.value_full(i); }, [&](int i) { return smem.value_empty(i); },
        [&](int i) { return smem.value(i); });
}

// The rows of a tile.  Those past the sequence, and columns past head_dim, become 0.
template <class Traits>
__device__ __forceinline__ void produce_queries(const PrefillParams& p, PrefillSmem<Traits> smem, int rank) {
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
    for (int i = 0; i < kCtaRows; i += 32) {  // lane l finds row i + l, then all lanes copy the 32 rows
      const int row = tile.first_row + rank * kCtaRows + i + lane, token = row / p.group;
      const int64_t offset =
          token < tile.q_len ? token * a.query_strides.token + (row - token * p.group) * a.query_strides.head : -1;
      const int warpgroup = i / kWarpgroupRows;
      const uint32_t dst =
          smem.query(buffer.slot(), warpgroup) + chunk / 8 * Traits::kQueryPartBytes + i % kWarpgroupRows * 128;
      if (i % kWarpgroupRows == 0) ptx::mbarrier_wait(smem.query_empty(buffer.slot(), warpgroup), buffer.parity() ^ 1);
#pragma unroll 4
      for (int r = lane / kChunks; r < 32; r += kRowsAtOnce) {
        const int64_t source = __shfl_sync(~0u, offset, r);
        const bool real = source >= 0 && chunk * 8 < a.head_dim;
        ptx::cp_async_16(dst + r * 128 + ((chunk ^ r) % 8) * 16, real ? query + source : a.query, real ? 16 : 0);
      }
      ptx::cp_async_commit();
    }
#pragma unroll
    for (int w = 0; w < kConsumers; ++w) {
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
