// Compile-time shape of the decode kernel, and what one launch of it needs.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "../paths.h"

namespace paged_attn::sm90 {

// One call.  A unit of work is an item: one sequence and one group of kHeads KV heads, cut into tiles of kTileTokens.
struct DecodeArgs {
  AttentionParams p;
  QueryRange range;
  float* partial_out;        // [slots, kHeads, kRows, head_dim]: unnormalised; 0xff.. where not written (Pieces)
  float2* partial_stats;     // [slots, kHeads, kRows]: maximum in log2 units, sum; 0xff.. likewise
  int window;                // window_size, or more than any length where there is no limit
  int group;                 // query heads a KV head
  unsigned group_inverse;    // 65536 / group + 1: row * group_inverse >> 16 is row / group, exactly for rows below 256
  int max_rows;              // packed rows (query tokens x group) of a sequence, at most kRows
  int columns;               // of CTAs, each with as many head groups (decode_schedule.h)
  int column_ctas;           // CTAs / columns
  int column_head_groups;    // num_kv_heads / kHeads / columns
  unsigned columns_inverse;  // 65536 / columns + 1
  unsigned ctas_inverse;     // 2^32 / column_ctas + 1
  int min_share;             // least tiles of a CTA
  int seq_lens_stride;       // p's, which fit 32 bits (decode_supports)
  int cu_seqlens_q_stride;
  bool modified_scores;  // soft cap or ALiBi
  int box_shift;         // log2 of the tokens in a TMA box: a block, or as much of it as a tile holds
  int block_shift;       // log2 of block_size
  bool adjacent_scales;  // kTokenScales: those of four tokens of a head are 16 aligned bytes
};

constexpr int kMaxParts = 16;        // batch_invariant: parts of an item
constexpr int kMinPartTokens = 512;  // batch_invariant: least tokens in a part

// How the rows of a stage lie, [box] first.  Memory is slower to give a row of 192 bytes in pieces than in lines.
enum class RowOrder {
  kChunks,      // [head][chunk][token][kSwizzle bytes]: a row in pieces
  kBlockLines,  // [head][token][kRowBytes]: the tokens of a block and head are adjacent (HND), a run of 128-byte lines
  kTokenLines,  // [token][head][kRowBytes]: kHeads heads of a token are adjacent (NHD), together whole lines
};

// kRows: packed query rows a KV head, in units of 8 (the N of an mma).  kHeads: KV heads that share a stage.
// kTokenScales: a quantised cache has its scales per token and head.
template <class Cache_, int kHeadDim_, int kRows_, int kHeads_ = 1, bool kTokenScales_ = false,
          RowOrder kRowOrder_ = RowOrder::kChunks>
struct DecodeTraits {
  using Cache = Cache_;
  static constexpr int kHeadDim = kHeadDim_, kRows = kRows_, kHeads = kHeads_;
  static constexpr bool kTokenScales = kTokenScales_;
  static constexpr RowOrder kRowOrder = kRowOrder_;
  static constexpr bool kLoadsOnly = false;  // true: the ceiling of bench/decode.py, without math and output
  static constexpr bool kQuantized = sizeof(Cache) == 1;
  using Math = std::conditional_t<kQuantized, __half, Cache>;  // operands of the mma: 8-bit types are exact in fp16

  // A cache row in shared memory: kChunks pieces of kSwizzle bytes, each a TMA swizzle atom wide, or the bytes as they
  // are, and lines of 128 bytes swizzled.  Eight rows at the same 16 bytes lie in different banks; with kBlockLines two
  // may meet.
  static constexpr int kRowBytes = kHeadDim * sizeof(Cache);
  static constexpr bool kInLines = kRowOrder != RowOrder::kChunks;
  static constexpr int kSwizzle = kInLines || kRowBytes % 128 == 0 ? 128 : kRowBytes % 64 == 0 ? 64 : 32;
  static constexpr int kChunks = kRowBytes / kSwizzle;
  static constexpr int kTokenPitch = kRowOrder == RowOrder::kTokenLines   ? kHeads * kRowBytes
                                     : kRowOrder == RowOrder::kBlockLines ? kRowBytes
                                                                          : kSwizzle;
  static_assert(kInLines || kRowBytes % kSwizzle == 0);
  static_assert(kRowOrder != RowOrder::kTokenLines || kTokenPitch % 128 == 0);

