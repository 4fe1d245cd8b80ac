// The attention kernels, in portable vector code.  A source file for each instruction set includes this one with
// PAGED_ATTN_ISA and PAGED_ATTN_LANES set.
#include <cmath>

#include "attention.h"
#include "simd.h"

namespace paged_attn::cpu::PAGED_ATTN_ISA {

constexpr int kStripRows = 6;  // rows whose accumulators stay in registers
constexpr int kStripVecs = kLanes == 8 ? 2 : 4;

// scores[r][key] = sum over d of query[r][d] x keys[d][key], d in order: the same bits for any number of rows.
template <int kRows>
void score_strip(const float* query, const float* keys, float* scores, int head_dim) {
  for (int key = 0; key < kTileKeys; key += kStripVecs * kLanes) {
    Vec sum[kRows][kStripVecs] = {};
    for (int d = 0; d < head_dim; ++d) {
      Vec k[kStripVecs];
#pragma GCC unroll 8
      for (int v = 0; v < kStripVecs; ++v) k[v] = load(keys + d * kTileKeys + key + v * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Vec q = splat(query[r * padded(head_dim) + d]);
#pragma GCC unroll 8
        for (int v = 0; v < kStripVecs; ++v) sum[r][v] += q * k[v];
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kStripVecs; ++v) store(scores + r * kTileKeys + key + v * kLanes, sum[r][v]);
  }
}

// acc[r][d] += sum over keys [begin, end) of weights[r][key] x values[key][first_d + d], keys in order.
template <int kRows, int kVecs, class V>
void add_values(const float* weights, const V* const* values, int first_d, KeyRange keys, float* acc, int stride) {
  Vec sum[kRows][kVecs];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) sum[r][v] = load(acc + r * stride + v * kLanes);
  for (int key = keys.begin; key < keys.end; ++key) {
    Vec value[kVecs];
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) value[v] = load(values[key] + first_d + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec w = splat(weights[r * kTileKeys + key]);
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) sum[r][v] += w * value[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) store(acc + r * stride + v * kLanes, sum[r][v]);
}

template <int kRows, class V>
void add_values(const float* weights, const V* const* values, KeyRange keys, float* acc, int stride) {
  if (keys.begin >= keys.end) return;
  int d = 0;
  for (; d + kStripVecs * kLanes <= stride; d += kStripVecs * kLanes)
    add_values<kRows, kStripVecs>(weights, values, d, keys, acc + d, stride);
  for (; d < stride; d += kLanes) add_values<kRows, 1>(weights, values, d, keys, acc + d, stride);
}

// Calls f<rows>() with 1 <= rows <= kStripRows as a constant.
template <int kRows = kStripRows, class F>
PAGED_ATTN_INLINE void with_rows(int rows, const F& f) {
  if constexpr (kRows == 1) {
    f(std::integral_constant<int, 1>{});
  } else {
    if (rows == kRows) return f(std::integral_constant<int, kRows>{});
    with_rows<kRows - 1>(rows, f);
  }
}

PAGED_ATTN_INLINE Vec lane_numbers() {
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = float(i);
  return v;
}

// exp of one number by the vector code, so that merging is exact where it multiplies by exp(0).
inline float exp_of(float x) { return exp(splat(x))[0]; }

// total += part, as softmax states over disjoint keys.
inline void merge_partial(Partial total, Partial part, int rows, int stride) {
  for (int r = 0; r < rows; ++r) {
    if (part.sum[r] == 0.f) continue;
    float* to = total.acc + int64_t{r} * stride;
    const float* from = part.acc + int64_t{r} * stride;
    if (total.sum[r] == 0.f) {
      std::memcpy(to, from, sizeof(float) * stride);
      total.max[r] = part.max[r];
      total.sum[r] = part.sum[r];
      continue;
    }
    const float high = part.max[r] > total.max[r] ? part.max[r] : total.max[r], base = high == -kInfinity ? 0.f : high;
    const float old_weight = exp_of(total.max[r] - base), new_weight = exp_of(part.max[r] - base);
    for (int d = 0; d < stride; d += kLanes) store(to + d, load(to + d) * old_weight + load(from + d) * new_weight);
    total.sum[r] = total.sum[r] * old_weight + part.sum[r] * new_weight;
    total.max[r] = high;
  }
}

inline void clear_partial(Partial part, int rows, int stride) {
  std::memset(part.acc, 0, sizeof(float) * rows * stride);
  for (int r = 0; r < rows; ++r) {
    part.max[r] = -kInfinity;
    part.sum[r] = 0.f;
  }
}

template <class T>
void load_row(const T* from, float* to, int head_dim) {
  int d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) store(to + d, load(from + d));
  if (d < head_dim) store(to + d, load_part(from + d, head_dim - d));
}

