// gather_kv: the tokens of paged sequences, packed one after another.
#include <algorithm>

#include "convert.cuh"
#include "launch.cuh"
#include "launchers.h"
#include "warp.cuh"

namespace paged_attn {
namespace {

constexpr int kThreads = 256;
constexpr int kPrefetchBytesAnSm = 64 << 10;

// Where an output token comes from: first its sequence (as `block`) and its position in that, then block and slot.
struct Source {
  int block, offset;  // block -1: the token is not there and becomes 0
};

struct Span {
  int length, start;
};

// A number of seq_lens, seq_starts or block_table.  kAhead: ptx::pdl_wait is still to come, so it may be an old one,
// and L1 must not keep it.
template <bool kAhead>
__device__ __forceinline__ int load(const int32_t* p) {
  return kAhead ? __ldcg(p) : *p;
}

template <bool kAhead>
__device__ __forceinline__ Span span_of(const GatherParams& p, int seq) {
  if (seq >= p.num_seqs) return {0, 0};
  return {max(load<kAhead>(p.seq_lens + seq * p.seq_lens_stride), 0),
          p.seq_starts ? load<kAhead>(p.seq_starts + seq * p.seq_starts_stride) : 0};
}

// Sequence (as `block`) and position of row `first + threadIdx.x` of the packed output, found inside one warp: up to 32
// sequences.
template <bool kAhead>
__device__ Source find_row(const GatherParams& p, int first) {
  const Span span = span_of<kAhead>(p, threadIdx.x % 32);
  const int end = warp_inclusive_sum(span.length), shift = span.start - (end - span.length), row = first + threadIdx.x;
  int seq = 0;  // how many sequences end at or before the row
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    if (__shfl_sync(0xffffffffu, end, seq + step - 1) <= row) seq += step;
  const int position = row + __shfl_sync(0xffffffffu, shift, seq);
  return __shfl_sync(0xffffffffu, end, seq) > row ? Source{seq, position} : Source{-1, 0};
}

// The same for all rows of the CTA's tile, `first .. first + count - 1`, by a scan over seq_lens up to their end.
template <bool kAhead>
__device__ Source find_rows(const GatherParams& p, int first, int count, Source* rows) {
  __shared__ int warp_sums[kThreads / 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x < count) rows[threadIdx.x] = {-1, 0};
  int base = 0;
  for (int chunk = 0; chunk < p.num_seqs && base < first + count; chunk += kThreads) {
    const Span span = span_of<kAhead>(p, chunk + threadIdx.x);
    int end = warp_inclusive_sum(span.length);
    if (lane == 31) warp_sums[warp] = end;
    __syncthreads();
    int total = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) {
      if (w < warp) end += warp_sums[w];
      total += warp_sums[w];
    }
    end += base;
    base += total;
    // The warp writes the rows of each of its sequences that reach into the tile.
    const int begin = end - span.length, low = max(begin, first), high = min(end, first + count);
    for (unsigned left = __ballot_sync(0xffffffffu, low < high); left != 0; left &= left - 1) {
      const int from = __ffs(left) - 1;
      const int row = __shfl_sync(0xffffffffu, low, from), stop = __shfl_sync(0xffffffffu, high, from);
      const int shift = __shfl_sync(0xffffffffu, span.start - begin, from);
      for (int r = row + lane; r < stop; r += 32) rows[r - first] = {chunk + warp * 32 + from, r + shift};
    }
    __syncthreads();
  }
  __syncthreads();
  return threadIdx.x < count ? rows[threadIdx.x] : Source{-1, 0};
}

// Block and offset of the tile's tokens.
template <bool kAhead>
__device__ void locate_tile(const GatherParams& p, int first, int count, Source* sources) {
  const Source at = p.num_seqs <= 32 ? find_row<kAhead>(p, first) : find_rows<kAhead>(p, first, count, sources);
  if (threadIdx.x < count) {
    const int column = at.offset / p.block_size;
    int block = -1;
    if (at.block >= 0 && at.offset >= 0 && column < p.max_blocks)
      block = load<kAhead>(p.block_table + at.block * p.block_table_stride + column);
    sources[threadIdx.x] = {block < p.num_blocks ? block : -1, at.offset % p.block_size};
  }
  __syncthreads();
}

// Eight elements of a row as they are.
template <int kElementBytes>
struct Plain {
  using In = Piece<kElementBytes>;
  static constexpr int kInBytes = kElementBytes, kOutBytes = kElementBytes;
  static __device__ In convert(const In& in, float) { return in; }
};

template <class Cache, class Out>
struct Dequantized {
  using In = Piece<1>;
  static constexpr int kInBytes = 1, kOutBytes = sizeof(Out);
  static __device__ Piece<sizeof(Out)> convert(const In& in, float scale) {
    float v[8];
    dequantize(in, Cache{}, v);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] *= scale;
    return from_float(v, Out{});
  }
};

