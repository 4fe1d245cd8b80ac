// paged_attention: checks of what the tensors hold, and a plan that spreads tiles of query rows, and splits of their
// keys, over the threads.
#include "attention.h"

#include <memory>
#include <new>
#include <vector>

#include "../errors.h"
#include "kernels.h"
#include "parallel.h"

namespace paged_attn::cpu {
namespace {

AttentionKernels choose_kernels(DType cache_dtype) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return avx512::kernels(cache_dtype);
  if (avx2) return avx2::kernels(cache_dtype);
#endif
  return baseline::kernels(cache_dtype);
}

struct Sequence {
  int first_token, num_queries, seq_len;
};

std::vector<Sequence> checked_sequences(const AttentionParams& p) {
  std::vector<Sequence> seqs(p.num_seqs);
  const auto start = [&](int64_t i) { return p.cu_seqlens_q ? p.cu_seqlens_q[i * p.cu_seqlens_q_stride] : int(i); };
  if (p.cu_seqlens_q != nullptr && start(0) != 0) fail("cu_seqlens_q[0]: expected 0, got ", start(0));
  const int64_t capacity = int64_t{p.max_blocks} * p.block_size;
  for (int i = 0; i < p.num_seqs; ++i) {
    const int length = p.seq_lens[i * p.seq_lens_stride];
    if (start(i + 1) < start(i) || start(i + 1) > p.num_tokens)
      fail("cu_seqlens_q[", i + 1, "]: expected ", start(i), " .. ", p.num_tokens,
           " (the previous entry and the rows of query), got ", start(i + 1));
    if (length < 0 || length > capacity)
      fail("seq_lens[", i, "]: expected 0 .. ", capacity, " (what a row of block_table holds), got ", length);
    seqs[i] = {start(i), start(i + 1) - start(i), length};
    if (seqs[i].num_queries == 0) continue;
    const QueryTile all{i,
                        0,
                        seqs[i].first_token,
                        seqs[i].num_queries,
                        length,
                        0,
                        seqs[i].num_queries * (p.num_heads / p.num_kv_heads)};
    const KeyRange keys = visible_keys(p, all);
    if (keys.begin >= keys.end) continue;
    for (int64_t j = keys.begin / p.block_size; j * p.block_size < keys.end; ++j) {
      const int block = p.block_table[i * p.block_table_stride + j];
      if (block < 0 || block >= p.num_blocks)
        fail("block_table[", i, ", ", j, "]: got block ", block, ", the cache has blocks 0 .. ", p.num_blocks - 1);
    }
  }
  return seqs;
}

// One entry of the queue: a tile with all its splits, or one of them.
struct Item {
  int tile;
  int split;        // kAllSplits or one
  int64_t partial;  // place of the split's result
  int64_t cost;
};
constexpr int kAllSplits = -1;

constexpr std::align_val_t kCacheLine{64};
struct FloatsDeleter {
  void operator()(float* p) const { operator delete[](p, kCacheLine); }
};
using Floats = std::unique_ptr<float[], FloatsDeleter>;
Floats make_floats(int64_t count) { return Floats(new (kCacheLine) float[count]); }

struct Plan {
  std::vector<QueryTile> tiles;
  std::vector<Item> items;
  struct Merge {
    int tile, num_splits;
    int64_t partial;
  };
  std::vector<Merge> merges;  // of the tiles that are split
  int64_t partial_floats = 0, cost = 0;
};

int64_t cost_of(const QueryTile& tile, int64_t keys) { return (tile.num_rows + 8) * keys + 64; }

Plan make_plan(const AttentionParams& p, const std::vector<Sequence>& seqs, int threads) {
  Plan plan;
  const int group = p.num_heads / p.num_kv_heads;
  for (int i = 0; i < int(seqs.size()); ++i) {
    const int64_t rows = int64_t{seqs[i].num_queries} * group;
    for (int64_t row = 0; row < rows; row += kTileRows)
      for (int head = 0; head < p.num_kv_heads; ++head)
        plan.tiles.push_back({i, head, seqs[i].first_token, seqs[i].num_queries, seqs[i].seq_len, int(row),
                              int(std::min<int64_t>(kTileRows, rows - row))});
  }
  std::vector<KeyRange> ranges;
  for (const QueryTile& tile : plan.tiles) {
    ranges.push_back(visible_keys(p, tile));
    plan.cost += cost_of(tile, ranges.back().end - ranges.back().begin);
  }
  for (int t = 0; t < int(plan.tiles.size()); ++t) {
    const QueryTile& tile = plan.tiles[t];
    const int64_t cost = cost_of(tile, ranges[t].end - ranges[t].begin);
    const int first = ranges[t].begin / kSplitKeys, last = (ranges[t].end + kSplitKeys - 1) / kSplitKeys;
    if (last - first <= 1 || cost * 4 * threads <= plan.cost) {
      plan.items.push_back({t, kAllSplits, 0, cost});
      continue;
    }
    plan.merges.push_back({t, last - first, plan.partial_floats});
    for (int split = first; split < last; ++split) {
      plan.items.push_back({t, split, plan.partial_floats, cost_of(tile, kSplitKeys)});
      plan.partial_floats += partial_floats(tile.num_rows, p.head_dim);
    }
  }
  std::stable_sort(plan.items.begin(), plan.items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
  return plan;
}

}  // namespace

void paged_attention(const AttentionParams& p) {
  std::vector<Sequence> seqs = checked_sequences(p);
  if (p.num_tokens == 0) return;
  // Rows past the last sequence see nothing, as those of an empty one.
  const int used = seqs.empty() ? 0 : seqs.back().first_token + seqs.back().num_queries;
  seqs.push_back({used, p.num_tokens - used, 0});
  const AttentionKernels kernels = choose_kernels(p.cache_dtype);
  const int threads = int(torch::stable::get_num_threads());
  const Plan plan = make_plan(p, seqs, threads);

  constexpr int64_t kCostOfThreads = 20000;  // below it waking the others takes longer than the work
  const int workers = plan.cost < kCostOfThreads ? 1 : int(std::min<int64_t>(threads, plan.items.size()));
  const int64_t scratch_size = scratch_floats(p.head_dim);
  const Floats scratch = make_floats(scratch_size * workers), partials = make_floats(plan.partial_floats);
  std::fill_n(scratch.get(), scratch_size * workers, 0.f);

  parallel_queue(workers, int64_t(plan.items.size()), [&](int worker, int64_t i) {
    const Item& item = plan.items[i];
    const QueryTile& tile = plan.tiles[item.tile];
    float* memory = scratch.get() + worker * scratch_size;
    if (item.split == kAllSplits)
      kernels.attend(p, tile, memory);
    else
      kernels.attend_split(p, tile, item.split, memory,
                           partial_at(partials.get() + item.partial, tile.num_rows, p.head_dim));
  });
  parallel_each(int64_t(plan.merges.size()), 16, [&](int64_t i) {
    const Plan::Merge& merge = plan.merges[i];
    kernels.finish(p, plan.tiles[merge.tile], partials.get() + merge.partial, merge.num_splits);
  });
}

}  // namespace paged_attn::cpu
