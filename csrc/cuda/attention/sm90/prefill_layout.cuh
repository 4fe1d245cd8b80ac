// Shared memory of a prefill CTA, and the constants of an instance.
#pragma once

#include <cstdint>

#include "prefill_tile.cuh"

namespace paged_attn::sm90 {

// kScoreMods: soft cap, ALiBi and negative scales are compiled in.
template <class T_, int kHeadDim_, bool kScoreMods_>
struct PrefillTraits {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_;  // columns in shared memory; those past the real head_dim hold 0
  static constexpr bool kScoreMods = kScoreMods_;
  static constexpr int kParts = kHeadDim / 64;  // a part: 64 columns, 128 bytes a row
  static constexpr int kKeys = kHeadDim > 128 ? 80 : 128;
  static constexpr int kStages = 2;
  static constexpr int kConsumers = 2;                       // warpgroups that compute
  static constexpr int kRows = kWarpgroupRows * kConsumers;  // of a tile
  static constexpr bool kQueryInRegisters = kHeadDim <= 128;
  static constexpr int kQueryBuffers = kHeadDim > 128 ? 1 : 2;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  // Of 64 K registers every thread has an equal part at launch; the producers give most of theirs to the consumers.
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

  // K and V are laid out as [group of 8 rows][part][8 rows][128 bytes], swizzled by 128 bytes: a box of rows of a block
  // is contiguous, and wgmma reads it both as K (K-major) and as V (MN-major).  Q: [part][row][128 bytes].
  static constexpr int kRowBytes = kHeadDim * 2;
  static constexpr int kStageBytes = kKeys * kRowBytes;  // of K or of V
  static constexpr int kRowGroupBytes = 8 * kRowBytes;
  static constexpr int kPartBytes = 8 * 128;
  static constexpr int kQueryBytes = kWarpgroupRows * kHeadDim * 2;  // of one warpgroup
  static constexpr int kQueryPartBytes = kWarpgroupRows * 128;

  static constexpr int kKeyOffset = kQueryBuffers * kConsumers * kQueryBytes;
  static constexpr int kValueOffset = kKeyOffset + kStages * kStageBytes;
  static constexpr int kTileOffset = kValueOffset + kStages * kStageBytes;
  static constexpr int kTileBytes = 32;  // of a slot: a Tile and padding
  static constexpr int kBarrierOffset = kTileOffset + 2 * kTileBytes;
  static constexpr int kBarriers = 4 * kStages + 2 * kConsumers * kQueryBuffers + 4;
  static constexpr int kSmemBytes = kBarrierOffset + kBarriers * 8 + 1024;  // 1024: to align the base
  static_assert(kSmemBytes <= 227 * 1024);
};

// The use number `count` of a ring of kSize slots: which slot, and the parity of its barriers in that round.
template <int kSize>
struct RingPosition {
  static_assert((kSize & (kSize - 1)) == 0);
  uint32_t count = 0;
  __device__ __forceinline__ int slot() const { return static_cast<int>(count % kSize); }
  __device__ __forceinline__ uint32_t parity() const { return count / kSize % 2; }
  __device__ __forceinline__ void advance() { ++count; }
};

// Barriers, by their shared-memory addresses.  "full": the slot may be read; "empty": it may be written again.
template <class Traits>
struct PrefillSmem {
  uint32_t base;  // aligned to 1024

  __device__ uint32_t query(int buffer, int warpgroup) const {
    return base + (buffer * Traits::kConsumers + warpgroup) * Traits::kQueryBytes;
  }
  __device__ uint32_t key(int stage) const { return base + Traits::kKeyOffset + stage * Traits::kStageBytes; }
  __device__ uint32_t value(int stage) const { return base + Traits::kValueOffset + stage * Traits::kStageBytes; }
  __device__ uint32_t tile(int slot) const { return base + Traits::kTileOffset + slot * Traits::kTileBytes; }
  __device__ uint32_t key_full(int stage) const { return barrier(stage); }
  __device__ uint32_t key_empty(int stage) const { return barrier(Traits::kStages + stage); }
  __device__ uint32_t value_full(int stage) const { return barrier(2 * Traits::kStages + stage); }
  __device__ uint32_t value_empty(int stage) const { return barrier(3 * Traits::kStages + stage); }
  __device__ uint32_t tile_full(int slot) const { return barrier(4 * Traits::kStages + slot); }
  __device__ uint32_t tile_empty(int slot) const { return barrier(4 * Traits::kStages + 2 + slot); }
  __device__ uint32_t query_full(int buffer, int warpgroup) const {
    return barrier(4 * Traits::kStages + 4 + buffer * Traits::kConsumers + warpgroup);
  }
  __device__ uint32_t query_empty(int buffer, int warpgroup) const {
    return barrier(4 * Traits::kStages + 4 + (Traits::kQueryBuffers + buffer) * Traits::kConsumers + warpgroup);
  }

 private:
  __device__ uint32_t barrier(int i) const { return base + Traits::kBarrierOffset + i * 8; }
};

}  // namespace paged_attn::sm90
