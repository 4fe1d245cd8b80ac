// How Q, K and V get into shared memory.
#pragma once

#include "../ptx.cuh"
#include "config.cuh"
#include "convert.cuh"
#include "scales.cuh"

namespace paged_attn::mma {

// One 16-byte chunk, of which `bytes` (0 to 16) are there and the rest becomes 0, from an address that is no multiple
// of 16; `copy` as in KernelArgs.  Chunks copied element by element are visible after the next barrier like the others.
template <int kElementBytes>
__device__ __forceinline__ void copy_unaligned(unsigned char* dst, const unsigned char* src, int bytes, int copy) {
  if (copy == 8) {
    ptx::cp_async_8(ptx::smem_address(dst), src, min(bytes, 8));
    ptx::cp_async_8(ptx::smem_address(dst + 8), bytes > 8 ? src + 8 : src, max(bytes - 8, 0));
  } else {
#pragma unroll 1
    for (int i = 0; i < 16; i += kElementBytes) {
      if constexpr (kElementBytes == 2)
        *reinterpret_cast<uint16_t*>(dst + i) = i < bytes ? *reinterpret_cast<const uint16_t*>(src + i) : 0;
      else
        dst[i] = i < bytes ? src[i] : 0;
    }
  }
}

// Where the key and the value of a token lie; null: they are not to be read.
struct alignas(16) RowAddress {
  const unsigned char *key, *value;
};

// Moves the keys and values of pieces; attention_kernel says who calls what when, and where the barriers stand.
template <class C>
class Loader {
 public:
  __device__ Loader(const KernelArgs& args, unsigned char* smem) : args_(args), smem_(smem) {}

  // Row `row` of `tile` lies in this block; -1: it is not to be read and becomes 0.
  __device__ int find_block(const Piece& piece, int tile, int row) const {
    const int key = tile * C::kKeys + row;
    if (tile >= piece.tile_end || key < piece.span.key_begin || key >= piece.span.key_end) return -1;
    return __ldg(args_.p.block_table + piece.entry.seq * args_.p.block_table_stride + key / args_.p.block_size);
  }

  // Tells all threads where row `row` of the tile for `stage` lies.
  __device__ void publish_address(const Piece& piece, int stage, int tile, int row, int block) {
    const AttentionParams& p = args_.p;
    RowAddress address = {nullptr, nullptr};
    if (block >= 0) {
      const int slot = (tile * C::kKeys + row) % p.block_size;
      auto find = [&](const void* cache, const BlockStrides& strides) {
        return static_cast<const unsigned char*>(cache) +
               kElementBytes * (block * strides.block + slot * strides.slot + piece.head * strides.head);
      };
      address = {find(p.key_cache, p.key_strides), find(p.value_cache, p.value_strides)};
    }
    addresses(stage)[row] = address;
  }

  // The scales of row `row`, where they differ from token to token; 0 for a row that is not read.
  __device__ void load_scales(const Piece& piece, int stage, int tile, int row, int block) {
    load_scale(args_.p.k_scale, piece, scales(stage) + row, tile * C::kKeys + row, block);
    load_scale(args_.p.v_scale, piece, scales(stage) + C::kKeys + row, tile * C::kKeys + row, block);
  }