  // A warp owns kTokenTiles x 16 tokens of one head in a stage, for kWarpRows query rows: as many as let its output
  // stay in 64 registers.  There are 4 or 8 warps; 8 where the math of 4, or their merge of the rows at the end of a
  // piece, would show: for short rows, 8-bit caches, more than 8 query rows.
  static constexpr int kMostWarpRows = kHeadDim <= 128 ? 16 : 8;
  static constexpr int kWarpRows = kRows < kMostWarpRows ? kRows : kMostWarpRows;
  static constexpr int kRowTiles = kWarpRows / 8;
  static constexpr int kRowGroups = kRows / kWarpRows;
  static constexpr bool kFewWarps = kRowBytes > 192 && !kQuantized && kRows == 8 && kHeads == 1;
  static constexpr int kSlices =
      kFewWarps ? 4 : 8 / (kHeads * kRowGroups) / (kHeads * kRowBytes > 512 && !kQuantized ? 2 : 1);
  static constexpr int kWarps = kHeads * kSlices * kRowGroups;
  static constexpr int kProducers = 2;  // warps: one for K, one for V; a TMA instruction takes its time to issue
  // Where the math of the tiles counts, the consumers take the registers of a third warpgroup: that of the producers,
  // with two idle warps.  A thread has 168 at the launch.  16 rows with scales per token gain nothing.
  static constexpr bool kMoreRegisters = kWarps == 8 && kRows >= 16 && !(kTokenScales && kRows == 16);
  static constexpr int kConsumerRegisters = 208, kProducerRegisters = 88;
  static_assert(2 * kConsumerRegisters + kProducerRegisters <= 3 * 168);
  static constexpr int kThreads = 32 * (kWarps + (kMoreRegisters ? 4 : kProducers));
  // Two where the math of an 8-bit cache decides: twice as many instructions that need not wait for each other.
  static constexpr bool kMuchMath = kRows >= 32 ? kHeadDim < 256 : kRows == 16 && kTokenScales && kHeadDim <= 128;
  static constexpr int kTokenTiles = kQuantized && kMuchMath ? 2 : 1;
  static constexpr int kTileTokens = 16 * kTokenTiles * kSlices;
  // Where the end of a piece costs more than a share that is a little too large.
  static constexpr bool kAlignedShares = kRows >= 32;
  // Rows that a warp finishes together at the end of a piece, kSlices apart.
  static constexpr int kEndRows = kRows == 8 ? 1 : kWarpRows / kSlices < 4 ? kWarpRows / kSlices : 4;
  static constexpr bool kQueryInRegisters =
      kHeadDim * kWarpRows <= (kWarps == 4 || (kMoreRegisters && !kTokenScales) ? 2048 : 1024);
  // Threads of a warp that free the query rows.  With all of them racecheck sees the order; where math decides, one.
  static constexpr int kQueryArrivals = kTokenTiles == 1 ? 32 : 1;

  // Shared memory: the ring, two buffers of query rows (an item's queries arrive while the item before is worked on),
  // and the states of the warps at the end of a piece.
  static constexpr int kTensorBytes = kHeads * kTileTokens * kRowBytes;  // K or V of a stage
  static constexpr int kStageBytes = 2 * kTensorBytes;
  static constexpr int kScaleBytes = kTokenScales ? kHeads * kTileTokens * 4 : 0;  // of K or V of a stage
  static constexpr int kQuerySteps = (kHeadDim + 31) / 32;                         // 64 bytes each
  static constexpr int kQueryPitch = kHeadDim * 2 + (kQuantized ? 32 : 16);        // bytes; no bank conflicts
  static constexpr int kQueryBytes = kHeads * kRows * kQueryPitch;
  static constexpr int kSumPitch = kHeadDim + 4;  // floats
  static constexpr int kSumBytes = kWarps * kWarpRows * kSumPitch * 4;
  static constexpr int kStatsBytes = kWarps * kWarpRows * 8;
  // About 128 KB in flight is enough for the memory's latency at full bandwidth.
  static constexpr int kWantedStages = (kStageBytes > 32 * 1024 ? 144 * 1024 : 128 * 1024) / kStageBytes;
  static constexpr int kPossibleStages =
      (226 * 1024 - 2 * kQueryBytes - kSumBytes - kStatsBytes) / (kStageBytes + 2 * kScaleBytes);
  static constexpr int kStages = kWantedStages < kPossibleStages ? kWantedStages : kPossibleStages;
  static constexpr int kScaleOffset = kStages * kStageBytes;
  static constexpr int kQueryOffset = kScaleOffset + kStages * 2 * kScaleBytes;
  static constexpr int kSumOffset = kQueryOffset + 2 * kQueryBytes;
  static constexpr int kStatsOffset = kSumOffset + kSumBytes;
  static constexpr int kBarrierOffset = kStatsOffset + kStatsBytes;
  static constexpr int kShareOffset = kBarrierOffset + (2 * kStages + 4) * 8;
  static constexpr int kShareBytes = 64;  // Walk
  static constexpr int kMemoOffset = kShareOffset + kShareBytes;
  static constexpr int kMemoBytes = 128;  // a warp: Consumer::Memo
  static constexpr int kSharedBytes = kMemoOffset + kWarps * kMemoBytes;
  // One CTA an SM, exactly: with programmatic launch a grid that fits twice is doubled up on some SMs and leaves
  // others idle.
  static_assert(kStages >= 2 && kSharedBytes > 114 * 1024 && kSharedBytes <= 227 * 1024);
};

}  // namespace paged_attn::sm90
