// copy_blocks and swap_blocks: whole blocks, as bytes.
#include <cstring>
#include <unordered_set>

#include "kernels.h"
#include "parallel.h"

namespace paged_attn::cpu {
namespace {

char* block_at(const BlockArray& a, int64_t id) { return static_cast<char*>(a.data) + id * a.block_stride; }

// f(offset, row) for the contiguous rows of a block: where each starts, and its number.
template <class F>
void each_row(const BlockShape& s, const F& f) {
  if (s.bytes() == 0) return;
  int64_t row = 0;
  for (int64_t i = 0; i < s.sizes[0]; ++i)
    for (int64_t j = 0; j < s.sizes[1]; ++j)
      for (int64_t k = 0; k < s.sizes[2]; ++k) f(i * s.strides[0] + j * s.strides[1] + k * s.strides[2], row++);
}

void pack(const BlockArray& from, int64_t id, char* packed) {
  const int64_t bytes = from.shape.row_bytes;
  each_row(from.shape,
           [&](int64_t offset, int64_t row) { std::memcpy(packed + row * bytes, block_at(from, id) + offset, bytes); });
}

void unpack(const char* packed, const BlockArray& to, int64_t id) {
  const int64_t bytes = to.shape.row_bytes;
  each_row(to.shape,
           [&](int64_t offset, int64_t row) { std::memcpy(block_at(to, id) + offset, packed + row * bytes, bytes); });
}

void copy_block(const BlockArray& from, int64_t source, const BlockArray& to, int64_t destination) {
  const BlockShape &s = from.shape, &d = to.shape;
  if (s.bytes() == 0) return;
  const char* in = block_at(from, source);
  char* out = block_at(to, destination);
  for (int64_t i = 0; i < s.sizes[0]; ++i)
    for (int64_t j = 0; j < s.sizes[1]; ++j)
      for (int64_t k = 0; k < s.sizes[2]; ++k)
        std::memcpy(out + i * d.strides[0] + j * d.strides[1] + k * d.strides[2],
                    in + i * s.strides[0] + j * s.strides[1] + k * s.strides[2], s.row_bytes);
}

}  // namespace

void swap_blocks(const std::vector<BlockArray>& src, const std::vector<BlockArray>& dst, const int64_t* pairs,
                 int64_t num_pairs, Overlap overlap) {
  // Sources that may be overwritten are set aside before anything is written.
  std::unordered_set<int64_t> written;
  if (overlap == Overlap::kOnePool)
    for (int64_t i = 0; i < num_pairs; ++i) written.insert(pairs[2 * i + 1]);
  constexpr int64_t kStays = -1;
  std::vector<int64_t> aside_index(num_pairs, kStays), aside_pairs;
  for (int64_t i = 0; i < num_pairs; ++i) {
    if (overlap != Overlap::kOther && written.count(pairs[2 * i]) == 0) continue;
    aside_index[i] = int64_t(aside_pairs.size());
    aside_pairs.push_back(i);
  }
  int64_t block_bytes = 0;
  for (const BlockArray& a : src) block_bytes = std::max(block_bytes, a.shape.bytes());
  const int64_t num_caches = int64_t(src.size()), num_aside = int64_t(aside_pairs.size());
  std::vector<char> aside(num_caches * num_aside * block_bytes);
  const auto aside_block = [&](int64_t cache, int64_t i) {
    return aside.data() + (cache * num_aside + i) * block_bytes;
  };

  const int64_t grain = 1 + 65536 / (1 + block_bytes);
  parallel_each(num_caches * num_aside, grain, [&](int64_t i) {
    const int64_t cache = i / num_aside, index = i % num_aside;
    pack(src[cache], pairs[2 * aside_pairs[index]], aside_block(cache, index));
  });
  parallel_each(num_caches * num_pairs, grain, [&](int64_t i) {
    const int64_t cache = i / num_pairs, pair = i % num_pairs, to = pairs[2 * pair + 1];
    if (aside_index[pair] == kStays)
      copy_block(src[cache], pairs[2 * pair], dst[cache], to);
    else
      unpack(aside_block(cache, aside_index[pair]), dst[cache], to);
  });
}

void copy_blocks(const std::vector<BlockArray>& caches, const int64_t* pairs, int64_t num_pairs) {
  swap_blocks(caches, caches, pairs, num_pairs, Overlap::kOnePool);
}

}  // namespace paged_attn::cpu
