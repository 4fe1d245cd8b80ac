#include <vector>

#include "../errors.h"
#include "kernels.h"
#include "parallel.h"
#include "types.h"

namespace paged_attn::cpu {
namespace {

struct Token {
  int64_t block, offset;
};

// Where each row of the result comes from.
std::vector<Token> source_tokens(const GatherParams& p) {
  std::vector<Token> tokens;
  tokens.reserve(p.num_tokens);
  const int64_t capacity = int64_t{p.max_blocks} * p.block_size;
  for (int64_t seq = 0; seq < p.num_seqs; ++seq) {
    const int64_t start = p.seq_starts ? p.seq_starts[seq * p.seq_starts_stride] : 0;
    const int64_t length = p.seq_lens[seq * p.seq_lens_stride];
    if (length < 0) fail("seq_lens[", seq, "]: expected 0 or more, got ", length);
    if (start < 0) fail("seq_starts[", seq, "]: expected 0 or more, got ", start);
    if (length > 0 && start + length > capacity)
      fail("seq_lens[", seq, "]: tokens ", start, " .. ", start + length - 1, " reach past the row of block_table, ",
           "which holds ", capacity);
    for (int64_t i = start; i < start + length; ++i) {
      const int64_t column = i / p.block_size;
      const int64_t block = p.block_table[seq * p.block_table_stride + column];
      if (block < 0 || block >= p.num_blocks)
        fail("block_table[", seq, ", ", column, "]: got block ", block, ", the cache has blocks 0 .. ",
             p.num_blocks - 1);
      tokens.push_back({block, i % p.block_size});
    }
  }
  if (int64_t(tokens.size()) > p.num_tokens)
    fail("seq_lens: the lengths sum to ", tokens.size(), ", the result has ", p.num_tokens, " rows");
  return tokens;
}

template <class CacheT, class T>
void gather(const GatherParams& p, const std::vector<Token>& tokens, const void* cache, const BlockStrides& strides,
            const ScaleView& scales, void* result) {
  const int64_t row_elements = int64_t{p.num_kv_heads} * p.head_dim;
  parallel_each(p.num_tokens, 1 + 32768 / row_elements, [&](int64_t i) {
    T* row = static_cast<T*>(result) + i * row_elements;
    if (i >= int64_t(tokens.size())) {
      std::memset(static_cast<void*>(row), 0, sizeof(T) * row_elements);
      return;
    }
    const auto [block, offset] = tokens[i];
    const CacheT* slot = static_cast<const CacheT*>(cache) + block * strides.block + offset * strides.slot;
    for (int64_t head = 0; head < p.num_kv_heads; ++head, row += p.head_dim) {
      const CacheT* stored = slot + head * strides.head;
      if constexpr (std::is_same_v<CacheT, T>) {
        std::memcpy(static_cast<void*>(row), stored, sizeof(T) * p.head_dim);
      } else {
        const float scale = scale_at(scales, block, offset, head);
        for (int d = 0; d < p.head_dim; ++d) row[d] = from_float<T>(to_float(stored[d]) * scale);
      }
    }
  });
}

}  // namespace

void gather_kv(const GatherParams& p) {
  const std::vector<Token> tokens = source_tokens(p);
  if (p.num_tokens == 0) return;
  visit_type(p.cache_dtype, [&](auto cache_tag) {
    visit_float_type(p.out_dtype, [&](auto tag) {
      using CacheT = typename decltype(cache_tag)::type;
      using T = typename decltype(tag)::type;
      gather<CacheT, T>(p, tokens, p.key_cache, p.key_strides, p.k_scale, p.key);
      gather<CacheT, T>(p, tokens, p.value_cache, p.value_strides, p.v_scale, p.value);
    });
  });
}

}  // namespace paged_attn::cpu
