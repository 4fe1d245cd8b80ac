// The first warpgroup of an instance for 8-bit caches: one warp takes tiles and loads K and V into staging slots, the
// others turn them into the fp16 stages of an unquantised instance, exactly.  The consumers apply the scales.
#pragma once

#include "../softmax.cuh"
#include "../widen.cuh"
#include "prefill_load.cuh"

namespace paged_attn::sm90 {

// The keys or the values of the step that `piece` stands at.
template <class Traits>
__device__ __forceinline__ void load_staged(const CUtensorMap* map, int kv_head, const PieceWalk<Traits>& piece,
                                            PrefillSmem<Traits> smem, RingPosition<Traits::kStagingSlots>& staging) {
  ptx::mbarrier_wait(smem.staging_empty(staging.slot()), staging.parity() ^ 1);
  const uint32_t barrier = smem.staging_full(staging.slot());
  const uint32_t dst = smem.staging(staging.slot()) + piece.row() * Traits::kStagedColumns;
  if (threadIdx.x % 32 == 0)
    ptx::mbarrier_arrive_expect_tx(barrier, piece.rows * Traits::kStagedParts * Traits::kStagedColumns);
  __syncwarp();
  if (piece.block >= 0)
#pragma unroll
    for (int i = 0; i < Traits::kStagedParts; ++i)
      ptx::tensor_load_5d(dst + i * Traits::kStagedPartBytes, map, i * Traits::kStagedColumns, piece.slot, kv_head,
                          piece.block, 0, barrier);
  staging.advance();
}

// By one warp: takes tiles, and loads K and V of their steps into the staging slots, in turn.
template <class Traits>
__device__ __forceinline__ void produce_staged(const PrefillParams& p, const CUtensorMap* key_map,
                                               const CUtensorMap* value_map, PrefillSmem<Traits> smem) {
  RingPosition<Traits::kStagingSlots> staging;
  produce_tiles<Traits>(p, smem, [&](const Tile& tile) {
    const Steps steps = tile.steps;
    PieceWalk<Traits> piece(p, tile, steps);
#pragma unroll 1
    for (int step = steps.last; step >= steps.first; --step) {
      piece.go_to(step);
      load_staged<Traits>(key_map, tile.kv_head, piece, smem, staging);
      load_staged<Traits>(value_map, tile.kv_head, piece, smem, staging);
    }
  });
}

// A converter's share of one slot: one group of 8 rows in kConverters.  Rows outside of begin .. end - 1 become 0.
//
// A cell is 8 rows of 64 columns: 512 bytes there, 1024 here.  A lane has 16 columns of a row; eight lanes that access
// shared memory together have all 64 columns of rows r and r ^ 5, which is free of bank conflicts on both sides.  One
// warp a scheduler does it, so what counts is the number of instructions and how few wait for each other: everything is
// unrolled, with addresses known but for four bases, and loads are kAhead cells ahead.
template <class Traits, DType kType>
__device__ __forceinline__ void convert_slot(uint32_t source, uint32_t target, int converter, int begin, int end) {
  constexpr int kGroups = Traits::kKeys / 8, kColumns = Traits::kStagedColumns, kParts = Traits::kParts, kAhead = 2;
  constexpr int kRounds = (kGroups + Traits::kConverters - 1) / Traits::kConverters;
  constexpr int kEveryRounds = kGroups / Traits::kConverters;  // in which every converter has a group
  int lane = threadIdx.x % 32;
  forget(lane);
  const int row = lane & 4 ? lane / 8 ^ 5 : lane / 8, chunk = lane % 4;
  const int rounds = converter + kEveryRounds * Traits::kConverters < kGroups ? kRounds : kEveryRounds;
  const uint32_t even = source + (converter * 8 + row) * kColumns + (chunk ^ (kColumns == 128 ? row : row / 2)) * 16;
  const uint32_t odd = even ^ 64;  // odd parts
  const uint32_t low = target + converter * Traits::kRowGroupBytes + row * 128 + (2 * chunk ^ row) * 16;
  const uint32_t high = low ^ 16;  // the second half of the columns
  const auto from = [&](int round, int part) {
    return (part % 2 ? odd : even) + part / 2 * Traits::kStagedPartBytes + round * Traits::kConverters * 8 * kColumns;
  };
  if (begin > 0 || end < Traits::kKeys) {
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      const int key = (round * Traits::kConverters + converter) * 8 + row;
      if (key >= begin && key < end) continue;
#pragma unroll
      for (int part = 0; part < kParts; ++part) ptx::store_shared_v4(from(round, part), 0, 0, 0, 0);
    }
  }
  uint4 x[kAhead + 1];
#pragma unroll
  for (int i = 0; i < kRounds * kParts + kAhead; ++i) {
    if (i < kRounds * kParts && (i < kEveryRounds * kParts || rounds == kRounds))
      x[i % (kAhead + 1)] = ptx::load_shared_v4(from(i / kParts, i % kParts));
    if (i < kAhead) continue;
    const int cell = i - kAhead;
    if (cell >= kEveryRounds * kParts && rounds != kRounds) break;
    const uint4 y = x[cell % (kAhead + 1)];
    const uint2 a = widen4<kType>(y.x), b = widen4<kType>(y.y);
    const uint2 c = widen4<kType>(y.z), d = widen4<kType>(y.w);
    const int offset =
        cell / kParts * Traits::kConverters * Traits::kRowGroupBytes + cell % kParts * Traits::kPartBytes;
    ptx::store_shared_v4(low + offset, a.x, a.y, b.x, b.y);
    ptx::store_shared_v4(high + offset, c.x, c.y, d.x, d.y);
  }
}