__device__ __forceinline__ int64_t row_offset(const BlockStrides& s, Source at, int head) {
  return at.block * s.block + at.offset * s.slot + head * s.head;
}

__device__ __forceinline__ float scale_at(const ScaleView& scales, Source at, int head) {
  return scales.data ? scales.data[row_offset(scales.strides, at, head)] : 1.0f;
}

// Brings the rows of a tile into L2 ahead of ptx::pdl_wait, from where they lie as far as is known by then.
template <class Format>
__device__ void prefetch_tile(const GatherParams& p, int first, int count, Source* sources) {
  locate_tile<true>(p, first, count, sources);
  const int pieces = p.num_kv_heads * (p.head_dim / 8), columns = min(pieces, kThreads);
  for (int piece = threadIdx.x % columns; piece < pieces; piece += columns) {
    const int head = piece / (p.head_dim / 8), element = piece % (p.head_dim / 8) * 8;
    const auto* key = static_cast<const char*>(p.key_cache) + (head * p.key_strides.head + element) * Format::kInBytes;
    const auto* value =
        static_cast<const char*>(p.value_cache) + (head * p.value_strides.head + element) * Format::kInBytes;
    for (int row = threadIdx.x / columns; row < count; row += kThreads / columns) {
      const Source at = sources[row];
      if (at.block < 0) continue;
      prefetch_sector(key + row_offset(p.key_strides, at, 0) * Format::kInBytes);
      prefetch_sector(value + row_offset(p.value_strides, at, 0) * Format::kInBytes);
    }
  }
  __syncthreads();
}

// Tokens that a thread has in flight, and output tokens of a CTA at most.
template <class Format, bool kAligned>
constexpr int kTokensInFlight = kAligned && Format::kInBytes > 1 ? 8 : 4;
template <class Format, bool kAligned>
constexpr int kMaxTile = 4 * kTokensInFlight<Format, kAligned>;