  // Keys and values of the rows of step `step` of a tile whose addresses were published before the last barrier; all of
  // 0 <= step < kLoadSteps make the tile.
  static constexpr int kRowChunks = C::kCacheRowBytes / 16, kRowsAtOnce = C::kThreads / kRowChunks;
  static constexpr int kLoadSteps = C::kKeys / kRowsAtOnce;
  __device__ __forceinline__ void load_step(int stage, int step) const {
    load_rows(stage, step, [](unsigned char* dst, const unsigned char* src, int bytes) {
      ptx::cp_async_16(ptx::smem_address(dst), src, bytes);
    });
  }
  // The whole tile, where rows do not start at multiples of 16 bytes.
  __device__ void load_unaligned(int stage) const {
#pragma unroll 1
    for (int step = 0; step < kLoadSteps; ++step)
      load_rows(stage, step, [this](unsigned char* dst, const unsigned char* src, int bytes) {
        copy_unaligned<kElementBytes>(dst, src, bytes, args_.cache_bytes);
      });
  }
  __device__ bool aligned() const { return args_.cache_bytes == 16; }
  __device__ void load_tile(const Piece& piece, int stage, int tile) const {
    const int first_key = tile * C::kKeys;
    if (!aligned()) {
      load_unaligned(stage);
    } else if (args_.p.head_dim == C::kHeadDim && first_key >= piece.span.key_begin &&
               first_key + C::kKeys <= piece.span.key_end) {
      const int row0 = threadIdx.x / kRowChunks, chunk = threadIdx.x % kRowChunks;
#pragma unroll
      for (int step = 0; step < kLoadSteps; ++step) {
        const RowAddress from = addresses(stage)[row0 + step * kRowsAtOnce];
        unsigned char* to = place(stage, row0 + step * kRowsAtOnce, chunk);
        ptx::cp_async_16(ptx::smem_address(to), from.key + chunk * 16);
        ptx::cp_async_16(ptx::smem_address(to + C::kStageBytes / 2), from.value + chunk * 16);
      }
    } else {
#pragma unroll 1
      for (int step = 0; step < kLoadSteps; ++step) load_step(stage, step);
    }
  }

  // The query rows of the piece's tile; rows behind the last are 0.
  __device__ void load_query(const Piece& piece) {
    const AttentionParams& p = args_.p;
    constexpr int kRowChunks = C::kRowBytes / 16, kRowsAtOnce = C::kThreads / kRowChunks;
    const PlanEntry& e = piece.entry;
    const int group = p.num_heads / p.num_kv_heads;
    const int chunk = threadIdx.x % kRowChunks;
    const int there = max(0, min(16, p.head_dim * 2 - chunk * 16));
#pragma unroll 1
    for (int row = threadIdx.x / kRowChunks; row < C::kRows; row += kRowsAtOnce) {
      const int packed = e.first_row + min(row, piece.num_rows - 1);
      const int64_t from = (e.q_begin + packed / group) * p.query_strides.token +
                           (piece.head * group + packed % group) * p.query_strides.head;
      unsigned char* to = smem_ + C::kQuery + swizzled(row, chunk, C::kRowBytes);
      const unsigned char* source = static_cast<const unsigned char*>(p.query) + from * 2 + chunk * 16;
      const int bytes = row < piece.num_rows ? there : 0;
      if (args_.query_bytes == 16)
        ptx::cp_async_16(ptx::smem_address(to), source, bytes);
      else
        copy_unaligned<2>(to, source, bytes, args_.query_bytes);
    }
    if constexpr (C::kScaledQuery) {
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
#pragma unroll 1
      for (int row = threadIdx.x / kRowChunks; row < C::kRows; row += kRowsAtOnce) scale_query<kRowChunks>(row, chunk);
    }
  }
  __device__ float* query_scales() const { return reinterpret_cast<float*>(smem_ + C::kQueryScales); }

  // Quantised: the stage's tile pair, converted and laid out for ldmatrix.  A warp that works on keys of its own
  // converts those alone.
  __device__ void convert_tile(int stage) {
    if (args_.p.cache_dtype == DType::kFloat8E4M3)
      convert_tile<DType::kFloat8E4M3>(stage);
    else if (args_.p.cache_dtype == DType::kFloat8E5M2)
      convert_tile<DType::kFloat8E5M2>(stage);
    else
      convert_tile<DType::kInt8>(stage);
    if constexpr (C::kDecode)
      __syncwarp();
    else
      __syncthreads();
  }

  // K for ldmatrix; V follows C::kTileBytes behind.
  __device__ uint32_t tile_address(int stage) const {
    return ptx::smem_address(C::kQuantized ? smem_ + C::kConverted : stage_data(stage));
  }
  __device__ unsigned char* stage_data(int stage) const { return smem_ + C::kStages + stage * C::kStageBytes; }
  __device__ float* scales(int stage) const {
    return reinterpret_cast<float*>(smem_ + C::kStages + args_.stages * (C::kStageBytes + C::kAddressBytes) +
                                    stage * C::kScaleBytes);
  }

 private:
  static constexpr int kElementBytes = C::kQuantized ? 1 : 2;