// Scales per token and head, of K or of V: a warp takes them from memory to the consumers, and is a step ahead with the
// loads, two with those of the block table.
template <class Traits>
class TokenScales {
 public:
  // Those of V are passed on in units of a power of two: the largest seen in the tile, so that scaled probabilities
  // keep in the range of fp16.
  __device__ __forceinline__ TokenScales(const PrefillParams& p, PrefillSmem<Traits> smem, bool of_values)
      : p_(p), smem_(smem), of_values_(of_values) {}

  __device__ __forceinline__ void begin_tile(const Tile& tile, int step) {
    unit_ = 0.f;
    load_entry(tile, step);
    fetch(tile, step);
  }

  // Those of a step, the one before the last fetched; 0 for tokens that the sequence does not see.
  __device__ __forceinline__ void fetch(const Tile& tile, int step) {
    const AttentionParams& a = p_.attention;
    const ScaleView& view = of_values_ ? a.v_scale : a.k_scale;
    const int first_visible = first_visible_key(a, tile), first_slot = step * kKeys % a.block_size;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = i * 32 + lane(), key = step * kKeys + row;
      const int place = __umulhi(first_slot + row, p_.block_inverse);
      const int slot = first_slot + row - place * a.block_size;
      const int64_t block = __shfl_sync(~0u, entry_, place);
      scale_[i] = 0.f;
      if (row < kKeys && key >= first_visible && key < tile.seq_len)
        scale_[i] =
            __ldg(view.data + block * view.strides.block + slot * view.strides.slot + tile.kv_head * view.strides.head);
    }
    load_entry(tile, step - 1);
  }

  __device__ __forceinline__ void pass_on(RingPosition<Traits::kStages> stage) {
    float inverse = 1.f;
    if (of_values_) {
      float largest = 0.f;
#pragma unroll
      for (int i = 0; i < kEach; ++i) largest = fmaxf(largest, fabsf(scale_[i]));
#pragma unroll
      for (int d = 16; d > 0; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
      unit_ = fmaxf(unit_, power_of_two_above(largest));
      inverse = unit_ > 0.f ? 1.f / unit_ : 0.f;
    }
    ptx::mbarrier_wait(smem_.scales_empty(stage.slot()), stage.parity() ^ 1);
    const uint32_t to = smem_.scales(stage.slot()) + of_values_ * kKeys * 4;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (i * 32 + lane() < kKeys) ptx::store_shared(to + (i * 32 + lane()) * 4, scale_[i] * inverse);
    if (of_values_ && lane() == 0) ptx::store_shared(to + kKeys * 4, unit_);
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive(smem_.scales_full(stage.slot()));
  }

 private:
  static constexpr int kKeys = Traits::kKeys, kEach = (kKeys + 31) / 32;  // of a lane

  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }

  // A lane has one block of the step: block_size >= 8.
  __device__ __forceinline__ void load_entry(const Tile& tile, int step) {
    const AttentionParams& a = p_.attention;
    const int place = step * kKeys / a.block_size + lane(), first_key = place * a.block_size;
    entry_ = 0;
    if (step >= 0 && first_key < tile.seq_len && first_key + a.block_size > first_visible_key(a, tile))
      entry_ = __ldg(a.block_table + tile.seq * a.block_table_stride + place);
  }

  const PrefillParams& p_;
  const PrefillSmem<Traits> smem_;
  const bool of_values_;
  float scale_[kEach], unit_;
  int entry_;  // of the block table, for the step to be fetched next
};

