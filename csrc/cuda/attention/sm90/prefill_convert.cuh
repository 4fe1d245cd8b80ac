// Producer warps of 8-bit caches: one loads K and V into staging slots, others turn them into the fp16 stages of an
// unquantised instance, exactly.  The consumers apply the scales.
#pragma once

#include "../softmax.cuh"
#include "../widen.cuh"
#include "prefill_load.cuh"

namespace paged_attn::sm90 {

template <class Traits>
using StagingRing = RingPosition<Traits::kStagingSlots / 2>;

// Slot 2 i is for K, 2 i + 1 for V.
enum Tensor { kKey, kValue };

template <class Traits>
__device__ __forceinline__ void load_staged(const CUtensorMap* map, int column, int kv_head,
                                            const PieceWalk<Traits>& piece, PrefillSmem<Traits> smem, int slot,
                                            uint32_t parity) {
  ptx::mbarrier_wait(smem.staging_empty(slot), parity ^ 1);
  const uint32_t barrier = smem.staging_full(slot);
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive_expect_tx(barrier, piece.rows * Traits::kStagedColumns);
  __syncwarp();
  if (piece.block >= 0)
    ptx::tensor_load_5d(smem.staging(slot) + piece.row() * Traits::kStagedColumns, map, column, piece.slot, kv_head,
                        piece.block, 0, barrier);
}

// K and V of all steps of a tile, by one warp.  `near_end` is called once, kWantedSteps before the end.
template <class Traits, class NearEnd>
__device__ __forceinline__ void load_staged(const PrefillParams& p, const CUtensorMap* key_map,
                                            const CUtensorMap* value_map, PrefillSmem<Traits> smem,
                                            StagingRing<Traits>& staging, const TileRows& tile, const Steps& steps,
                                            NearEnd near_end) {
  PieceWalk<Traits> piece(p, tile, steps);
#pragma unroll 1
  for (int step = steps.last; step >= steps.first; --step) {
    if (step == steps.near_end()) near_end();
    piece.go_to(step);
#pragma unroll 1
    for (int column = 0; column < Traits::kHeadDim; column += Traits::kStagedColumns) {
      load_staged<Traits>(key_map, column, tile.kv_head, piece, smem, 2 * staging.slot(), staging.parity());
      load_staged<Traits>(value_map, column, tile.kv_head, piece, smem, 2 * staging.slot() + 1, staging.parity());
      staging.advance();
    }
  }
}

// By one warp, of all tiles.
template <class Traits>
__device__ __forceinline__ void produce_staged(const PrefillParams& p, const CUtensorMap* key_map,
                                               const CUtensorMap* value_map, PrefillSmem<Traits> smem) {
  TileRing<Traits> tiles{smem};
  StagingRing<Traits> staging;
  while (true) {
    tiles.wait();
    if (tiles.rows().seq < 0) break;
    load_staged<Traits>(p, key_map, value_map, smem, staging, tiles.rows(), tiles.steps(), [&] { want_tile(smem); });
    tiles.release();
  }
}

// By one warp: takes tiles, too.
template <class Traits>
__device__ __forceinline__ void produce_tiles_staged(const PrefillParams& p, const CUtensorMap* key_map,
                                                     const CUtensorMap* value_map, PrefillSmem<Traits> smem) {
  StagingRing<Traits> staging;
  produce_tiles<Traits>(p, smem, [&](const Tile& tile, auto take) {
    load_staged<Traits>(p, key_map, value_map, smem, staging, tile, tile.steps, take);
  });
}

// A warp's share of a slot, kParts of 64 columns: one group of 8 rows in kWarps.  Rows outside of begin .. end - 1
// become 0.
//
// A cell is 8 rows of 64 columns: 512 bytes in the slot, 1024 in the stage.  A lane has 16 columns of a row; eight
// lanes that access shared memory together have all 64 columns of rows r and r ^ 5, which is free of bank conflicts on
// both sides.  What counts is the number of instructions and how few wait for each other: everything is unrolled, with
// addresses known but for four bases, and loads are kAhead cells ahead.
template <class Traits, DType kType, int kWarps, int kParts>
__device__ __forceinline__ void convert_slot(uint32_t source, uint32_t target, int warp, int begin, int end) {
  constexpr int kColumns = Traits::kStagedColumns, kAhead = Traits::kProducers == 1 ? 2 : 1;
  constexpr int kRounds = Traits::kKeys / 8 / kWarps, kCells = kRounds * kParts;
  static_assert(kRounds * kWarps * 8 == Traits::kKeys);
  int lane = threadIdx.x % 32;
  forget(lane), forget(warp);
  const int chunk = lane % 4;
  const int row = lane & 4 ? lane / 8 ^ 5 : lane / 8;
  const uint32_t even = source + (warp * 8 + row) * kColumns + (chunk ^ (kColumns == 128 ? row : row / 2)) * 16;
  const uint32_t odd = even ^ 64;  // odd parts
  const uint32_t low = target + warp * Traits::kRowGroupBytes + row * 128 + (2 * chunk ^ row) * 16;
  const uint32_t high = low ^ 16;  // the second half of the columns
  const auto from = [&](int round, int part) { return (part % 2 ? odd : even) + round * kWarps * 8 * kColumns; };
  if (begin > 0 || end < Traits::kKeys) {
#pragma unroll 1
    for (int round = 0; round < kRounds; ++round) {
      const int key = (round * kWarps + warp) * 8 + row;
      if (key >= begin && key < end) continue;
#pragma unroll
      for (int part = 0; part < kParts; ++part) ptx::store_shared_v4(from(round, part), 0, 0, 0, 0);
    }
  }
  uint4 x[kAhead + 1];
#pragma unroll
  for (int i = 0; i < kCells + kAhead; ++i) {
    if (i < kCells) x[i % (kAhead + 1)] = ptx::load_shared_v4(from(i / kParts, i % kParts));
    if (i < kAhead) continue;
    const int cell = i - kAhead;
    const uint4 y = x[cell % (kAhead + 1)];
    const int offset = cell / kParts * kWarps * Traits::kRowGroupBytes + cell % kParts * Traits::kPartBytes;
    const uint2 a = widen4<kType>(y.x), b = widen4<kType>(y.y);
    ptx::store_shared_v4(low + offset, a.x, a.y, b.x, b.y);
    const uint2 c = widen4<kType>(y.z), d = widen4<kType>(y.w);
    ptx::store_shared_v4(high + offset, c.x, c.y, d.x, d.y);
  }
}

// A warp's share of K or V of step `count`, over all tiles.
template <class Traits, DType kType, Tensor kTensor, int kWarps>
__device__ __forceinline__ void convert_step(PrefillSmem<Traits> smem, uint32_t count, int warp, int begin, int end) {
  const RingPosition<Traits::kStages> stage{count};
  const auto convert_part = [&](auto parts, int part) {
    const StagingRing<Traits> staging{count * Traits::kStagedParts + part * 64 / Traits::kStagedColumns};
    const int slot = 2 * staging.slot() + kTensor;
    const uint32_t target = kTensor == kKey ? smem.key(stage.slot()) : smem.value(stage.slot());
    ptx::mbarrier_wait(smem.staging_full(slot), staging.parity());
    if (part == 0)
      ptx::mbarrier_wait(kTensor == kKey ? smem.key_empty(stage.slot()) : smem.value_empty(stage.slot()),
                         stage.parity() ^ 1);
    convert_slot<Traits, kType, kWarps, parts.value>(smem.staging(slot), target + part * Traits::kPartBytes, warp,
                                                     begin, end);
    // What was written is read by wgmma, what was read is written by the copy engine.
    ptx::fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.staging_empty(slot));
  };
  constexpr int kSlotParts = Traits::kStagedColumns / 64, kLast = (Traits::kParts - 1) / kSlotParts * kSlotParts;
  if constexpr (kLast > 0) convert_part(std::integral_constant<int, kSlotParts>(), 0);
  convert_part(std::integral_constant<int, Traits::kParts - kLast>(), kLast);
  if (threadIdx.x % 32 == 0)
    ptx::mbarrier_arrive(kTensor == kKey ? smem.key_full(stage.slot()) : smem.value_full(stage.slot()));
}

