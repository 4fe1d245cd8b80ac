// How Q, K and V get into shared memory.
#pragma once

#include "../ptx.cuh"
#include "../widen.cuh"
#include "config.cuh"

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

// What the loop over the tiles of a piece needs of it.
struct PieceView {
  const unsigned char *keys, *values;  // of a KV head, where the blocks begin
  const int32_t* blocks;               // of the sequence
  int last_key;                        // that the piece's rows see
  int tile_begin, tile_end;
  int plain_begin, plain_end;  // tiles that every row sees whole, and that are copied without conditions
  int num_rows;
  bool modified;  // ScoreRule

  __device__ bool plain(int tile) const { return tile >= plain_begin && tile < plain_end; }
};

// Moves the keys and values of pieces; attention_kernel says who calls what when, and where the barriers stand.
//
// A thread copies one 16-byte chunk of a key, and of its value, for each key of its runs.
template <class C>
class Loader {
 public:
  __device__ Loader(const KernelArgs& args, unsigned char* smem) : args_(args), smem_(smem) {}

  // Whether a warp copies the keys and values that it works on, and nothing else: no other warp waits for it.
  static constexpr bool kWarpLoadsItsKeys = C::kDecode;
  static constexpr int kCopyThreads = kWarpLoadsItsKeys ? 32 : C::kThreads;  // that copy the same rows, kCopyRows
  static constexpr int kCopyRows = kWarpLoadsItsKeys ? C::kWarpKeys : C::kKeys;
  static constexpr int kRowChunks = C::kCacheRowBytes / 16, kRunsAtOnce = kCopyThreads / kRowChunks;
  static constexpr int kThreadRows = kCopyRows / kRunsAtOnce;
  static constexpr int kRunRows = kThreadRows < 8 ? kThreadRows : 8, kRuns = kThreadRows / kRunRows;
  static_assert(kRunRows <= kRowChunks);

