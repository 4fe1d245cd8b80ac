// What the planner of paged_attention and the kernels for each instruction set share.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../params.h"

namespace paged_attn::cpu {

// Every sum over keys is cut at the same absolute positions, whatever the batch, so that the bits of a row depend on
// its own keys alone: tiles of kTileKeys are added up within a split, splits are merged in order.
constexpr int kTileKeys = 64;
constexpr int kSplitKeys = 512;
constexpr int kTileRows = 96;  // query rows that share the tiles of K and V
constexpr int kMaxLanes = 16;

// Query rows of one sequence and one KV head: row r is query token r / group and head r % group of the group.
struct QueryTile {
  int seq, kv_head;
  int first_token;  // of the sequence, in query and out
  int num_queries;  // tokens of the sequence
  int seq_len;
  int first_row, num_rows;
};

struct KeyRange {
  int begin, end;
};

// The keys that a row's token sees; empty ranges are {0, 0}.
inline KeyRange visible_keys(const AttentionParams& p, int token, int num_queries, int seq_len) {
  if (!p.causal) return {0, seq_len};
  const int64_t end = int64_t{seq_len} - num_queries + token + 1;
  if (end <= 0) return {0, 0};
  return {p.window_size > 0 ? int(std::max<int64_t>(0, end - p.window_size)) : 0, int(end)};
}

// The keys that any row of the tile sees: ranges move up with the token.
inline KeyRange visible_keys(const AttentionParams& p, const QueryTile& t) {
  const int group = p.num_heads / p.num_kv_heads;
  const int first = t.first_row / group, last = (t.first_row + t.num_rows - 1) / group;
  int begin = 0;
  for (int token = first; token <= last; ++token) {
    const KeyRange keys = visible_keys(p, token, t.num_queries, t.seq_len);
    if (keys.end == 0) continue;
    begin = keys.begin;
    break;
  }
  return {begin, visible_keys(p, last, t.num_queries, t.seq_len).end};
}

// Softmax over some keys, not yet normalised: sum exp(score - max) and sum exp(score - max) x value.
struct Partial {
  float* max;  // [rows]
  float* sum;  // [rows]
  float* acc;  // [rows, padded head_dim]
};
constexpr int padded(int count) { return (count + kMaxLanes - 1) / kMaxLanes * kMaxLanes; }
inline int64_t partial_floats(int rows, int head_dim) { return int64_t{rows} * padded(head_dim) + padded(2 * rows); }
inline Partial partial_at(float* data, int rows, int head_dim) {
  float* max = data + int64_t{rows} * padded(head_dim);
  return {max, max + rows, data};
}

// Memory of one thread: query rows, transposed K, V, two partial results, a strip of scores.
inline int64_t scratch_floats(int head_dim) {
  constexpr int kMaxStripRows = 8;
  return int64_t{padded(head_dim)} * (kTileRows + 2 * kTileKeys) + 2 * partial_floats(kTileRows, head_dim) +
         kTileKeys * kMaxStripRows;
}

struct AttentionKernels {
  // All splits of a tile, to the output.
  void (*attend)(const AttentionParams& p, const QueryTile& tile, float* scratch);
  // One split of a tile, to `result` of tile.num_rows rows.
  void (*attend_split)(const AttentionParams& p, const QueryTile& tile, int split, float* scratch, Partial result);
  // `num_splits` results of a tile, one after another at `partials`, to the output.
  void (*finish)(const AttentionParams& p, const QueryTile& tile, float* partials, int num_splits);
};

namespace baseline {
AttentionKernels kernels(DType cache_dtype);
}
#if defined(__x86_64__)
namespace avx2 {
AttentionKernels kernels(DType cache_dtype);
}
namespace avx512 {
AttentionKernels kernels(DType cache_dtype);
}
#endif

}  // namespace paged_attn::cpu