inline void write_row(const AttentionParams& p, const QueryTile& tile, int row, Partial total) {
  const int group = p.num_heads / p.num_kv_heads, stride = padded(p.head_dim);
  const int64_t token = int64_t{tile.first_token} + (tile.first_row + row) / group;
  const int64_t head = int64_t{tile.kv_head} * group + (tile.first_row + row) % group;
  float high = total.max[row], sum = total.sum[row], weight = 1.f;
  if (p.sinks != nullptr) {
    const float sink = p.sinks[head];
    const float limit = high > sink ? high : sink;
    if (sink == kInfinity) {  // it takes all the weight
      weight = 0.f;
      sum = 1.f;
      high = sink;
    } else if (limit != -kInfinity) {
      weight = exp_of(high - limit);
      sum = sum * weight + exp_of(sink - limit);
      high = limit;
    }
  }
  if (p.lse != nullptr) p.lse[token * p.num_heads + head] = sum == 0.f ? -kInfinity : high + std::log(sum);
  const float factor = total.sum[row] == 0.f ? 0.f : weight / sum;
  float* acc = total.acc + int64_t{row} * stride;
  const int64_t place = token * p.out_strides.token + head * p.out_strides.head;
  visit_float_type(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* out = static_cast<T*>(p.out) + place;
    for (int d = 0; d < p.head_dim; ++d) out[d] = from_float<T>(acc[d] * factor);
  });
}

template <class T>
class TileKernel {
 public:
  TileKernel(const AttentionParams& p, const QueryTile& tile, int64_t end, float* scratch)
      : p_(p), tile_(tile), group_(p.num_heads / p.num_kv_heads), stride_(padded(p.head_dim)) {
    const auto take = [&](int64_t floats) { return std::exchange(scratch, scratch + floats); };
    query_ = take(int64_t{kTileRows} * stride_);
    keys_ = take(int64_t{kTileKeys} * stride_);
    values_ = take(int64_t{kTileKeys} * stride_);
    part_ = partial_at(take(partial_floats(kTileRows, p.head_dim)), kTileRows, p.head_dim);
    total_ = partial_at(take(partial_floats(kTileRows, p.head_dim)), kTileRows, p.head_dim);
    scores_ = take(kTileKeys * kStripRows);
    for (int i = 0; i < kTileKeys; ++i) value_rows_[i] = values_ + i * stride_;
    range_ = visible_keys(p, tile);
    end_ = int(std::min<int64_t>(end, range_.end));
    load_query();
  }

  void all_splits() {
    clear_partial(total_, tile_.num_rows, stride_);
    for (int split = range_.begin / kSplitKeys; split * int64_t{kSplitKeys} < end_; ++split) {
      one_split(split, part_);
      merge_partial(total_, part_, tile_.num_rows, stride_);
    }
    for (int r = 0; r < tile_.num_rows; ++r) write_row(p_, tile_, r, total_);
  }

  void one_split(int split, Partial part) {
    clear_partial(part, tile_.num_rows, stride_);
    const int64_t begin = int64_t{split} * kSplitKeys, end = std::min<int64_t>(begin + kSplitKeys, end_);
    for (int64_t first = std::max<int64_t>(begin, range_.begin / kTileKeys * kTileKeys); first < end;
         first += kTileKeys)
      one_tile(int(first), part);
  }

 private:
  void load_query() {
    for (int r = 0; r < tile_.num_rows; ++r) {
      const int row = tile_.first_row + r;
      const int64_t token = int64_t{tile_.first_token} + row / group_;
      const int64_t head = int64_t{tile_.kv_head} * group_ + row % group_;
      const int64_t place = token * p_.query_strides.token + head * p_.query_strides.head;
      visit_float_type(p_.dtype, [&](auto tag) {
        using Q = typename decltype(tag)::type;
        const Q* from = static_cast<const Q*>(p_.query) + place;
        for (int d = 0; d < p_.head_dim; ++d) query_[r * stride_ + d] = to_float(from[d]);
      });
    }
  }

  // Where the keys first + [keys.begin, keys.end) of a tile are.  Nothing else is read: other slots may hold anything,
  // other entries of the table may name any block.
  struct TileRows {
    int first = -1;
    KeyRange keys;
    const T *key[kTileKeys], *value[kTileKeys];
    float key_scale[kTileKeys], value_scale[kTileKeys];
  };