// A CTA packs `tile` tokens.  Thread (x, y) takes the x-th eight elements of every token y, y + rows, ..., K and V.
// Bounds of one CTA a multiprocessor: else the compiler saves registers and waits for loads one by one.
template <class Format, bool kAligned>
__global__ void __launch_bounds__(kThreads, 1)
    gather_kernel(const __grid_constant__ GatherParams p, int tile, int prefetching_ctas, bool key_aligned,
                  bool value_aligned) {
  constexpr int kTokens = kTokensInFlight<Format, kAligned>;
  __shared__ Source sources[kMaxTile<Format, kAligned>];
  ptx::pdl_launch_dependents();
  const int first = blockIdx.x * tile, count = min(tile, p.num_tokens - first);
  if (Format::kInBytes > 1 && blockIdx.x < prefetching_ctas)
    prefetch_tile<Format>(p, first, min(count, kTokens), sources);
  ptx::pdl_wait();
  locate_tile<false>(p, first, count, sources);

  const int pieces = p.num_kv_heads * (p.head_dim / 8);
  const int columns = min(pieces, kThreads), rows = kThreads / columns;
  const int y = threadIdx.x / columns;
  if (y >= rows) return;
  const int64_t out_stride = int64_t{pieces} * 8 * Format::kOutBytes;
  for (int piece = threadIdx.x % columns; piece < pieces; piece += columns) {
    const int head = piece / (p.head_dim / 8), element = piece % (p.head_dim / 8) * 8;
    const auto* key = static_cast<const char*>(p.key_cache) + element * Format::kInBytes;
    const auto* value = static_cast<const char*>(p.value_cache) + element * Format::kInBytes;
    char* out_key = static_cast<char*>(p.key) + first * out_stride + int64_t{piece} * 8 * Format::kOutBytes;
    char* out_value = static_cast<char*>(p.value) + first * out_stride + int64_t{piece} * 8 * Format::kOutBytes;
    for (int row = y; row < count; row += rows * kTokens) {
      typename Format::In keys[kTokens], values[kTokens];
      float k_scales[kTokens], v_scales[kTokens];
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        keys[i] = values[i] = {};
        k_scales[i] = v_scales[i] = 1.0f;
        if (row + i * rows >= count) continue;
        const Source at = sources[row + i * rows];
        if (at.block < 0) continue;
        keys[i] = load_piece<Format::kInBytes>(key + row_offset(p.key_strides, at, head) * Format::kInBytes,
                                               kAligned || key_aligned);
        values[i] = load_piece<Format::kInBytes>(value + row_offset(p.value_strides, at, head) * Format::kInBytes,
                                                 kAligned || value_aligned);
        if (Format::kInBytes == 1) {
          k_scales[i] = scale_at(p.k_scale, at, head);
          v_scales[i] = scale_at(p.v_scale, at, head);
        }
      }
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        if (row + i * rows >= count) continue;
        const int64_t to = (row + i * rows) * out_stride;
        store_piece(out_key + to, Format::convert(keys[i], k_scales[i]), true);
        store_piece(out_value + to, Format::convert(values[i], v_scales[i]), true);
      }
    }
  }
}

template <class Format>
void launch(const GatherParams& p, cudaStream_t stream) {
  const bool key_aligned = rows_aligned(p.key_cache, p.key_strides, p.cache_dtype);
  const bool value_aligned = rows_aligned(p.value_cache, p.value_strides, p.cache_dtype);
  const auto launch_as = [&](auto kernel, int max_tile) {
    // Tiles small enough for two CTAs on every multiprocessor.
    const int ctas = 2 * current_device().sm_count;
    const int tile = std::clamp((p.num_tokens + ctas - 1) / ctas, 1, max_tile);
    const int prefetched = std::min(tile, max_tile / 4) * p.num_kv_heads * p.head_dim * 2 * Format::kInBytes;
    launch_pdl(kernel, dim3((p.num_tokens + tile - 1) / tile), dim3(kThreads), stream, p, tile,
               prefetching_ctas(prefetched, kPrefetchBytesAnSm), key_aligned, value_aligned);
  };
  key_aligned&& value_aligned ? launch_as(gather_kernel<Format, true>, kMaxTile<Format, true>)
                              : launch_as(gather_kernel<Format, false>, kMaxTile<Format, false>);
}

}  // namespace

void launch_gather_kv(const GatherParams& p, cudaStream_t stream) {
  if (p.num_tokens == 0) return;
  if (is_quantized(p.cache_dtype))
    dispatch_quantized(p.cache_dtype, [&](auto cache_tag) {
      dispatch_float(p.out_dtype,
                     [&](auto tag) { launch<Dequantized<decltype(cache_tag), decltype(tag)>>(p, stream); });
    });
  else if (element_size(p.cache_dtype) == 2)
    launch<Plain<2>>(p, stream);
  else
    launch<Plain<4>>(p, stream);
}

}  // namespace paged_attn