// By each of kWarps warps: its share of K or V of every step.
template <class Traits, DType kType, Tensor kTensor, int kWarps>
__device__ __forceinline__ void convert(const PrefillParams& p, PrefillSmem<Traits> smem, int warp) {
  TileRing<Traits> tiles{smem};
  uint32_t count = 0;  // of steps
  while (true) {
    tiles.wait();
    if (tiles.rows().seq < 0) break;
    if constexpr (Traits::kProducers == 1 && kTensor == kKey)
      load_query<Traits>(p, smem, tiles.rows(), {tiles.position.count});
#pragma unroll 1
    for (int step = tiles.steps().last; step >= tiles.steps().first; --step, ++count) {
      forget(tiles.position.count);
      int begin = 0, end = Traits::kKeys;
      if constexpr (kTensor == kValue) {  // 0 x NaN is NaN: see clear_values of the consumers
        const int first_key = step * Traits::kKeys;
        begin = first_visible_key(p.attention, tiles.rows()) - first_key, end = tiles.rows().seq_len - first_key;
      }
      convert_step<Traits, kType, kTensor, kWarps>(smem, count, warp, begin, end);
    }
    tiles.release();
  }
}

template <class Traits, DType kType>
__device__ __forceinline__ void convert(const PrefillParams& p, PrefillSmem<Traits> smem, int warp) {
  if (warp < Traits::kKeyConverters)
    convert<Traits, kType, kKey, Traits::kKeyConverters>(p, smem, warp);
  else
    convert<Traits, kType, kValue, Traits::kValueConverters>(p, smem, warp - Traits::kKeyConverters);
}

// By each of the warps that convert.
template <class Traits>
__device__ __forceinline__ void convert(const PrefillParams& p, PrefillSmem<Traits> smem, int warp) {
  for_cache_type(p.attention.cache_dtype, [&](auto type) { convert<Traits, decltype(type)::value>(p, smem, warp); });
}

}  // namespace paged_attn::sm90
