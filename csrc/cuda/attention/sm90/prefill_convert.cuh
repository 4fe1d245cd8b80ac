// The first warpgroup of an instance for 8-bit caches.  Warp 0 takes tiles, and loads K and V into staging slots; one
// warp loads Q and turns K, two turn V into the fp16 stages of an unquantised instance, exactly.  The consumers apply
// the scales.
#pragma once

#include "../softmax.cuh"
#include "../widen.cuh"
#include "prefill_load.cuh"

namespace paged_attn::sm90 {

template <class Traits>
using StagingRing = RingPosition<Traits::kStagingSlots / 2>;

template <class Traits>
__device__ __forceinline__ void load_staged(const CUtensorMap* map, int kv_head, const PieceWalk<Traits>& piece,
                                            PrefillSmem<Traits> smem, int slot, uint32_t parity) {
  ptx::mbarrier_wait(smem.staging_empty(slot), parity ^ 1);
  const uint32_t barrier = smem.staging_full(slot);
  const uint32_t dst = smem.staging(slot) + piece.row() * Traits::kStagedColumns;
  if (threadIdx.x % 32 == 0)
    ptx::mbarrier_arrive_expect_tx(barrier, piece.rows * Traits::kStagedParts * Traits::kStagedColumns);
  __syncwarp();
  if (piece.block >= 0)
#pragma unroll 1
    for (int i = 0; i < Traits::kStagedParts; ++i)
      ptx::tensor_load_5d(dst + i * Traits::kStagedPartBytes, map, i * Traits::kStagedColumns, piece.slot, kv_head,
                          piece.block, 0, barrier);
}

// By one warp: takes tiles, and loads K and V of their steps into the staging slots.
template <class Traits>
__device__ __forceinline__ void produce_staged(const PrefillParams& p, const CUtensorMap* key_map,
                                               const CUtensorMap* value_map, PrefillSmem<Traits> smem) {
  StagingRing<Traits> staging;
  produce_tiles<Traits>(p, smem, [&](const Tile& tile) {
    const Steps steps = tile.steps;
    PieceWalk<Traits> piece(p, tile, steps);
#pragma unroll 1
    for (int step = steps.last; step >= steps.first; --step) {
      piece.go_to(step);
#pragma unroll(Traits::kStagedParts > 1 ? 1 : 2)  // for lack of registers
      for (int i = 0; i < 2; ++i)
        load_staged<Traits>(i == 0 ? key_map : value_map, tile.kv_head, piece, smem, 2 * staging.slot() + i,
                            staging.parity());
      staging.advance();
    }
  });
}

// A warp's share of a slot: one group of 8 rows in kWarps.  Rows outside of begin .. end - 1 become 0.
//
// A cell is 8 rows of 64 columns: 512 bytes in the slot, 1024 in the stage.  A lane has 16 columns of a row; eight
// lanes that access shared memory together have all 64 columns of rows r and r ^ 5, which is free of bank conflicts on
// both sides.  One warp a scheduler does it, so what counts is the number of instructions and how few wait for each
// other: everything is unrolled, with addresses known but for four bases, and loads are kAhead cells ahead.
template <class Traits, DType kType, int kWarps>
__device__ __forceinline__ void convert_slot(uint32_t source, uint32_t target, int warp, int begin, int end) {
  constexpr int kColumns = Traits::kStagedColumns, kParts = Traits::kParts, kAhead = Traits::kTokenScales ? 1 : 2;
  constexpr int kRounds = Traits::kKeys / 8 / kWarps, kCells = kRounds * kParts;
  static_assert(kRounds * kWarps * 8 == Traits::kKeys);
  int lane = threadIdx.x % 32;
  if constexpr (Traits::kTokenScales) forget(lane);
  const int chunk = lane % 4;
  const int row = lane & 4 ? lane / 8 ^ 5 : lane / 8;
  const uint32_t even = source + (warp * 8 + row) * kColumns + (chunk ^ (kColumns == 128 ? row : row / 2)) * 16;
  const uint32_t odd = even ^ 64;  // odd parts
  const uint32_t low = target + warp * Traits::kRowGroupBytes + row * 128 + (2 * chunk ^ row) * 16;
  const uint32_t high = low ^ 16;  // the second half of the columns
  const auto from = [&](int round, int part) {
    return (part % 2 ? odd : even) + part / 2 * Traits::kStagedPartBytes + round * kWarps * 8 * kColumns;
  };
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
    const uint2 a = widen4<kType>(y.x), b = widen4<kType>(y.y);
    const uint2 c = widen4<kType>(y.z), d = widen4<kType>(y.w);
    const int offset = cell / kParts * kWarps * Traits::kRowGroupBytes + cell % kParts * Traits::kPartBytes;
    ptx::store_shared_v4(low + offset, a.x, a.y, b.x, b.y);
    ptx::store_shared_v4(high + offset, c.x, c.y, d.x, d.y);
  }
}

