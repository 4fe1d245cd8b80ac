// How Q, K and V get into shared memory.
#pragma once

#include "../ptx.cuh"
#include "../widen.cuh"
#include "config.cuh"
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
    using Element =
        std::conditional_t<kElementBytes == 4, uint32_t, std::conditional_t<kElementBytes == 2, uint16_t, uint8_t>>;
#pragma unroll 1
    for (int i = 0; i < 16; i += kElementBytes)
      *reinterpret_cast<Element*>(dst + i) = i < bytes ? *reinterpret_cast<const Element*>(src + i) : Element{0};
  }
}

// Where a token's key and value lie; null: they are not to be read.
using RowAddress = const unsigned char* [2];

// The keys or the values of a KV head.
struct HeadView {
  const unsigned char* base;
  int64_t block_bytes, slot_bytes;
};

// Moves the keys and values of pieces; attention_kernel says who calls what when, and where the barriers stand.
template <class C>
class Loader {
 public:
  __device__ Loader(const KernelArgs& args, unsigned char* smem) : args_(args), smem_(smem) {}

  // Whether a warp copies the keys and values that it works on, and nothing else: no other warp waits for it.
  static constexpr bool kWarpLoadsItsKeys = C::kDecode;
  static constexpr int kCopyThreads = kWarpLoadsItsKeys ? 32 : C::kThreads;  // that copy the same rows, kCopyRows
  static constexpr int kCopyRows = kWarpLoadsItsKeys ? C::kWarpKeys : C::kKeys;
  static constexpr int kRowChunks = C::kCacheRowBytes / 16, kRowsAtOnce = kCopyThreads / kRowChunks;
  static constexpr int kLoadSteps = kCopyRows / kRowsAtOnce;

  // Every warp looks up its share of the rows of a tile: a lane the key or, if `looks_up_value`, the value of one.
  static constexpr int kLookupRows = C::kKeys / C::kWarps;
  static_assert(kLookupRows <= 16);
  __device__ static bool looks_up() { return threadIdx.x % 16 < kLookupRows; }
  __device__ static int lookup_row() { return threadIdx.x / 32 * kLookupRows + threadIdx.x % 16; }
  __device__ static int looks_up_value() { return threadIdx.x / 16 % 2; }

  // lookup_row of `tile` lies in this block; -1: it is not to be read and becomes 0.
  __device__ int find_block(const Piece& piece, int tile) const {
    const int key = tile * C::kKeys + lookup_row();
    if (tile >= piece.tile_end || key < piece.span.key_begin || key >= piece.span.key_end) return -1;
    const int column = args_.block_shift >= 0 ? key >> args_.block_shift : key / args_.p.block_size;
    return __ldg(args_.p.block_table + piece.entry.seq * args_.p.block_table_stride + column);
  }

  // Tells those who copy it where lookup_row of the tile for `stage` lies.  `views`: of keys and values.
  __device__ void publish_address(const HeadView* views, int stage, int tile, int block) {
    const HeadView& view = views[looks_up_value()];
    const unsigned char* address = nullptr;
    if (block >= 0) address = view.base + block * view.block_bytes + slot_of(tile) * view.slot_bytes;
    addresses(stage)[lookup_row()][looks_up_value()] = address;
  }

  // The scale of lookup_row, where it differs from token to token; 0 for a row that is not read.
  __device__ void load_scale(const Piece& piece, int stage, int tile, int block) {
    const ScaleView scale = looks_up_value() ? args_.p.v_scale : args_.p.k_scale;
    if (!per_token(scale)) return;
    const int64_t from =
        block < 0 ? 0
                  : block * scale.strides.block + slot_of(tile) * scale.strides.slot + piece.head * scale.strides.head;
    float* to = scales(stage) + looks_up_value() * C::kKeys + lookup_row();
    ptx::cp_async_4(ptx::smem_address(to), scale.data + from, block < 0 ? 0 : 4);
  }

  // Copies a tile whose addresses are published.
  __device__ void load_tile(const Piece& piece, int stage, int tile) const {
    const int first_key = tile * C::kKeys;
    if (args_.cache_bytes != 16) {
      load_rows(stage, [this](unsigned char* dst, const unsigned char* src, int bytes) {
        copy_unaligned<C::kCacheElementBytes>(dst, src, bytes, args_.cache_bytes);
      });
    } else if (args_.p.head_dim == C::kHeadDim && first_key >= piece.span.key_begin &&
               first_key + C::kKeys <= piece.span.key_end) {
      load_whole_rows(stage);
    } else {
      load_rows(stage, [](unsigned char* dst, const unsigned char* src, int bytes) {
        ptx::cp_async_16(ptx::smem_address(dst), src, bytes);
      });
    }
  }

