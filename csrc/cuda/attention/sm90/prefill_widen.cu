// Prefill from 8-bit caches by the 16-bit instances: the keys and values that many query tokens will read are first
// copied in the type of the query, exactly and without their scale, to blocks in scratch memory.
#include <algorithm>
#include <climits>
#include <exception>

#include "../../convert.cuh"
#include "../../divisor.cuh"
#include "../launch.h"
#include "../paths.h"
#include "../ptx.cuh"
#include "../widen.cuh"

namespace paged_attn::sm90 {
namespace {

// A copy costs the same for a key whoever reads it.  From so many rows (query tokens x group) on that is less than
// conversion inside of the kernel costs them, which is least from fp8 with 128 columns.
int least_rows(const AttentionParams& p) {
  return p.cache_dtype != DType::kInt8 && p.head_dim > 96 && p.head_dim <= 128 ? 4096 : 2048;
}
constexpr size_t kMostBytes = size_t{512} << 20;  // of keys and values in 16 bits, and their block table
constexpr int kMostSequences = 256;

constexpr int kBlockSize = 64;            // token slots of a block of the copy, [head][slot][column]
constexpr int kThreads = 256, kCtas = 4;  // of a multiprocessor

struct WidenParams {
  AttentionParams attention;
  int least_len;                                // query tokens of a sequence that is copied
  void *key, *value;                            // [sequences, blocks, num_kv_heads, kBlockSize, head_dim]
  int32_t* block_table;                         // [num_seqs, blocks]
  int sequences, blocks;                        // blocks: of a sequence
  int item_tokens;                              // that a CTA copies at once: a power of two
  Divisor by_block_size, by_blocks, by_chunks;  // chunk: eight columns
};

// What a CTA needs of a sequence that is copied: its visible keys.
struct Source {
  int seq, begin, end;
};

// The sequences that are copied, in their order; returns how many.  By one warp.
__device__ int find_sources(const WidenParams& p, Source* sources) {
  const AttentionParams& a = p.attention;
  const int lane = threadIdx.x % 32;
  int found = 0;
  for (int first = 0; first < a.num_seqs; first += 32) {
    const int seq = first + lane;
    int q_len = 0, seq_len = 0;
    if (seq < a.num_seqs) {
      seq_len = a.seq_lens[seq * a.seq_lens_stride];
      q_len = a.cu_seqlens_q[(seq + 1) * a.cu_seqlens_q_stride] - a.cu_seqlens_q[seq * a.cu_seqlens_q_stride];
    }
    const bool mine = seq_len > 0 && q_len >= p.least_len;
    const unsigned all = __ballot_sync(~0u, mine);
    const int rank = found + __popc(all & ((1u << lane) - 1));
    if (mine && rank < p.sequences)
      sources[rank] = {seq, a.window_size > 0 ? max(0, seq_len - q_len - a.window_size + 1) : 0, seq_len};
    found += __popc(all);
  }
  return min(found, p.sequences);
}

template <class Cache, class T>
__device__ __forceinline__ void store_wide(void* copy, int64_t offset, const Piece<1>& piece, uint32_t signs) {
  float v[8];
  dequantize(piece, Cache{}, v);
  const auto [x] = from_float(v, T{});
  __stcg(reinterpret_cast<uint4*>(static_cast<T*>(copy) + offset),
         make_uint4(x[0] ^ signs, x[1] ^ signs, x[2] ^ signs, x[3] ^ signs));
}

// Eight columns of a token, of all heads.
template <class Cache, class T>
__device__ __forceinline__ void widen_token(const WidenParams& p, const Source& source, int64_t block, int token,
                                            int column) {
  const AttentionParams& a = p.attention;
  const int place = p.by_block_size.quotient(token), slot = token - place * a.block_size;
  int64_t id = -1;
  if (token >= source.begin && token < source.end && place < a.max_blocks)
    id = a.block_table[source.seq * a.block_table_stride + place];
  const bool there = id >= 0 && id < a.num_blocks;
  const char* key = static_cast<const char*>(a.key_cache) + column;
  const char* value = static_cast<const char*>(a.value_cache) + column;
  if (there) key += id * a.key_strides.block + slot * a.key_strides.slot;
  if (there) value += id * a.value_strides.block + slot * a.value_strides.slot;
  const int64_t head_stride = int64_t{kBlockSize} * a.head_dim;
  int64_t to = block * a.num_kv_heads * head_stride + token % kBlockSize * a.head_dim + column;
  constexpr int kHeads = 4;  // at once
  for (int first = 0; first < a.num_kv_heads; first += kHeads) {
    Piece<1> keys[kHeads], values[kHeads];
    uint32_t signs[kHeads];  // the largest product is to be the largest score: keys take the sign of their scale
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int head = min(first + i, a.num_kv_heads - 1);
      keys[i] = *reinterpret_cast<const Piece<1>*>(key + head * a.key_strides.head);
      values[i] = *reinterpret_cast<const Piece<1>*>(value + head * a.value_strides.head);
      signs[i] = head_scale(a.k_scale, head) < 0.f ? 0x80008000u : 0u;
      if (!there) keys[i] = values[i] = {};
    }
#pragma unroll
    for (int i = 0; i < kHeads; ++i, to += head_stride) {
      if (first + i >= a.num_kv_heads) continue;
      store_wide<Cache, T>(p.key, to, keys[i], signs[i]);
      store_wide<Cache, T>(p.value, to, values[i], 0u);
    }
  }
}

template <class Cache, class T>
__global__ void __launch_bounds__(kThreads, kCtas) widen_kernel(const __grid_constant__ WidenParams p) {
  __shared__ Source sources[kMostSequences];
  __shared__ int num_sources;
  ptx::pdl_wait();
  // Not before the wait: the next kernel reads the copy's block table through L1, and a kernel ahead that still ran
  // could leave there what lay at that address for it.
  ptx::pdl_launch_dependents();
  if (threadIdx.x < 32) {
    const int found = find_sources(p, sources);
    if (threadIdx.x == 0) num_sources = found;
  }
  __syncthreads();
  const int row = p.by_chunks.quotient(threadIdx.x), column = (threadIdx.x - row * p.by_chunks.value) * 8;
  const int items_a_block = kBlockSize / p.item_tokens, items = num_sources * p.blocks * items_a_block;
  if (row >= p.item_tokens) return;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int block = item / items_a_block, rank = p.by_blocks.quotient(block), place = block - rank * p.blocks;
    const Source source = sources[rank];
    const int first = place * kBlockSize, token = first + item % items_a_block * p.item_tokens + row;
    if (first >= source.end || first + kBlockSize <= source.begin) continue;
    if (token == first && column == 0) p.block_table[int64_t{source.seq} * p.blocks + place] = block;
    widen_token<Cache, T>(p, source, block, token, column);
  }
}