// By a warp, when it has converted its share.  What was written is read by wgmma, what was read is written by the copy
// engine.
__device__ __forceinline__ void pass_on_converted(uint32_t stage_full, uint32_t staging_empty) {
  ptx::fence_proxy_async();
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    ptx::mbarrier_arrive(stage_full);
    ptx::mbarrier_arrive(staging_empty);
  }
}

// Scales per token and head, of K or of V, on their way from memory to the consumers: a step ahead with their loads,
// two with those of the block table.
template <class Traits, bool kValues>
class TokenScales {
 public:
  __device__ __forceinline__ TokenScales(const PrefillParams& p, PrefillSmem<Traits> smem) : p_(p), smem_(smem) {}

  // Of a tile: `step` is the first of its walk.
  __device__ __forceinline__ void begin(const TileRows& tile, int step) {
    if (!exist()) return;
    unit_ = 0.f;
    load_entry(tile, step);
    fetch(tile, step);
  }

  // Of every step in turn.
  __device__ __forceinline__ void pass_on(const TileRing<Traits>& tiles, int step,
                                          RingPosition<Traits::kStages> stage) {
    if (!exist()) return;
    float inverse = 1.f;
    if (kValues) {  // in units of the largest power of two seen in the tile, so that fp16 holds scaled probabilities
      float largest = 0.f;
#pragma unroll
      for (int i = 0; i < kEach; ++i) largest = fmaxf(largest, fabsf(scale_[i]));
#pragma unroll
      for (int d = 16; d > 0; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
      unit_ = fmaxf(unit_, power_of_two_above(largest));
      inverse = unit_ > 0.f ? 1.f / unit_ : 0.f;
    }
    ptx::mbarrier_wait(smem_.scales_empty(stage.slot()), stage.parity() ^ 1);
    const uint32_t to = smem_.scales(stage.slot()) + kValues * kKeys * 4 + lane() * 4;
#pragma unroll
    for (int i = 0; i < kEach; ++i) ptx::store_shared(to + i * 128, scale_[i] * inverse);
    if (kValues && lane() == 0) ptx::store_shared(to + kKeys * 4, unit_);
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive(smem_.scales_full(stage.slot()));
    fetch(tiles.rows(), step - 1);
  }

 private:
  static constexpr int kKeys = Traits::kKeys, kEach = kKeys / 32;  // of a lane

  __device__ __forceinline__ bool exist() const { return Traits::kTokenScales && p_.attention.k_scale.per_token(); }
  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }

  // Those of the step of entry_; 0 for tokens that the sequence does not see.
  __device__ __forceinline__ void fetch(const TileRows& tile, int step) {
    const AttentionParams& a = p_.attention;
    const ScaleView& view = kValues ? a.v_scale : a.k_scale;
    const int of_block = static_cast<int>(view.strides.block), of_slot = static_cast<int>(view.strides.slot);
    const int head = tile.kv_head * static_cast<int>(view.strides.head), begin = first_visible_key(a, tile);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = i * 32 + lane(), key = step * kKeys + row;
      const int place = __umulhi(first_slot_ + row, p_.block_inverse), slot = first_slot_ + row - place * a.block_size;
      const int block = __shfl_sync(~0u, entry_, place);
      scale_[i] = 0.f;
      if (key >= begin && key < tile.seq_len) scale_[i] = __ldg(view.data + (block * of_block + slot * of_slot + head));
    }
    load_entry(tile, step - 1);
  }

  // A lane has one block of the step: block_size >= 8.
  __device__ __forceinline__ void load_entry(const TileRows& tile, int step) {
    const AttentionParams& a = p_.attention;
    const int first_place = step * kKeys / a.block_size, place = first_place + lane(), key = place * a.block_size;
    first_slot_ = step * kKeys - first_place * a.block_size;
    entry_ = 0;
    if (step >= 0 && key < tile.seq_len && key + a.block_size > first_visible_key(a, tile))
      entry_ = __ldg(a.block_table + tile.seq * a.block_table_stride + place);
  }

  const PrefillParams& p_;
  const PrefillSmem<Traits> smem_;
  float scale_[kEach], unit_;
  int entry_, first_slot_;  // of the step to be fetched next: this lane's entry of the block table; in the first block
};