  void locate(int first, TileRows& rows) const {
    if (rows.first == first) return;
    rows.first = first;
    rows.keys = {std::max(range_.begin - first, 0), std::min(end_ - first, kTileKeys)};
    const int32_t* table = p_.block_table + tile_.seq * p_.block_table_stride;
    const int64_t head = tile_.kv_head;
    for (int i = rows.keys.begin; i < rows.keys.end;) {
      const int64_t block = table[(first + i) / p_.block_size];
      int64_t slot = (first + i) % p_.block_size;
      const T* key = static_cast<const T*>(p_.key_cache) + block * p_.key_strides.block + head * p_.key_strides.head;
      const T* value =
          static_cast<const T*>(p_.value_cache) + block * p_.value_strides.block + head * p_.value_strides.head;
      for (; slot < p_.block_size && i < rows.keys.end; ++slot, ++i) {
        rows.key[i] = key + slot * p_.key_strides.slot;
        rows.value[i] = value + slot * p_.value_strides.slot;
        if constexpr (kQuantized) {
          rows.key_scale[i] = scale_at(p_.k_scale, block, slot, head);
          rows.value_scale[i] = scale_at(p_.v_scale, block, slot, head);
        }
      }
    }
  }

  void one_tile(int first, Partial part) {
    // Read this tile while the next one is on its way from memory.
    TileRows &now = located_[first / kTileKeys % 2], &next = located_[(first / kTileKeys + 1) % 2];
    locate(first, now);
    locate(first + kTileKeys, next);
    load_keys(now, next);
    if (tile_.num_rows <= kStripRows && p_.head_dim == stride_) {
      all_strips(now, now.value, part);
    } else {
      load_values(now);
      all_strips(now, value_rows_, part);
    }
  }

  template <class V>
  void all_strips(const TileRows& tile, const V* const* values, Partial part) {
    for (int r = 0; r < tile_.num_rows; r += kStripRows) {
      const int rows = std::min(kStripRows, tile_.num_rows - r);
      with_rows(rows, [&](auto constant) { one_strip<constant.value>(tile, values, r, part); });
    }
  }

  void prefetch_row(const T* row) const {
    constexpr int kLineElements = 64 / sizeof(T);
    for (int d = 0; d < p_.head_dim; d += kLineElements) __builtin_prefetch(row + d, 0, 2);
  }

  void load_keys(const TileRows& now, const TileRows& next) {
    const KeyRange keys = now.keys;
    for (int i = keys.begin / kLanes * kLanes; i < keys.end; i += kLanes) {
      for (int j = std::max(i, next.keys.begin); j < std::min(i + kLanes, next.keys.end); ++j) {
        prefetch_row(next.key[j]);
        prefetch_row(next.value[j]);
      }
      const bool whole = i >= keys.begin && i + kLanes <= keys.end;
      for (int d = 0; d < p_.head_dim; d += kLanes) {
        Vec block[kLanes];
        if (whole && d + kLanes <= p_.head_dim) {
#pragma GCC unroll 16
          for (int j = 0; j < kLanes; ++j) block[j] = load(now.key[i + j] + d);
        } else {
          for (int j = 0; j < kLanes; ++j) {
            const bool valid = i + j >= keys.begin && i + j < keys.end;
            block[j] = valid ? load_part(now.key[i + j] + d, std::min(kLanes, p_.head_dim - d)) : Vec{};
          }
        }
        transpose(block);
#pragma GCC unroll 16
        for (int j = 0; j < kLanes; ++j) store(keys_ + (d + j) * kTileKeys + i, block[j]);
      }
    }
  }

  void load_values(const TileRows& tile) {
    for (int i = tile.keys.begin; i < tile.keys.end; ++i) load_row(tile.value[i], values_ + i * stride_, p_.head_dim);
  }

  KeyRange row_keys(int row, int first) const {
    const KeyRange keys = visible_keys(p_, (tile_.first_row + row) / group_, tile_.num_queries, tile_.seq_len);
    return {std::max(keys.begin - first, 0), std::min(keys.end - first, kTileKeys)};
  }

  // `values`: rows of V, where they are stored or converted.
  template <int kRows, class V>
  void one_strip(const TileRows& tile, const V* const* values, int r, Partial part) {
    KeyRange keys[kRows], common{0, kTileKeys}, any{kTileKeys, 0};
    for (int i = 0; i < kRows; ++i) {
      keys[i] = row_keys(r + i, tile.first);
      common = {std::max(common.begin, keys[i].begin), std::min(common.end, keys[i].end)};
      if (keys[i].begin < keys[i].end) any = {std::min(any.begin, keys[i].begin), std::max(any.end, keys[i].end)};
    }
    if (any.begin >= any.end) return;
    score_strip<kRows>(query_ + r * stride_, keys_, scores_, p_.head_dim);
    for (int i = 0; i < kRows; ++i)
      if (keys[i].begin < keys[i].end) soften(tile, r + i, keys[i], scores_ + i * kTileKeys, part);

    // Each row multiplies the values of the keys that it sees, and no others, in their order.
    float* acc = part.acc + int64_t{r} * stride_;
    if (common.begin >= common.end) {
      for (int i = 0; i < kRows; ++i) add_row(i, values, keys[i], acc);
      return;
    }
    for (int i = 0; i < kRows; ++i) add_row(i, values, {keys[i].begin, common.begin}, acc);
    add_values<kRows>(scores_, values, common, acc, stride_);
    for (int i = 0; i < kRows; ++i) add_row(i, values, {common.end, keys[i].end}, acc);
  }

