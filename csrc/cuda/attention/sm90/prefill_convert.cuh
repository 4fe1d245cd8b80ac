// Producer warps of 8-bit caches: one loads K and V into staging slots, others turn them into the fp16 stages of an
// unquantised instance, exactly.  The consumers apply the scales.
#pragma once

#include "../softmax.cuh"
#include "../widen.cuh"
#include "prefill_load.cuh"

namespace paged_attn::sm90 {

template <class Traits>
using StagingRing = RingPosition<Traits::kStagingSlots / (Traits::kPaired ? 1 : 2)>;

enum Tensor { kKey, kValue };

template <class Traits>
__device__ __forceinline__ int staging_slot(StagingRing<Traits> ring, Tensor tensor) {
  return Traits::kPaired ? ring.slot() : 2 * ring.slot() + tensor;
}

template <class Traits>
__device__ __forceinline__ void load_alone(const CUtensorMap* map, int column, int kv_head,
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

// `place` of the lane's piece in the last dimension of the maps.
template <class Traits>
__device__ __forceinline__ void load_pair(const PrefillParams& p, const CUtensorMap* map, int column, int place,
                                          const PieceWalk<Traits>& piece, PrefillSmem<Traits> smem, int slot,
                                          uint32_t parity) {
  constexpr int kBlock = 16, kGroupBytes = Traits::kStagedGroupBytes;
  ptx::mbarrier_wait(smem.staging_empty(slot), parity ^ 1);
  const uint32_t barrier = smem.staging_full(slot);
  // Blocks of the usual size, all seen: a copy takes half the instructions of one that a lane of its own issues.
  if (Traits::kStagedParts == 1 && p.attention.block_size == kBlock && piece.rows == Traits::kKeys) {
#pragma unroll
    for (int i = 0; i < Traits::kKeys / kBlock; i += 4) {
      int places[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) places[j] = __shfl_sync(~0u, place, i + j);
      if (ptx::elect()) {
        if (i == 0) ptx::mbarrier_arrive_expect_tx(barrier, Traits::kStagedBytes);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          ptx::tensor_load_5d(smem.staging(slot) + (i + j) * kBlock / 8 * kGroupBytes, map, column, 0, 0, 0, places[j],
                              barrier);
      }
    }
    return;
  }
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive_expect_tx(barrier, piece.rows / 8 * kGroupBytes);
  __syncwarp();
  if (piece.block >= 0)
    ptx::tensor_load_5d(smem.staging(slot) + piece.row() / 8 * kGroupBytes, map, column, 0, 0, piece.slot / 8, place,
                        barrier);
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
    int place = 0;
    if constexpr (Traits::kPaired) {
      const bool known = piece.block < static_cast<int>(p.attention.num_blocks);
      place = known ? piece.block * p.block_places + tile.kv_head * p.head_places : INT_MAX;  // TMA reads 0 there
    }
#pragma unroll 1
    for (int column = 0; column < Traits::kHeadDim; column += Traits::kStagedColumns) {
      if constexpr (Traits::kPaired) {
        load_pair<Traits>(p, key_map, column, place, piece, smem, staging.slot(), staging.parity());
      } else {
        load_alone<Traits>(key_map, column, tile.kv_head, piece, smem, 2 * staging.slot(), staging.parity());
        load_alone<Traits>(value_map, column, tile.kv_head, piece, smem, 2 * staging.slot() + 1, staging.parity());
      }
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

// kCells times 16 columns of a lane: from(i) in the slot, to low + to(i), the first 8, and (low ^ 16) + to(i).  What
// counts is the number of instructions and how few wait for each other: everything is unrolled, with addresses known
// but for a few bases, and loads are kAhead cells ahead.
template <class Traits, DType kType, int kCells, class From, class To>
__device__ __forceinline__ void convert_cells(From from, uint32_t low, To to) {
  constexpr int kAhead = Traits::kProducers == 1 ? 2 : 1;
  const uint32_t high = low ^ 16;
  uint4 x[kAhead + 1];
#pragma unroll
  for (int i = 0; i < kCells + kAhead; ++i) {
    if (i < kCells) x[i % (kAhead + 1)] = ptx::load_shared_v4(from(i));
    if (i < kAhead) continue;
    const uint4 y = x[(i - kAhead) % (kAhead + 1)];
    const uint2 a = widen4<kType>(y.x), b = widen4<kType>(y.y);
    ptx::store_shared_v4(low + to(i - kAhead), a.x, a.y, b.x, b.y);
    const uint2 c = widen4<kType>(y.z), d = widen4<kType>(y.w);
    ptx::store_shared_v4(high + to(i - kAhead), c.x, c.y, d.x, d.y);
  }
}

// kTensorColumns columns of a slot, of K or of V: groups of 8 rows first, first + kStride and so on.  Rows outside of
// begin .. end - 1 become 0.
//
// A cell is 8 rows of 64 columns: 512 bytes in the slot, 1024 in the stage.  A lane has 16 columns of a row; eight
// lanes that access shared memory together have all 64 columns of rows r and r ^ 5, which is free of bank conflicts on
// both sides.  Where 32 columns are left over, a cell of them is 16 rows, of two groups: there eight lanes have rows 0,
// 3, 4 and 7, or 1, 2, 5 and 6.
template <class Traits, DType kType, int kTensorColumns, int kGroups, int kStride>
__device__ __forceinline__ void convert_groups(uint32_t source, uint32_t target, int first, int begin, int end) {
  constexpr int kColumns = Traits::kStagedColumns, kParts = kTensorColumns / 64;
  constexpr int kFrom = kStride * Traits::kStagedGroupBytes,
                kTo = kStride * Traits::kRowGroupBytes;  // to the next group
  constexpr bool kNarrow = kTensorColumns % 64 > 0;
  static_assert(!kNarrow || (kTensorColumns == 96 && kColumns == 128 && kGroups % 2 == 0));
  int lane = threadIdx.x % 32;
  forget(lane), forget(first);
  const int chunk = lane % 4, row = lane & 4 ? lane / 8 ^ 5 : lane / 8;
  const uint32_t even = source + (first * (Traits::kStagedGroupBytes / kColumns) + row) * kColumns +
                        (chunk ^ (kColumns == 128 ? row : row / 2)) * 16;
  const uint32_t odd = even ^ 64;  // odd parts
  const uint32_t low = target + first * Traits::kRowGroupBytes + row * 128 + (2 * chunk ^ row) * 16;
  if (begin > 0 || end < Traits::kKeys) {
#pragma unroll 1
    for (int i = 0; i < kGroups; ++i) {
      const int key = (first + i * kStride) * 8 + row;
      if (key >= begin && key < end) continue;
      ptx::store_shared_v4(even + i * kFrom, 0, 0, 0, 0);
      if constexpr (kTensorColumns > 64) ptx::store_shared_v4(odd + i * kFrom, 0, 0, 0, 0);
    }
    if constexpr (kNarrow) __syncwarp();
  }
  convert_cells<Traits, kType, kGroups * kParts>(
      [&](int i) { return (i % kParts % 2 ? odd : even) + i / kParts * kFrom; }, low,
      [&](int i) { return i / kParts * kTo + i % kParts * Traits::kPartBytes; });
  if constexpr (kNarrow) {
    forget(lane);
    const int two = lane % 2, r = (lane / 4 % 2 * 4 + lane / 2 % 2 * 3) ^ lane / 8 % 2;
    const uint32_t from =
        source + first * Traits::kStagedGroupBytes + lane / 16 * kFrom + r * kColumns + ((4 + two) ^ r) * 16;
    const uint32_t to =
        target + first * Traits::kRowGroupBytes + lane / 16 * kTo + Traits::kPartBytes + r * 128 + (2 * two ^ r) * 16;
    convert_cells<Traits, kType, kGroups / 2>([&](int i) { return from + i * 2 * kFrom; }, to,
                                              [](int i) { return i * 2 * kTo; });
  }
}

// Those groups of K or V of step `count`, over all tiles.  kLast: the warp needs nothing more of the slots.
template <class Traits, DType kType, Tensor kTensor, int kGroups, int kStride, bool kLast = true>
__device__ __forceinline__ void convert_step(const PrefillParams& p, PrefillSmem<Traits> smem, uint32_t count,
                                             int first, int begin, int end) {
  const RingPosition<Traits::kStages> stage{count};
  const auto convert_columns = [&](auto columns, int column) {
    const StagingRing<Traits> staging{count * Traits::kStagedParts + column / Traits::kStagedColumns};
    const int slot = staging_slot<Traits>(staging, kTensor);
    uint32_t source = smem.staging(slot);
    if (Traits::kPaired && p.value_first != (kTensor == kValue)) source += Traits::kStagedGroupBytes / 2;
    const uint32_t target = kTensor == kKey ? smem.key(stage.slot()) : smem.value(stage.slot());
    ptx::mbarrier_wait(smem.staging_full(slot), staging.parity());
    if (column == 0)
      ptx::mbarrier_wait(kTensor == kKey ? smem.key_empty(stage.slot()) : smem.value_empty(stage.slot()),
                         stage.parity() ^ 1);
    convert_groups<Traits, kType, columns.value, kGroups, kStride>(source, target + column / 64 * Traits::kPartBytes,
                                                                   first, begin, end);
    // What was written is read by wgmma, what was read is written by the copy engine.
    ptx::fence_proxy_async();
    __syncwarp();
    if (kLast && threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.staging_empty(slot));
  };
  constexpr int kLastColumn = (Traits::kStagedParts - 1) * Traits::kStagedColumns;
  if constexpr (kLastColumn > 0) convert_columns(std::integral_constant<int, Traits::kStagedColumns>(), 0);
  convert_columns(std::integral_constant<int, Traits::kConvertedColumns - kLastColumn>(), kLastColumn);
  if (threadIdx.x % 32 == 0)
    ptx::mbarrier_arrive(kTensor == kKey ? smem.key_full(stage.slot()) : smem.value_full(stage.slot()));
}

// By each of the warps that convert.
template <class Traits, DType kType, Tensor kTensor>
__device__ __forceinline__ void convert(const PrefillParams& p, PrefillSmem<Traits> smem, int warp) {
  constexpr int kKeys = Traits::kKeys, kValueWarps = Traits::kValueConverters, kShared = Traits::kSharedGroups;
  constexpr int kKeyGroups = (Traits::kGroups - kValueWarps * kShared) / Traits::kKeyConverters;
  constexpr int kKeyStride = Traits::kKeyConverters;
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
      if constexpr (kTensor == kKey) {
        convert_step<Traits, kType, kKey, kKeyGroups, kKeyStride>(p, smem, count, warp, 0, kKeys);
      } else {  // 0 x NaN is NaN: see clear_values of the consumers
        if constexpr (kShared > 0)
          convert_step<Traits, kType, kKey, kShared, 1, false>(p, smem, count, kKeyGroups + warp * kShared, 0, kKeys);
        const int first_key = step * kKeys;
        const int begin = first_visible_key(p.attention, tiles.rows()) - first_key;
        const int end = tiles.rows().seq_len - first_key;
        convert_step<Traits, kType, kValue, Traits::kGroups / kValueWarps, kValueWarps>(p, smem, count, warp, begin,
                                                                                        end);
      }
    }
    tiles.release();
  }
}

template <class Traits>
__device__ __forceinline__ void convert(const PrefillParams& p, PrefillSmem<Traits> smem, int warp) {
  for_cache_type(p.attention.cache_dtype, [&](auto type) {
    if (warp < Traits::kKeyConverters)
      convert<Traits, decltype(type)::value, kKey>(p, smem, warp);
    else
      convert<Traits, decltype(type)::value, kValue>(p, smem, warp - Traits::kKeyConverters);
  });
}

}  // namespace paged_attn::sm90