// By each of the converter warps.  Two of them also pass on the scales per token, the third loads the queries.
template <class Traits>
__device__ __forceinline__ void convert(const PrefillParams& p, PrefillSmem<Traits> smem, int converter) {
  const DType type = p.attention.cache_dtype;
  TileRing<Traits> tiles{smem};
  RingPosition<Traits::kStages> stage;
  TokenScales<Traits> scales(p, smem, converter == 1);
  const bool with_scales = Traits::kTokenScales && p.attention.k_scale.per_token() && converter < 2;
  while (true) {
    tiles.wait();
    if (tiles.rows().seq < 0) break;
    const Steps steps = tiles.steps();
    if (with_scales && steps.last >= steps.first) scales.begin_tile(tiles.read(), steps.last);
#pragma unroll 1
    for (int step = steps.last; step >= steps.first; --step) {
      if (with_scales) {
        scales.pass_on(stage);
        if (step > steps.first) scales.fetch(tiles.read(), step - 1);
      }
#pragma unroll 1
      for (int tensor = 0; tensor < 2; ++tensor) {
        int begin = 0, end = Traits::kKeys;
        if (tensor == 1) {  // 0 x NaN is NaN: see clear_values of the consumers
          const Tile tile = tiles.read();
          begin = first_visible_key(p.attention, tile) - step * Traits::kKeys;
          end = tile.seq_len - step * Traits::kKeys;
        }
        const auto staging = [&] { return RingPosition<Traits::kStagingSlots>{2 * stage.count + tensor}; };
        const uint32_t source = smem.staging(staging().slot());
        const uint32_t target = tensor == 0 ? smem.key(stage.slot()) : smem.value(stage.slot());
        ptx::mbarrier_wait(smem.staging_full(staging().slot()), staging().parity());
        ptx::mbarrier_wait(tensor == 0 ? smem.key_empty(stage.slot()) : smem.value_empty(stage.slot()),
                           stage.parity() ^ 1);
        if (type == DType::kFloat8E4M3)
          convert_slot<Traits, DType::kFloat8E4M3>(source, target, converter, begin, end);
        else if (type == DType::kFloat8E5M2)
          convert_slot<Traits, DType::kFloat8E5M2>(source, target, converter, begin, end);
        else
          convert_slot<Traits, DType::kInt8>(source, target, converter, begin, end);
        forget(stage.count);
        // What was written is read by wgmma, what was read is written by the copy engine.
        ptx::fence_proxy_async();
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
          ptx::mbarrier_arrive(tensor == 0 ? smem.key_full(stage.slot()) : smem.value_full(stage.slot()));
          ptx::mbarrier_arrive(smem.staging_empty(staging().slot()));
        }
      }
      stage.advance();
      // After the first step, since it may have to wait until the tile before is done.
      if (step == steps.last && converter == 2)
        load_query<Traits>(p, smem, tiles.read(), {forget(tiles.position.count)});
    }
    if (steps.last < steps.first && converter == 2)
      load_query<Traits>(p, smem, tiles.read(), {forget(tiles.position.count)});
    forget(tiles.position.count);
    tiles.release();
  }
}

}  // namespace paged_attn::sm90