  template <class V>
  void add_row(int i, const V* const* values, KeyRange keys, float* acc) {
    add_values<1>(scores_ + i * kTileKeys, values, keys, acc + int64_t{i} * stride_, stride_);
  }

  // Raw scores of a row to weights exp(score - max), with the row's state brought up to date.
  void soften(const TileRows& tile, int row, KeyRange keys, float* scores, Partial part) {
    constexpr int kVecs = kTileKeys / kLanes;
    const int query_row = tile_.first_row + row;
    const Vec lanes = lane_numbers();
    Vec s[kVecs], high = splat(-kInfinity);
    const float slope = p_.alibi_slopes == nullptr ? 0.f : p_.alibi_slopes[tile_.kv_head * group_ + query_row % group_];
    const float distance = float(tile.first - (tile_.seq_len - tile_.num_queries + query_row / group_));
    for (int v = 0; v < kVecs; ++v) {
      s[v] = load(scores + v * kLanes) * p_.scale;
      if constexpr (kQuantized) s[v] *= load(tile.key_scale + v * kLanes);
      if (p_.softcap > 0.f) s[v] = p_.softcap * tanh(s[v] / p_.softcap);
      const Vec index = lanes + float(v * kLanes);
      if (p_.alibi_slopes != nullptr) s[v] += slope * (index + distance);
      const VecI32 visible = (index >= float(keys.begin)) & (index < float(keys.end));
      s[v] = visible ? s[v] : splat(-kInfinity);
      high = max(high, s[v]);
    }
    const float old_max = part.max[row], tile_max = reduce_max(high);
    const float new_max = tile_max > old_max ? tile_max : old_max;
    const float base = new_max == -kInfinity ? 0.f : new_max;
    Vec sums{};
    for (int v = 0; v < kVecs; ++v) {
      Vec weight = exp(s[v] - base);
      sums += weight;
      if constexpr (kQuantized) weight *= load(tile.value_scale + v * kLanes);
      store(scores + v * kLanes, weight);
    }
    const float sum = reduce_sum(sums);
    if (new_max > old_max && part.sum[row] != 0.f) {
      const float factor = exp_of(old_max - new_max);
      float* acc = part.acc + int64_t{row} * stride_;
      for (int d = 0; d < stride_; d += kLanes) store(acc + d, load(acc + d) * factor);
      part.sum[row] = part.sum[row] * factor + sum;
    } else {
      part.sum[row] += sum;
    }
    part.max[row] = new_max;
  }

  static constexpr bool kQuantized = sizeof(T) == 1;

  const AttentionParams& p_;
  const QueryTile& tile_;
  const int group_, stride_;
  const float* value_rows_[kTileKeys];
  TileRows located_[2];
  int end_;         // of the keys to work on
  KeyRange range_;  // keys that any row sees
  float* query_;    // [rows, stride]
  float* keys_;     // [stride, kTileKeys]
  float* values_;   // [kTileKeys, stride]
  float* scores_;   // [kStripRows, kTileKeys]
  Partial part_, total_;
};

template <class T>
void attend(const AttentionParams& p, const QueryTile& tile, float* scratch) {
  TileKernel<T>(p, tile, tile.seq_len, scratch).all_splits();
}

template <class T>
void attend_split(const AttentionParams& p, const QueryTile& tile, int split, float* scratch, Partial result) {
  TileKernel<T>(p, tile, (int64_t{split} + 1) * kSplitKeys, scratch).one_split(split, result);
}

inline void finish(const AttentionParams& p, const QueryTile& tile, float* partials, int num_splits) {
  const int64_t step = partial_floats(tile.num_rows, p.head_dim);
  const Partial total = partial_at(partials, tile.num_rows, p.head_dim);
  for (int i = 1; i < num_splits; ++i) {
    merge_partial(total, partial_at(partials + i * step, tile.num_rows, p.head_dim), tile.num_rows, padded(p.head_dim));
  }
  for (int r = 0; r < tile.num_rows; ++r) write_row(p, tile, r, total);
}

AttentionKernels kernels(DType cache_dtype) {
  AttentionKernels result{};
  visit_type(cache_dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    result = {attend<T>, attend_split<T>, finish};
  });
  return result;
}

}  // namespace paged_attn::cpu::PAGED_ATTN_ISA
