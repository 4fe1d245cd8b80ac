// copy_blocks and swap_blocks: whole blocks, as bytes.
#include <cstring>
#include <unordered_set>

#include "errors.h"
#include "kernels.h"
#include "parallel.h"

namespace paged_attn::cpu {
namespace {

template <class F>
void each_row(const BlockShape& s, F&& f) {
  for (int64_t i = 0; i < s.sizes[0]; ++i)
    for (int64_t j = 0; j < s.sizes[1]; ++j)
      for (int64_t k = 0; k < s.sizes[2]; ++k) f(i * s.strides[0] + j * s.strides[1] + k * s.strides[2]);
}

char* block_at(const BlockArray& a, int64_t id) { return static_cast<char*>(a.data) + id * a.block_stride; }

void pack(const BlockArray& from, int64_t id, char* packed) {
  each_row(from.shape, [&, block = block_at(from, id)](int64_t offset) mutable {
    std::memcpy(packed, block + offset, from.shape.row_bytes);
    packed += from.shape.row_bytes;
  });
}

void unpack(const char* packed, const BlockArray& to, int64_t id) {
  each_row(to.shape, [&, block = block_at(to, id)](int64_t offset) mutable {
    std::memcpy(block + offset, packed, to.shape.row_bytes);
    packed += to.shape.row_bytes;
  });
}

bool same_rows(const BlockShape& a, const BlockShape& b) {
  return a.row_bytes == b.row_bytes && std::memcmp(a.sizes, b.sizes, sizeof a.sizes) == 0;
}

void copy_rows(const BlockArray& from, int64_t source, const BlockArray& to, int64_t destination) {
  const BlockShape &s = from.shape, &d = to.shape;
  const char* in = block_at(from, source);
  char* out = block_at(to, destination);
  for (int64_t i = 0; i < s.sizes[0]; ++i)
    for (int64_t j = 0; j < s.sizes[1]; ++j)
      for (int64_t k = 0; k < s.sizes[2]; ++k)
        std::memcpy(out + i * d.strides[0] + j * d.strides[1] + k * d.strides[2],
                    in + i * s.strides[0] + j * s.strides[1] + k * s.strides[2], s.row_bytes);
}

void check_pairs(const std::vector<BlockArray>& src, const std::vector<BlockArray>& dst, const int64_t* pairs,
                 int64_t num_pairs) {
  int64_t num_sources = INT64_MAX, num_destinations = INT64_MAX;
  for (const BlockArray& a : src) num_sources = std::min(num_sources, a.num_blocks);
  for (const BlockArray& a : dst) num_destinations = std::min(num_destinations, a.num_blocks);
  std::unordered_set<int64_t> written;
  for (int64_t i = 0; i < num_pairs; ++i) {
    const int64_t from = pairs[2 * i], to = pairs[2 * i + 1];
    if (from < 0 || from >= num_sources)
      refuse("block_mapping[", i, ", 0]: got source block ", from, ", there are blocks 0 .. ", num_sources - 1);
    if (to < 0 || to >= num_destinations)
      refuse("block_mapping[", i, ", 1]: got destination block ", to, ", there are blocks 0 .. ", num_destinations - 1);
    if (!written.insert(to).second)
      refuse("block_mapping[", i, ", 1]: destination block ", to, " is named twice, needs one source");
  }
}

bool share_storage(const std::vector<BlockArray>& src, const std::vector<BlockArray>& dst) {
  std::unordered_set<const void*> written;
  for (const BlockArray& a : dst) written.insert(a.data);
  return std::any_of(src.begin(), src.end(), [&](const BlockArray& a) { return written.count(a.data) != 0; });
}

void move_blocks(const std::vector<BlockArray>& src, const std::vector<BlockArray>& dst, const int64_t* pairs,
                 int64_t num_pairs) {
  if (num_pairs == 0 || src.empty()) return;
  check_pairs(src, dst, pairs, num_pairs);

  // Sources that are destinations too are read into `packed` before anything is written, and so are blocks whose
  // layouts differ.  packed_index: the pair's place there, or -1.
  std::vector<int64_t> packed_index(num_pairs, -1), packed_pairs;
  bool layouts_differ = false;
  int64_t block_bytes = 0;
  for (size_t c = 0; c < src.size(); ++c) {
    layouts_differ |= !same_rows(src[c].shape, dst[c].shape);
    block_bytes = std::max(block_bytes, src[c].shape.bytes());
  }
  std::unordered_set<int64_t> overwritten;
  if (share_storage(src, dst))
    for (int64_t i = 0; i < num_pairs; ++i) overwritten.insert(pairs[2 * i + 1]);
  for (int64_t i = 0; i < num_pairs; ++i) {
    if (!layouts_differ && overwritten.count(pairs[2 * i]) == 0) continue;
    packed_index[i] = int64_t(packed_pairs.size());
    packed_pairs.push_back(i);
  }
  const int64_t num_packed = int64_t(packed_pairs.size()), num_caches = int64_t(src.size());
  std::vector<char> packed(num_caches * num_packed * block_bytes);
  const auto packed_block = [&](int64_t cache, int64_t index) {
    return packed.data() + (cache * num_packed + index) * block_bytes;
  };

  const int64_t grain = 1 + 65536 / (1 + block_bytes);
  parallel_each(num_caches * num_packed, grain, [&](int64_t i) {
    const int64_t cache = i / num_packed, index = i % num_packed;
    pack(src[cache], pairs[2 * packed_pairs[index]], packed_block(cache, index));
  });
  parallel_each(num_caches * num_pairs, grain, [&](int64_t i) {
    const int64_t cache = i / num_pairs, pair = i % num_pairs, to = pairs[2 * pair + 1];
    if (packed_index[pair] < 0)
      copy_rows(src[cache], pairs[2 * pair], dst[cache], to);
    else
      unpack(packed_block(cache, packed_index[pair]), dst[cache], to);
  });
}

}  // namespace

void copy_blocks(const std::vector<BlockArray>& caches, const int64_t* pairs, int64_t num_pairs) {
  move_blocks(caches, caches, pairs, num_pairs);
}

void swap_blocks(const std::vector<BlockArray>& src, const std::vector<BlockArray>& dst, const int64_t* pairs,
                 int64_t num_pairs) {
  move_blocks(src, dst, pairs, num_pairs);
}

}  // namespace paged_attn::cpu