  // Of each of this thread's runs, the block of key threadIdx.x % kRunRows: the threads of a run know them all.  As the
  // table has them: whatever is done with one when it is read waits for the memory.
  struct Blocks {
    int of_run[kRuns];
  };
  __device__ Blocks find_blocks(const PieceView& view, int tile) const {
    Blocks blocks;
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      const int place = args_.block.quotient(min(tile * C::kKeys + own_row(run), view.last_key));
      blocks.of_run[run] = __ldg(view.blocks + place);
    }
    return blocks;
  }

  __device__ void load_plain_tile(const PieceView& view, const Piece& piece, int stage, int tile,
                                  const Blocks& blocks) const {
    if (args_.runs_share_blocks)
      load_runs(view, piece, stage, tile, blocks);
    else
      load_keys<false>(view, piece, stage, tile, blocks);
  }

  // The same for any tile: keys outside the piece's span become 0.
  __device__ void load_any_tile(const PieceView& view, const Piece& piece, int stage, int tile,
                                const Blocks& blocks) const {
    if (args_.cache_bytes == 16)
      load_keys<true>(view, piece, stage, tile, blocks);
    else
      load_unaligned_keys(view, piece, stage, tile, blocks);
  }

  // The query rows of the piece's tile; rows behind the last are 0.
  __device__ void load_query(const Piece& piece) {
    const AttentionParams& p = args_.p;
    constexpr int kRowChunks = C::kRowBytes / 16, kRowsAtOnce = C::kThreads / kRowChunks;
    const int chunk = threadIdx.x % kRowChunks, num_rows = piece.num_rows;
    constexpr int kElementBytes = sizeof(typename C::T);
    const int there = max(0, min(16, p.head_dim * kElementBytes - chunk * 16));
    const Divisor& group = args_.heads.group;
    const int64_t token_bytes = p.query_strides.token * kElementBytes,
                  head_bytes = p.query_strides.head * kElementBytes;
    const int packed = piece.entry.first_row + static_cast<int>(threadIdx.x) / kRowChunks;
    const int token = group.quotient(packed);
    int head = packed - token * group.value;  // head within the group
    const unsigned char* from = static_cast<const unsigned char*>(p.query) +
                                (piece.entry.q_begin + token) * token_bytes +
                                (piece.head * group.value + head) * head_bytes + chunk * 16;
    const int tokens_on = group.quotient(kRowsAtOnce), heads_on = kRowsAtOnce - tokens_on * group.value;
    const int64_t bytes_on = tokens_on * token_bytes + heads_on * head_bytes;
    const int64_t wrap_bytes = token_bytes - group.value * head_bytes;
    auto copy_rows = [&](auto copy) {
#pragma unroll 4
      for (int row = threadIdx.x / kRowChunks; row < C::kRows; row += kRowsAtOnce) {
        copy(query() + chunk_place<C>(row, chunk), from, row < num_rows ? there : 0);
        from += bytes_on;
        head += heads_on;
        if (head >= group.value) {
          head -= group.value;
          from += wrap_bytes;
        }
      }
    };
    if (args_.query_bytes == 16)
      copy_rows([](unsigned char* dst, const unsigned char* src, int bytes) {
        ptx::cp_async_16(ptx::smem_address(dst), src, bytes);
      });
    else
      copy_rows([this](unsigned char* dst, const unsigned char* src, int bytes) {
        copy_unaligned<kElementBytes>(dst, src, bytes, args_.query_bytes);
      });
    if constexpr (C::kScaledQuery) {
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
#pragma unroll 1
      for (int row = threadIdx.x / kRowChunks; row < C::kRows; row += kRowsAtOnce) scale_query<kRowChunks>(row, chunk);
    }
  }
  __device__ unsigned char* query() const { return smem_ + C::kQuery; }
  __device__ float* query_scales() const { return reinterpret_cast<float*>(smem_ + C::kQueryScales); }

  // The stage's tile pair, converted and laid out for ldmatrix.
  __device__ void convert_tile(int stage) {
    for_cache_type(args_.p.cache_dtype, [&](auto type) { convert_tile<decltype(type)::value>(stage); });
    __syncthreads();
  }

  // K for the tensor cores; V follows kValuesBehind behind.
  static constexpr int kValuesBehind = C::kConvertsTiles ? C::kTileBytes : C::kStageBytes / 2;
  __device__ uint32_t tile_address(int stage) const {
    return ptx::smem_address(C::kConvertsTiles ? smem_ + C::kConverted : stage_data(stage));
  }
  __device__ unsigned char* stage_data(int stage) const { return smem_ + C::kStages + stage * C::kStageBytes; }
  __device__ float* scales(int stage) const {
    return reinterpret_cast<float*>(smem_ + C::kStages + args_.stages * C::kStageBytes + stage * C::kScaleBytes);
  }

 private:
  __device__ static uint32_t chunk() { return threadIdx.x % kRowChunks; }
  // The rows of this thread, 0 to kThreadRows - 1.
  __device__ static int row_of(int i) {
    const int warp_row = kWarpLoadsItsKeys ? threadIdx.x / 32 * C::kWarpKeys : 0;
    return warp_row + (i / kRunRows * kRunsAtOnce + threadIdx.x % kCopyThreads / kRowChunks) * kRunRows + i % kRunRows;
  }
  // Of a run, the key whose block this thread has.
  __device__ static int own_row(int run) { return row_of(run * kRunRows + threadIdx.x % kRunRows); }
  __device__ int slot_of(int key) const { return key - args_.block.quotient(key) * args_.block.value; }

  // An id of no block becomes that of the last one.
  __device__ int block_of(const Blocks& blocks, int run) const {
    return min(static_cast<unsigned>(blocks.of_run[run]), args_.last_block);
  }

  // Of this thread's chunk of a key; its value lies kStageBytes / 2 behind.
  __device__ __forceinline__ unsigned char* place(int stage, int row) const {
    return stage_data(stage) + row * C::kCacheRowBytes + ((chunk() ^ swizzle_of(row)) << 4);
  }
  __device__ __forceinline__ static int swizzle_of(int row) {
    return !C::kTensorCores || C::kConvertsTiles ? 0 : C::kReadsBytes ? byte_swizzle<C>(row) : row & 7;
  }
  // Of the row `i` behind one that is a multiple of kRunRows and whose place is `to0`.
  __device__ __forceinline__ static uint32_t place_after(uint32_t to0, int i) {
    return (to0 ^ swizzle_of(i) << 4) + i * C::kCacheRowBytes;
  }

  // A plain tile.  The keys of a run lie in one block.
  __device__ __forceinline__ void load_runs(const PieceView& view, const Piece& piece, int stage, int tile,
                                            const Blocks& blocks) const {
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      const int row0 = row_of(run * kRunRows), slot = slot_of(tile * C::kKeys + row0), block = block_of(blocks, run);
      const unsigned char* key = view.keys + chunk() * 16 + block * args_.key_bytes.block + slot * args_.key_bytes.slot;
      const unsigned char* value =
          view.values + chunk() * 16 + block * args_.value_bytes.block + slot * args_.value_bytes.slot;
      const uint32_t to0 = ptx::smem_address(place(stage, row0));
#pragma unroll
      for (int i = 0; i < kRunRows; ++i) {
        const uint32_t to = place_after(to0, i);
        ptx::cp_async_16(to, key);
        ptx::cp_async_16(to + C::kStageBytes / 2, value);
        key += args_.key_bytes.slot;
        value += args_.value_bytes.slot;
      }
      if (C::kQuantized && chunk() < kRunRows)
        load_scales(piece.head, stage, row0 + chunk(), true, block, slot + chunk());
    }
  }

  // The keys of a run lie anywhere: a thread works out where one of them lies, counted in chunks, and hears of the
  // others from its neighbours.  kPartial: some keys may not be seen, and p.head_dim may be less than kHeadDim.
  template <bool kPartial>
  __device__ __forceinline__ void load_keys(const PieceView& view, const Piece& piece, int stage, int tile,
                                            const Blocks& blocks) const {
    constexpr uint32_t kUnseen = ~0u;
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      const int own = own_row(run), position = tile * C::kKeys + own, slot = slot_of(position);
      const int block = block_of(blocks, run);
      const bool own_seen = !kPartial || position >= piece.span.key_begin && position < piece.span.key_end;
      uint32_t own_key = (block * args_.key_bytes.block + slot * args_.key_bytes.slot) / 16;
      uint32_t own_value = (block * args_.value_bytes.block + slot * args_.value_bytes.slot) / 16;
      if (!own_seen) own_key = kUnseen;
      const uint32_t to0 = ptx::smem_address(place(stage, row_of(run * kRunRows)));
#pragma unroll
      for (int i = 0; i < kRunRows; ++i) {
        const uint32_t to = place_after(to0, i), chunks = __shfl_sync(~0u, own_key, i, kRunRows);
        const unsigned char* key = view.keys + uint64_t{chunks + chunk()} * 16;
        const unsigned char* value = view.values + uint64_t{__shfl_sync(~0u, own_value, i, kRunRows) + chunk()} * 16;
        if constexpr (kPartial) {
          const bool read = chunks != kUnseen && chunk() * 16 < args_.p.head_dim * C::kCacheElementBytes;
          ptx::cp_async_16(to, key, read ? 16 : 0);
          ptx::cp_async_16(to + C::kStageBytes / 2, value, read ? 16 : 0);
        } else {
          ptx::cp_async_16(to, key);
          ptx::cp_async_16(to + C::kStageBytes / 2, value);
        }
      }
      if (C::kQuantized && chunk() < kRunRows) load_scales(piece.head, stage, own, own_seen, block, slot);
    }
  }
  __device__ void load_unaligned_keys(const PieceView& view, const Piece& piece, int stage, int tile,
                                      const Blocks& blocks) const {
    const int there = min(16, args_.p.head_dim * C::kCacheElementBytes -
                                  static_cast<int>(chunk()) * 16);  // the rest of kHeadDim becomes 0
    const KeySpan& span = piece.span;
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
#pragma unroll 1
      for (int i = 0; i < kRunRows; ++i) {
        const int row = row_of(run * kRunRows + i), key = tile * C::kKeys + row, slot = slot_of(key);
        const int block = __shfl_sync(~0u, block_of(blocks, run), i, kRunRows);
        const bool seen = key >= span.key_begin && key < span.key_end, read = seen && there > 0;
        const int64_t from_key = block * args_.key_bytes.block + slot * args_.key_bytes.slot;
        const int64_t from_value = block * args_.value_bytes.block + slot * args_.value_bytes.slot;
        unsigned char* to = place(stage, row);
        auto copy = [&](unsigned char* dst, const unsigned char* src) {
          copy_unaligned<C::kCacheElementBytes>(dst, read ? src : nowhere(), read ? there : 0, args_.cache_bytes);
        };
        copy(to, view.keys + chunk() * 16 + from_key);
        copy(to + C::kStageBytes / 2, view.values + chunk() * 16 + from_value);
        if (C::kQuantized && chunk() == i) load_scales(piece.head, stage, row, seen, block, slot);
      }
    }
  }
  __device__ const unsigned char* nowhere() const { return static_cast<const unsigned char*>(args_.p.key_cache); }

  // The scales of a row where they differ from token to token; 0 for a row that is not seen.
  __device__ void load_scales(int head, int stage, int row, bool seen, int block, int slot) const {
    float* to = scales(stage) + row;
    for (const ScaleView* scale : {&args_.p.k_scale, &args_.p.v_scale}) {
      const BlockStrides& s = scale->strides;
      if (scale->per_token())
        ptx::cp_async_4(ptx::smem_address(to),
                        scale->data + (seen ? block * s.block + slot * s.slot + head * s.head : 0), seen ? 4 : 0);
      to += C::kKeys;
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
    const unsigned char* from = stage_data(stage);
#pragma unroll
    for (int value = 0; value < 2; ++value) {
#pragma unroll 4
      for (int i = threadIdx.x % C::kThreads; i < C::kKeys * kUnits; i += C::kThreads) {  // %: their number is known
        const int row = value * C::kKeys + i / kUnits, unit = i % kUnits;
        const uint2 raw = *reinterpret_cast<const uint2*>(from + row * C::kHeadDim + unit * 8);
        const uint2 low = widen4<kType>(raw.x), high = widen4<kType>(raw.y);
        *reinterpret_cast<uint4*>(smem_ + C::kConverted + swizzled(row, unit, C::kRowBytes)) =
            make_uint4(low.x, low.y, high.x, high.y);
      }
    }
  }

  const KernelArgs& args_;
  unsigned char* smem_;
};

}  // namespace paged_attn::mma
