// Shared memory of a prefill CTA, and the constants of an instance.
#pragma once

#include <cstdint>

#include "prefill_tile.cuh"

namespace paged_attn::sm90 {

// kScoreMods: soft cap, ALiBi and scales that are not positive are compiled in.  kQuantized: the cache is of any 8-bit
// type, and query and output of any 16-bit type.  kTokenScales: the cache may have scales per token and head.
template <class T_, int kHeadDim_, bool kScoreMods_, bool kQuantized_ = false, bool kTokenScales_ = false>
struct PrefillTraits {
  using T = T_;                               // of the operands
  static constexpr int kHeadDim = kHeadDim_;  // columns of the arithmetic; those past the real head_dim hold 0
  static constexpr bool kScoreMods = kScoreMods_, kQuantized = kQuantized_, kTokenScales = kTokenScales_;
  static constexpr int kParts = (kHeadDim + 63) / 64;  // a part: 64 columns in shared memory, 128 bytes a row
  static constexpr int kKeys = kQuantized && kHeadDim > 128 ? 64  // of a step
                               : kHeadDim > 192             ? 80
                               : kHeadDim > 128             ? 112
                               : kHeadDim > 96 || (kQuantized && (kHeadDim > 64 || kScoreMods || kTokenScales)) ? 128
                               : kHeadDim > 64                                                                  ? 160
                                                                                                                : 192;
  static constexpr int kStages = 2;
  static constexpr int kConsumers = 2;                       // warpgroups that compute
  static constexpr int kRows = kWarpgroupRows * kConsumers;  // of a tile
  static_assert(4 * kConsumers == kRowWarps);
  static constexpr bool kQueryInRegisters =  // they must fit
      kHeadDim <= (kTokenScales ? 96
                   : kQuantized ? 192
                                : 128) &&
      !(kScoreMods && (kQuantized || kHeadDim <= 64));
  static constexpr bool kShortLoop =  // of the full steps
      kQueryInRegisters || (kHeadDim == 192 && !kQuantized) || (kHeadDim <= 192 && kTokenScales && !kScoreMods);
  // At once; else the output goes through its buffer.
  static constexpr bool kReleasesQuery = kQuantized && kQueryInRegisters;
  static constexpr bool kLateTurn = kHeadDim <= 96 && !kQuantized && !kScoreMods;        // until the maxima are found
  static constexpr bool kEarlyOutput = kLateTurn || (kHeadDim > 64 && kHeadDim <= 192);  // P V ends with the maxima
  // Where the fixed costs of a step weigh most, a full step neither asks whether V is to be cleared, which masked steps
  // do at their end, nor makes descriptors anew, nor waits for O with the factors of its rescaling in hand.
  static constexpr bool kLeanSteps = kHeadDim <= 64 && !kQuantized && !kScoreMods;
  static constexpr int kRowsAtOnce =
      !kEarlyOutput || (kLateTurn && kHeadDim > 64) ? 1 : 2;  // of a thread's two, in softmax
  static constexpr int kQueryBuffers = kHeadDim > 128 || kQuantized ? 1 : 2;
  static constexpr int kProducers = kQuantized && kTokenScales ? 2 : 1;  // warpgroups that load and convert
  static constexpr int kQueryUnroll =                                    // of its loads
      !kQuantized                                         ? 2
      : kTokenScales || kHeadDim == 96 || kHeadDim == 192 ? 1
                                                          : 4;
  static constexpr int kThreads = 128 * (kProducers + kConsumers);
  // Order of the warpgroups.  Where others convert beside them, consumers gain a little by being the first.
  static constexpr int kFirstConsumer = kQuantized && !kTokenScales && kHeadDim < 256 ? 0 : kProducers;
  static constexpr int kFirstProducer = kFirstConsumer == 0 ? kConsumers : 0;
  // Of 64 K registers every thread has an equal part at launch; the producers give most of theirs to the consumers.
  static constexpr int kProducerRegisters = kProducers == 1 ? (kQuantized ? 56 : 40) : kHeadDim == 192 ? 48 : 40;
  static constexpr int kConsumerRegisters = kProducers == 1 ? (kQuantized ? 224 : 232) : 256 - kProducerRegisters;

  // K and V are laid out as [group of 8 rows][part][8 rows][128 bytes], swizzled by 128 bytes: a box of rows of a block
  // is contiguous, and wgmma reads it both as K (K-major) and as V (MN-major).  Where rows do not fill their parts, a
  // box is of one part, and the layout [part][row][128 bytes].  Q: [part][row][128 bytes].
  static constexpr bool kWholeRows = kQuantized || kHeadDim % 64 == 0;
  static constexpr int kRowBytes = kParts * 128;
  static constexpr int kStageBytes = kKeys * kRowBytes;  // of K or of V
  static constexpr int kRowGroupBytes = kWholeRows ? 8 * kRowBytes : 8 * 128;
  static constexpr int kPartBytes = kWholeRows ? 8 * 128 : kKeys * 128;
  static constexpr int kQueryBytes = kWarpgroupRows * kRowBytes;  // of one warpgroup
  static constexpr int kQueryPartBytes = kWarpgroupRows * 128;
  static constexpr int kChunks = kHeadDim / 8;                                    // of 16 bytes, in a row
  static constexpr int kChunkLanes = kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;  // lanes that share a row