  // The query rows of the piece's tile; rows behind the last are 0.
  __device__ void load_query(const Piece& piece) {
    const AttentionParams& p = args_.p;
    constexpr int kRowChunks = C::kRowBytes / 16, kRowsAtOnce = C::kThreads / kRowChunks;
    const PlanEntry& e = piece.entry;
    const int chunk = threadIdx.x % kRowChunks;
    constexpr int kElementBytes = sizeof(typename C::T);
    const int there = max(0, min(16, p.head_dim * kElementBytes - chunk * 16));
#pragma unroll 2
    for (int row = threadIdx.x / kRowChunks; row < C::kRows; row += kRowsAtOnce) {
      const int packed = e.first_row + min(row, piece.num_rows - 1), token = args_.group.quotient(packed);
      const int head = piece.head * args_.group.value + packed - token * args_.group.value;
      const int64_t from = (e.q_begin + token) * p.query_strides.token + head * p.query_strides.head;
      unsigned char* to = query() + chunk_place<C>(row, chunk);
      const unsigned char* source = static_cast<const unsigned char*>(p.query) + from * kElementBytes + chunk * 16;
      const int bytes = row < piece.num_rows ? there : 0;
      if (args_.query_bytes == 16)
        ptx::cp_async_16(ptx::smem_address(to), source, bytes);
      else
        copy_unaligned<kElementBytes>(to, source, bytes, args_.query_bytes);
    }
    if constexpr (C::kScaledQuery) {
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
#pragma unroll 1
      for (int row = threadIdx.x / kRowChunks; row < C::kRows; row += kRowsAtOnce) scale_query<kRowChunks>(row, chunk);
    }
  }
  __device__ unsigned char* query() const { return smem_ + C::kQuery; }
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
  // The row of step 0 that this thread copies.
  __device__ static int first_row() {
    return (kWarpLoadsItsKeys ? threadIdx.x / 32 * C::kWarpKeys : 0) + threadIdx.x % kCopyThreads / kRowChunks;
  }
  __device__ int slot_of(int tile) const {
    const int key = tile * C::kKeys + lookup_row();
    return args_.block_shift >= 0 ? key & (args_.p.block_size - 1) : key % args_.p.block_size;
  }

  // Of a key; its value lies kStageBytes / 2 behind.
  __device__ __forceinline__ unsigned char* place(int stage, int row, int chunk) const {
    return stage_data(stage) + (C::kQuantized ? row * C::kCacheRowBytes + chunk * 16 : chunk_place<C>(row, chunk));
  }
  // Some steps' addresses are read before the first copy, so that they arrive together.
  __device__ __forceinline__ void load_whole_rows(int stage) const {
    constexpr int kBatch = kLoadSteps < 8 ? kLoadSteps : 8;
    const int row0 = first_row(), chunk = threadIdx.x % kRowChunks;
#pragma unroll
    for (int step0 = 0; step0 < kLoadSteps; step0 += kBatch) {
      const unsigned char *keys[kBatch], *values[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const RowAddress& from = addresses(stage)[row0 + (step0 + i) * kRowsAtOnce];
        const auto both = *reinterpret_cast<const ulonglong2*>(&from);
        keys[i] = reinterpret_cast<const unsigned char*>(both.x);
        values[i] = reinterpret_cast<const unsigned char*>(both.y);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const uint32_t to = ptx::smem_address(place(stage, row0 + (step0 + i) * kRowsAtOnce, chunk));
        ptx::cp_async_16(to, keys[i] + chunk * 16);
        ptx::cp_async_16(to + C::kStageBytes / 2, values[i] + chunk * 16);
      }
    }
  }
  // The same for rows that are not to be read or end early.
  template <class Copy>
  __device__ void load_rows(int stage, Copy copy) const {
    const int row0 = first_row(), chunk = threadIdx.x % kRowChunks;
    const int there = min(16, args_.p.head_dim * C::kCacheElementBytes - chunk * 16);  // the rest of kHeadDim becomes 0
    const auto* nowhere = static_cast<const unsigned char*>(args_.p.key_cache);
#pragma unroll 1
    for (int step = 0; step < kLoadSteps; ++step) {
      const int row = row0 + step * kRowsAtOnce;
      const RowAddress& from = addresses(stage)[row];
      unsigned char* to = place(stage, row, chunk);
      const bool read = from[0] != nullptr && there > 0;
      copy(to, read ? from[0] + chunk * 16 : nowhere, read ? there : 0);
      copy(to + C::kStageBytes / 2, read ? from[1] + chunk * 16 : nowhere, read ? there : 0);
    }
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
        const uint2 low = widen4<kType>(raw.x), high = widen4<kType>(raw.y);
        *reinterpret_cast<uint4*>(smem_ + C::kConverted + swizzled(row, unit, C::kRowBytes)) =
            make_uint4(low.x, low.y, high.x, high.y);
      }
    }
  }

  __device__ RowAddress* addresses(int stage) const {
    return reinterpret_cast<RowAddress*>(smem_ + C::kStages + args_.stages * C::kStageBytes + stage * C::kAddressBytes);
  }

  const KernelArgs& args_;
  unsigned char* smem_;
};

}  // namespace paged_attn::mma