  // Of a key; its value lies kStageBytes / 2 behind.
  __device__ __forceinline__ unsigned char* place(int stage, int row, int chunk) const {
    return stage_data(stage) +
           (C::kQuantized ? row * C::kCacheRowBytes + chunk * 16 : swizzled(row, chunk, C::kRowBytes));
  }
  template <class Copy>
  __device__ __forceinline__ void load_rows(int stage, int step, Copy copy) const {
    const int row = threadIdx.x / kRowChunks + step * kRowsAtOnce, chunk = threadIdx.x % kRowChunks;
    const int there = min(16, args_.p.head_dim * kElementBytes - chunk * 16);  // the rest of kHeadDim becomes 0
    const RowAddress from = addresses(stage)[row];
    unsigned char* to = place(stage, row, chunk);
    const bool read = from.key != nullptr && there > 0;
    const auto* nowhere = static_cast<const unsigned char*>(args_.p.key_cache);
    copy(to, read ? from.key + chunk * 16 : nowhere, read ? there : 0);
    copy(to + C::kStageBytes / 2, read ? from.value + chunk * 16 : nowhere, read ? there : 0);
  }

  // bf16 to fp16 in place: the row's magnitudes are brought to below 2^15 by a power of two, which then multiplies its
  // scores.  What becomes subnormal is 2^-29 of the largest and less.  A thread converts the chunk that it has loaded.
  template <int kRowChunks>
  __device__ void scale_query(int row, int chunk) {
    auto& words = *reinterpret_cast<uint4*>(smem_ + C::kQuery + swizzled(row, chunk, C::kRowBytes));
    uint32_t pairs[4] = {words.x, words.y, words.z, words.w}, largest = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) largest = max(largest, max(pairs[i] << 16 & 0x7fff0000u, pairs[i] & 0x7fff0000u));
#pragma unroll
    for (int d = 1; d < kRowChunks; d *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, d));
    uint32_t exponent = largest >> 23;
    if (exponent == 255) exponent = 141;  // infinite or NaN, and so is every score
    exponent = max(exponent, 20u);
    const float factor = __uint_as_float((268 - exponent) << 23);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      pairs[i] =
          ptx::pack<__half>(__uint_as_float(pairs[i] << 16) * factor, __uint_as_float(pairs[i] & 0xffff0000u) * factor);
    words = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    if (chunk == 0) query_scales()[row] = __uint_as_float((exponent - 14) << 23);
  }

  template <DType kType>
  __device__ void convert_tile(int stage) {
    constexpr int kUnits = C::kHeadDim / 8;  // of eight elements, a row
    constexpr int kThreads = C::kDecode ? 32 : C::kThreads;
    const int first_row = C::kDecode ? threadIdx.x / 32 * C::kWarpKeys : 0;
    const unsigned char* from = stage_data(stage);
#pragma unroll
    for (int value = 0; value < 2; ++value) {
#pragma unroll 4
      for (int i = threadIdx.x % kThreads; i < C::kWarpKeys * kUnits; i += kThreads) {
        const int row = value * C::kKeys + first_row + i / kUnits, unit = i % kUnits;
        const uint2 raw = *reinterpret_cast<const uint2*>(from + row * C::kHeadDim + unit * 8);
        const uint2 low = convert4<kType>(raw.x), high = convert4<kType>(raw.y);
        *reinterpret_cast<uint4*>(smem_ + C::kConverted + swizzled(row, unit, C::kRowBytes)) =
            make_uint4(low.x, low.y, high.x, high.y);
      }
    }
  }

  __device__ RowAddress* addresses(int stage) const {
    return reinterpret_cast<RowAddress*>(smem_ + C::kStages + args_.stages * C::kStageBytes + stage * C::kAddressBytes);
  }
  __device__ void load_scale(const ScaleView& scale, const Piece& piece, float* to, int key, int block) const {
    if (!per_token(scale)) return;
    const int64_t from = block < 0 ? 0
                                   : block * scale.strides.block + key % args_.p.block_size * scale.strides.slot +
                                         piece.head * scale.strides.head;
    ptx::cp_async_4(ptx::smem_address(to), scale.data + from, block < 0 ? 0 : 4);
  }

  const KernelArgs& args_;
  unsigned char* smem_;
};

}  // namespace paged_attn::mma