  // 8-bit K and V on their way, swizzled.  kPaired: a slot holds kStagedColumns of both, as [group of 8 keys][K, V or
  // V, K][8 keys][kStagedColumns bytes].  Otherwise slots 2 i are for K, 2 i + 1 for V: [key][kStagedColumns bytes].
  static constexpr bool kPaired = kQuantized && !kTokenScales;
  // Warps that convert: one K and two V, or two and two.  Of the groups of 8 keys the one for K leaves kSharedGroups to
  // each of those for V, so that all have about as much to do.
  static constexpr int kKeyConverters = kTokenScales ? 2 : 1, kValueConverters = 2;
  static constexpr int kGroups = kKeys / 8;
  static constexpr int kSharedGroups = kTokenScales || kHeadDim > 128 ? 0 : kGroups / 6;
  static constexpr int kStagedColumns = kHeadDim <= 64 ? 64 : 128;
  static constexpr int kStagedParts = (kHeadDim + kStagedColumns - 1) / kStagedColumns;
  static constexpr int kConvertedColumns = kTokenScales ? kParts * 64 : kHeadDim;  // whole parts take fewer registers
  static constexpr int kStagedGroupBytes = (kPaired ? 2 : 1) * 8 * kStagedColumns;
  static constexpr int kStagedBytes = kGroups * kStagedGroupBytes;
  static constexpr int kStagingSlots = !kQuantized ? 0 : (kHeadDim <= 192 ? 2 : 1) * (kPaired ? 1 : 2) * kStagedParts;
  // Scales of a step: float of K, half of V in units of a power of two; that unit, and the one before in units of it.
  // A consumer thread has two columns in every 8: its scales for 16 columns of K, or for 32 of V, are 16 bytes.
  static constexpr int kValueScaleOffset = kKeys * 4, kUnitOffset = kKeys * 6;
  static constexpr int kScaleBytes = kTokenScales ? kUnitOffset + 16 : 0;

  static constexpr int kKeyOffset = kQueryBuffers * kConsumers * kQueryBytes;
  static constexpr int kValueOffset = kKeyOffset + kStages * kStageBytes;
  static constexpr int kStagingOffset = kValueOffset + kStages * kStageBytes;
  static constexpr int kTileOffset = kStagingOffset + kStagingSlots * kStagedBytes;
  static constexpr int kTileSlots = 2;
  static constexpr int kTileBytes = 64;  // of a slot: a Tile
  static constexpr int kScaleOffset = kTileOffset + kTileSlots * kTileBytes;
  static constexpr int kBarrierOffset = kScaleOffset + kStages * kScaleBytes;
  static constexpr int kStageBarriers = (kTokenScales ? 6 : 4) * kStages;
  static constexpr int kTileBarriers = 2 * kTileSlots + 1;
  static constexpr int kBarriers = kStageBarriers + kTileBarriers + 2 * kConsumers * kQueryBuffers + 2 * kStagingSlots;
  static constexpr int kSmemBytes = kBarrierOffset + kBarriers * 8;
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

// Shared-memory addresses.  Barriers, "full": the slot may be read; "empty": it may be written again.
template <class Traits>
struct PrefillSmem {
  uint32_t base;  // a multiple of 1024

  __device__ uint32_t query(int buffer, int warpgroup) const {
    return base + (buffer * Traits::kConsumers + warpgroup) * Traits::kQueryBytes;
  }
  __device__ uint32_t key(int stage) const { return base + Traits::kKeyOffset + stage * Traits::kStageBytes; }
  __device__ uint32_t value(int stage) const { return base + Traits::kValueOffset + stage * Traits::kStageBytes; }
  __device__ uint32_t staging(int slot) const { return base + Traits::kStagingOffset + slot * Traits::kStagedBytes; }
  __device__ uint32_t tile(int slot) const { return base + Traits::kTileOffset + slot * Traits::kTileBytes; }
  __device__ uint32_t scales(int stage) const { return base + Traits::kScaleOffset + stage * Traits::kScaleBytes; }
  __device__ uint32_t key_full(int stage) const { return barrier(stage); }
  __device__ uint32_t key_empty(int stage) const { return barrier(Traits::kStages + stage); }
  __device__ uint32_t value_full(int stage) const { return barrier(2 * Traits::kStages + stage); }
  __device__ uint32_t value_empty(int stage) const { return barrier(3 * Traits::kStages + stage); }
  __device__ uint32_t scales_full(int stage) const { return barrier(4 * Traits::kStages + stage); }
  __device__ uint32_t scales_empty(int stage) const { return barrier(5 * Traits::kStages + stage); }
  __device__ uint32_t tile_full(int slot) const { return barrier(Traits::kStageBarriers + slot); }
  __device__ uint32_t tile_empty(int slot) const { return barrier(Traits::kStageBarriers + Traits::kTileSlots + slot); }
  // Who loads a tile has come near its end: the next one may be taken.
  __device__ uint32_t tile_wanted() const { return barrier(Traits::kStageBarriers + 2 * Traits::kTileSlots); }
  __device__ uint32_t query_full(int buffer, int warpgroup) const {
    return barrier(kQueryBarriers + buffer * Traits::kConsumers + warpgroup);
  }
  __device__ uint32_t query_empty(int buffer, int warpgroup) const {
    return barrier(kQueryBarriers + (Traits::kQueryBuffers + buffer) * Traits::kConsumers + warpgroup);
  }
  __device__ uint32_t staging_full(int slot) const { return barrier(Traits::kBarriers - 1 - slot); }
  __device__ uint32_t staging_empty(int slot) const {
    return barrier(Traits::kBarriers - 1 - Traits::kStagingSlots - slot);
  }

 private:
  static constexpr int kQueryBarriers = Traits::kStageBarriers + Traits::kTileBarriers;  // where they begin
  __device__ uint32_t barrier(int i) const { return base + Traits::kBarrierOffset + i * 8; }
};

}  // namespace paged_attn::sm90