template <class T>
void launch(const WidenParams& p, cudaStream_t stream) {
  const int64_t items = int64_t{p.sequences} * p.blocks * (kBlockSize / p.item_tokens);
  const unsigned grid = static_cast<unsigned>(std::min<int64_t>(items, kCtas * current_device().sm_count));
  dispatch_quantized(p.attention.cache_dtype, [&](auto cache) {
    launch_kernel(widen_kernel<decltype(cache), T>, grid, kThreads, 0, stream, p.attention.pdl, p);
  });
}

int blocks_of_copy(const AttentionParams& p) {
  return static_cast<int>((int64_t{p.max_blocks} * p.block_size + kBlockSize - 1) / kBlockSize);
}
int sequences_of_copy(const AttentionParams& p, int least_len) {
  return std::min(p.num_seqs, p.num_tokens / least_len);
}
size_t bytes_of_copy(const AttentionParams& p, int least_len) {
  return sizeof(uint16_t) * sequences_of_copy(p, least_len) * blocks_of_copy(p) * p.num_kv_heads * kBlockSize *
         p.head_dim;
}
size_t bytes_of_table(const AttentionParams& p) { return sizeof(int32_t) * p.num_seqs * blocks_of_copy(p); }

}  // namespace

int widened_len(const AttentionParams& p) {
  if (!is_quantized(p.cache_dtype) || p.k_scale.per_token() || p.v_scale.per_token() || p.batch_invariant ||
      p.cu_seqlens_q == nullptr || p.num_seqs == 0 || p.max_blocks == 0)
    return INT_MAX;
  const int group = p.num_heads / p.num_kv_heads, least_len = std::max(1, least_rows(p) / group);
  const bool fits = sequences_of_copy(p, least_len) <= kMostSequences &&
                    2 * bytes_of_copy(p, least_len) + bytes_of_table(p) <= kMostBytes;
  return fits ? least_len : INT_MAX;
}

std::optional<AttentionParams> launch_widen(const AttentionParams& p, int least_len, Workspace& workspace,
                                            cudaStream_t stream) {
  WidenParams w;
  w.attention = p;
  w.least_len = least_len;
  w.sequences = sequences_of_copy(p, least_len);
  w.blocks = blocks_of_copy(p);
  const size_t bytes = bytes_of_copy(p, least_len);  // whole blocks: what follows is aligned, too
  try {
    w.key = workspace.scratch(2 * bytes + bytes_of_table(p));
  } catch (const std::exception&) {  // out of memory
    return std::nullopt;
  }
  w.value = static_cast<char*>(w.key) + bytes;
  w.block_table = reinterpret_cast<int32_t*>(static_cast<char*>(w.value) + bytes);
  w.by_block_size = Divisor(p.block_size);
  w.by_blocks = Divisor(w.blocks);
  w.by_chunks = Divisor(p.head_dim / 8);
  w.item_tokens = kBlockSize;
  while (w.item_tokens * (p.head_dim / 8) > kThreads) w.item_tokens /= 2;
  if (p.dtype == DType::kFloat16)
    launch<__half>(w, stream);
  else
    launch<__nv_bfloat16>(w, stream);

  AttentionParams wide = p;
  wide.cache_dtype = p.dtype;
  wide.key_cache = w.key;
  wide.value_cache = w.value;
  wide.key_strides = wide.value_strides = {int64_t{p.num_kv_heads} * kBlockSize * p.head_dim, p.head_dim,
                                           int64_t{kBlockSize} * p.head_dim};
  wide.block_table = w.block_table;
  wide.block_table_stride = w.blocks;
  wide.num_blocks = int64_t{w.sequences} * w.blocks;
  wide.block_size = kBlockSize;
  wide.max_blocks = w.blocks;
  return wide;
}

}  // namespace paged_attn::sm90
