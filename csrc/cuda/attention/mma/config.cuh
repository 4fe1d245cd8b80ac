// Compile-time shape of the kernel, its arguments, and where things lie in shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "merge.cuh"

namespace paged_attn::mma {

struct KernelArgs {
  AttentionParams p;
  QueryRange range;
  Heads heads;
  Plan plan;
  Partials partials;
  int min_share;        // least work of a CTA
  bool deals;           // query tiles are dealt whole as far as they fill the grid
  Divisor block;        // p.block_size
  unsigned last_block;  // of the cache
  int stages;           // of the ring that K and V arrive in, at least 2
  int query_bytes;  // a copy: 16 where every row starts at a multiple of 16 bytes, else 8, else 1 (element by element)
  int cache_bytes;  // the same for K and V
  bool plain_copies, plain_output;      // whole rows by 16 bytes: of K and V, of the output
  bool runs_share_blocks;               // the keys of a run (Loader) lie in one block
  BlockStrides key_bytes, value_bytes;  // strides of the caches
};

// kDecodeRows: of a decoding warp, 16 or 32.  kWarps_: 8 in prefill of many rows, unquantised and by tensor cores.
template <class T_, int kHeadDim_, bool kQuantized_, bool kDecode_, int kDecodeRows = 16, int kWarps_ = 4>
struct Config {
  using T = T_;                               // of query and output
  static constexpr int kHeadDim = kHeadDim_;  // p.head_dim or more; what is above is 0 in shared memory
  static constexpr bool kQuantized = kQuantized_;
  static constexpr bool kTensorCores = !std::is_same_v<T, float>;
  // Tensor cores: the warps share their rows and split the keys; else they split the rows.  Without: see FmaRows.
  static constexpr bool kDecode = kDecode_;

  static constexpr bool kMergesItself = kDecode && kDecodeRows <= 16;  // see merge.cuh
  static constexpr bool kLocalPlan = kDecode;  // a plan of few entries is made by every CTA for itself

  // Of both products.  fp16 holds every quantised element exactly, and a bf16 query row once it is scaled (load_query).
  using Operand = std::conditional_t<kQuantized && kTensorCores, __half, T>;
  static constexpr bool kScaledQuery = !std::is_same_v<T, Operand>;
  // How quantised elements become operands: in prefill a tile is converted in shared memory, for all warps; in decode,
  // where no two warps need the same key, on their way to the registers.
  static constexpr bool kConvertsTiles = kQuantized && kTensorCores && !kDecode;
  static constexpr bool kReadsBytes = kQuantized && kTensorCores && kDecode;

  static constexpr int kWarps = kWarps_, kThreads = 32 * kWarps;
  static constexpr int kCtasPerSm = 8 / kWarps;
  // Whether a warp waits for what it needs of a stage alone, see TileRing, and not for all others at every tile.
  static constexpr bool kRing = kWarps == 8;
  static constexpr int kPrefillRowTiles = (kQuantized ? 2 : 1) * kHeadDim <= 128 ? 2 : 1;
  static constexpr int kRowTiles = kDecode ? kDecodeRows / 16 : kPrefillRowTiles;  // of 16 rows, a warp
  static constexpr int kWarpRows = kTensorCores ? 16 * kRowTiles : kHeadDim <= 128 ? 4 : 2;
  static constexpr int kRows = kDecode ? kWarpRows : kWarps * kWarpRows;
  static constexpr int kKeys = !kTensorCores ? 4096 / kHeadDim : kDecode || kHeadDim <= 128 ? 64 : 32;
  static constexpr int kWarpKeys = kDecode ? kKeys / kWarps : kKeys;
  // Whether output and scores leave registers for a PieceView through a piece.
  static constexpr bool kHoldsView = !kDecode && kRowTiles * (kHeadDim + kKeys) < 384;

  // Q, K and V: rows of kRowBytes.  For ldmatrix, the 16-byte chunk c of row r lies at place c ^ (r & 7).  A tile
  // begins at a multiple of kRowBytes, so that the chunks of a row differ in address bits 4 and up alone.
  static constexpr int kRowBytes = kHeadDim * sizeof(Operand);
  static constexpr int kTileBytes = kKeys * kRowBytes;
  // What arrives in a stage: K, then V; quantised ones as they are.  kReadsBytes: see byte_swizzle.
  static constexpr int kCacheElementBytes = kQuantized ? 1 : sizeof(T);
  static constexpr int kCacheRowBytes = kHeadDim * kCacheElementBytes;
  static constexpr int kMaxStages = kRing ? 3 : kTensorCores && !kDecode ? 2 : 4;
  static constexpr int kStageBytes = 2 * kKeys * kCacheRowBytes;

  static constexpr int kCtaStateBytes = 640, kLocalPlanBytes = 4160;  // at least sizeof(CtaState), sizeof(LocalPlan)
  // Shared memory, in bytes from its start.  Quantised, behind the stages: float scales[2][kKeys] per stage.
  static constexpr int kQuery = 0;
  static constexpr int kConverted = kQuery + kRows * kRowBytes;  // a tile pair, or what decoding warps exchange
  static constexpr int kQueryScales = kConverted + (kQuantized && kTensorCores ? 2 * kTileBytes : 0);  // float [kRows]
  static constexpr int kShared = kQueryScales + (kScaledQuery ? kRows * 4 : 0);                        // CtaState
  static constexpr int kStates = kShared + kCtaStateBytes;  // float2 [kWarps][kWarpRows]
  static constexpr int kBarriers = kStates + (kDecode || !kTensorCores ? kWarps * kWarpRows * 8 : 0);  // TileRing
  static constexpr int kPlan = kBarriers + (kRing ? kMaxStages * 8 : 0);                               // LocalPlan
  static constexpr int kStages = (kPlan + (kLocalPlan ? kLocalPlanBytes : 0) + 511) / 512 * 512;
  static constexpr int kScaleBytes = kQuantized ? 2 * kKeys * 4 : 0;
  static constexpr int smem_bytes(int stages) { return kStages + stages * (kStageBytes + kScaleBytes); }
};

__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t chunk, uint32_t row_bytes) {
  return row * row_bytes + ((chunk ^ (row & 7)) << 4);
}

// Rows of bytes that ldmatrix and 16-byte reads of four lanes a row both meet without bank conflicts: chunk c of row r
// lies at place c ^ byte_swizzle(r).
template <class C>
__device__ __forceinline__ uint32_t byte_swizzle(uint32_t row) {
  return (row >> 1 & 3) | (C::kCacheRowBytes > 64 ? (row & 1) << 2 : 0);
}

// Where a chunk of a tile of Operand lies.
template <class C>
__device__ __forceinline__ uint32_t chunk_place(uint32_t row, uint32_t chunk) {
  return C::kTensorCores ? swizzled(row, chunk, C::kRowBytes) : row * C::kRowBytes + chunk * 16;
}

}  // namespace paged_attn::mma