// By one warp: loads Q, converts K and passes on its scales.
template <class Traits, DType kType>
__device__ __forceinline__ void convert_keys(const PrefillParams& p, PrefillSmem<Traits> smem) {
  TileRing<Traits> tiles{smem};
  TokenScales<Traits, false> scales(p, smem);
  uint32_t count = 0;  // of steps
  while (true) {
    tiles.wait();
    if (tiles.rows().seq < 0) break;
    load_query<Traits>(p, smem, tiles.rows(), {tiles.position.count});
    const Steps steps = tiles.steps();
    scales.begin(tiles.rows(), steps.last);
#pragma unroll 1
    for (int step = steps.last; step >= steps.first; --step, ++count) {
      const RingPosition<Traits::kStages> stage{count};
      const StagingRing<Traits> staging{count};
      ptx::mbarrier_wait(smem.staging_full(2 * staging.slot()), staging.parity());
      ptx::mbarrier_wait(smem.key_empty(stage.slot()), stage.parity() ^ 1);
      convert_slot<Traits, kType, Traits::kKeyConverters>(smem.staging(2 * staging.slot()), smem.key(stage.slot()), 0,
                                                          0, Traits::kKeys);
      pass_on_converted(smem.key_full(stage.slot()), smem.staging_empty(2 * staging.slot()));
      scales.pass_on(tiles, step, stage);
    }
    tiles.release();
  }
}

// By each of kValueConverters warps; the first passes on the scales.
template <class Traits, DType kType>
__device__ __forceinline__ void convert_values(const PrefillParams& p, PrefillSmem<Traits> smem, int warp) {
  TileRing<Traits> tiles{smem};
  TokenScales<Traits, true> scales(p, smem);
  uint32_t count = 0;  // of steps
  while (true) {
    tiles.wait();
    if (tiles.rows().seq < 0) break;
    const Steps steps = tiles.steps();
    if (warp == 0) scales.begin(tiles.rows(), steps.last);
#pragma unroll 1
    for (int step = steps.last; step >= steps.first; --step, ++count) {
      const RingPosition<Traits::kStages> stage{count};
      const StagingRing<Traits> staging{count};
      if (warp == 0) scales.pass_on(tiles, step, stage);
      // 0 x NaN is NaN: see clear_values of the consumers.
      const int first_key = step * Traits::kKeys, end = tiles.rows().seq_len - first_key;
      const int begin = first_visible_key(p.attention, tiles.rows()) - first_key;
      ptx::mbarrier_wait(smem.staging_full(2 * staging.slot() + 1), staging.parity());
      ptx::mbarrier_wait(smem.value_empty(stage.slot()), stage.parity() ^ 1);
      convert_slot<Traits, kType, Traits::kValueConverters>(smem.staging(2 * staging.slot() + 1),
                                                            smem.value(stage.slot()), warp, begin, end);
      pass_on_converted(smem.value_full(stage.slot()), smem.staging_empty(2 * staging.slot() + 1));
    }
    tiles.release();
  }
}

template <class Traits, DType kType>
__device__ __forceinline__ void convert(const PrefillParams& p, PrefillSmem<Traits> smem, int warp) {
  if (warp < Traits::kKeyConverters)
    convert_keys<Traits, kType>(p, smem);
  else
    convert_values<Traits, kType>(p, smem, warp - Traits::kKeyConverters);
}

// By each of the warps that convert.
template <class Traits>
__device__ __forceinline__ void convert(const PrefillParams& p, PrefillSmem<Traits> smem, int warp) {
  if (p.attention.cache_dtype == DType::kFloat8E4M3)
    convert<Traits, DType::kFloat8E4M3>(p, smem, warp);
  else if (p.attention.cache_dtype == DType::kFloat8E5M2)
    convert<Traits, DType::kFloat8E5M2>(p, smem, warp);
  else
    convert<Traits, DType::kInt8>(p, smem, warp);
}

}  // namespace paged_attn::sm90
