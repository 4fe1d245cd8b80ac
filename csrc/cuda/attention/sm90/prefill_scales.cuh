// Scales per token and head of 8-bit caches, on their way from memory to the consumers.
#pragma once

#include "../softmax.cuh"
#include "prefill_load.cuh"

namespace paged_attn::sm90 {

// By one warp: a step ahead with the loads of scales, two with those of the block table.
template <class Traits>
class TokenScales {
 public:
  __device__ __forceinline__ TokenScales(const PrefillParams& p, PrefillSmem<Traits> smem) : p_(p), smem_(smem) {}

  // Those of all steps of a tile.
  __device__ __forceinline__ void pass_on(const TileRing<Traits>& tiles) {
    unit_ = 0.f;
    int step = tiles.steps().last;
    load_entry(tiles.rows(), step);
    fetch(tiles.rows(), step);
#pragma unroll 1
    for (; step >= tiles.steps().first; --step) {
      write();
      fetch(tiles.rows(), step - 1);
    }
  }

 private:
  static constexpr int kKeys = Traits::kKeys, kEach = kKeys / 32;  // of a lane

  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }

  // The scales of V in units of the largest power of two seen in the tile, so that fp16 holds scaled probabilities.
  __device__ __forceinline__ void write() {
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) largest = fmaxf(largest, fabsf(value_[i]));
#pragma unroll
    for (int d = 16; d > 0; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
    const float before = unit_;
    unit_ = fmaxf(unit_, power_of_two_above(largest));
    const float inverse = unit_ > 0.f ? 1.f / unit_ : 0.f;
    ptx::mbarrier_wait(smem_.scales_empty(stage_.slot()), stage_.parity() ^ 1);
    const uint32_t scales = smem_.scales(stage_.slot());
    const int e = lane() % 2, thread = lane() / 2 % 4, b = lane() / 8;  // column 8 b + 2 thread + e of 32
    const uint32_t keys = scales + thread * 16 + b / 2 * 64 + b % 2 * 8 + e * 4;
    const uint32_t values = scales + Traits::kValueScaleOffset + thread * 16 + b * 4 + e * 2;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      ptx::store_shared(keys + i * 128, key_[i]);
      ptx::store_shared(values + i * 64, __float2half_rn(value_[i] * inverse));
    }
    if (lane() == 0) {
      ptx::store_shared(scales + Traits::kUnitOffset, unit_);
      ptx::store_shared(scales + Traits::kUnitOffset + 4, before * inverse);
    }
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive(smem_.scales_full(stage_.slot()));
    stage_.advance();
  }

  // Those of the step of entry_; 0 for tokens that the sequence does not see, and where an id is not one of the cache.
  __device__ __forceinline__ void fetch(const TileRows& tile, int step) {
    const AttentionParams& a = p_.attention;
    const int begin = first_visible_key(a, tile) - step * kKeys, end = tile.seq_len - step * kKeys;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = i * 32 + lane(), place = __umulhi(first_slot_ + row, p_.block_inverse);
      const int slot = first_slot_ + row - place * a.block_size, block = __shfl_sync(~0u, entry_, place);
      key_[i] = value_[i] = 0.f;
      if (row >= begin && row < end && static_cast<unsigned>(block) < a.num_blocks) {
        key_[i] = load(a.k_scale, block, slot, tile.kv_head);
        value_[i] = load(a.v_scale, block, slot, tile.kv_head);
      }
    }
    load_entry(tile, step - 1);
  }
  __device__ __forceinline__ float load(const ScaleView& view, int block, int slot, int head) const {
    return __ldg(view.data + block * static_cast<int>(view.strides.block) + slot * static_cast<int>(view.strides.slot) +
                 head * static_cast<int>(view.strides.head));
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
  RingPosition<Traits::kStages> stage_;
  float key_[kEach], value_[kEach], unit_;
  int entry_, first_slot_;  // of the step to be fetched next: this lane's entry of the block table; in the first block
};

// By one warp, of all tiles.
template <class Traits>
__device__ __forceinline__ void produce_scales(const PrefillParams& p, PrefillSmem<Traits> smem) {
  TileRing<Traits> tiles{smem};
  TokenScales<Traits> scales(p, smem);
  while (true) {
    tiles.wait();
    if (tiles.rows().seq < 0) break;
    if (has_token_scales<Traits>(p)) scales.pass_on(tiles);
    tiles.release();
  }
}

}  // namespace paged_attn::sm90
