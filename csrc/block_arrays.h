// Caches as arrays of blocks of bytes, for copy_blocks and swap_blocks: layout and dtype are forgotten here.
#pragma once

#include <algorithm>
#include <vector>

#include "checks.h"

namespace paged_attn {

struct BlockArrays {
  std::vector<BlockArray> src, dst;  // pairwise equal row_bytes and sizes, row_bytes 0 where empty; strides may differ
};

namespace detail {

struct PairedDim {
  int64_t size, src_stride, dst_stride;  // bytes
};

// Runs of bytes that are contiguous on both sides, and the dimensions that are left, innermost last.
inline void fill_shapes(std::vector<PairedDim> dims, const char* name, BlockShape& src, BlockShape& dst) {
  std::sort(dims.begin(), dims.end(),
            [](const PairedDim& a, const PairedDim& b) { return a.src_stride < b.src_stride; });
  std::vector<PairedDim> outer;
  for (const PairedDim& d : dims) {
    if (d.src_stride <= 0 || d.dst_stride <= 0) fail(name, ": expected no overlapping elements in a block");
    if (outer.empty() && d.src_stride == src.row_bytes && d.dst_stride == src.row_bytes)
      src.row_bytes *= d.size;
    else if (!outer.empty() && d.src_stride == outer.back().size * outer.back().src_stride &&
             d.dst_stride == outer.back().size * outer.back().dst_stride)
      outer.back().size *= d.size;
    else
      outer.push_back(d);
  }
  if (outer.size() > 3) fail(name, ": expected at most 4 separate dimensions in a block, got ", outer.size() + 1);
  dst.row_bytes = src.row_bytes;
  for (size_t i = 0; i < 3; i++) {
    const PairedDim d = i < outer.size() ? outer[i] : PairedDim{1, 0, 0};
    src.sizes[2 - i] = dst.sizes[2 - i] = d.size;
    src.strides[2 - i] = d.src_stride;
    dst.strides[2 - i] = d.dst_stride;
  }
}

}  // namespace detail

inline BlockArrays block_arrays(const char* src_name, const std::vector<Tensor>& src, const char* dst_name,
                                const std::vector<Tensor>& dst) {
  if (src.size() != dst.size())
    fail(dst_name, ": expected ", src.size(), " caches like ", src_name, ", got ", dst.size());
  BlockArrays arrays;
  for (size_t i = 0; i < src.size(); i++) {
    const Tensor &s = src[i], &d = dst[i];
    if (s.dim() < 2 || s.dim() > 5) fail(src_name, ": expected [num_blocks, ...] caches, got shape ", shape_of(s));
    if (d.dim() != s.dim())
      fail(dst_name, ": expected blocks of ", src_name, "'s shape ", shape_of(s), ", got ", shape_of(d));
    check_dtype(dst_name, d, s.scalar_type(), " like the other side");
    check_device(src_name, s, src_name, src[0]);
    check_device(dst_name, d, dst_name, dst[0]);
    check_written(dst_name, d);
    check_size(src_name, s, 0, src[0].size(0), "blocks of the first cache");
    check_size(dst_name, d, 0, dst[0].size(0), "blocks of the first cache");
    const int64_t width = s.element_size();
    std::vector<detail::PairedDim> dims;
    for (int64_t k = 1; k < s.dim(); k++) {
      check_size(dst_name, d, k, s.size(k), "that of the other side");
      if (s.size(k) != 1) dims.push_back({s.size(k), s.stride(k) * width, d.stride(k) * width});
    }
    const int64_t row_bytes = s.numel() > 0 ? width : 0;
    BlockArray from = {s.data_ptr(), s.size(0), s.stride(0) * width, {row_bytes, {1, 1, 1}, {0, 0, 0}}};
    BlockArray to = {d.data_ptr(), d.size(0), d.stride(0) * width, {row_bytes, {1, 1, 1}, {0, 0, 0}}};
    if (row_bytes > 0) detail::fill_shapes(dims, src_name, from.shape, to.shape);
    arrays.src.push_back(from);
    arrays.dst.push_back(to);
  }
  return arrays;
}

namespace detail {

inline bool same_array(const BlockArray& a, const BlockArray& b) {
  const BlockShape &x = a.shape, &y = b.shape;
  return a.data == b.data && a.num_blocks == b.num_blocks && a.block_stride == b.block_stride &&
         x.row_bytes == y.row_bytes && std::equal(x.sizes, x.sizes + 3, y.sizes) &&
         std::equal(x.strides, x.strides + 3, y.strides);
}

struct Dim {
  int64_t stride, size;  // stride in bytes
};

// All bytes of an array: rows along dimensions, the widest stride first, those of size 1 left out.
struct Grid {
  const char *begin, *end;
  int64_t row_bytes;
  std::vector<Dim> dims;

  // From the first byte to the last of the dimensions from `first` on.
  int64_t extent(size_t first) const {
    int64_t bytes = row_bytes;
    for (; first < dims.size(); ++first) bytes += (dims[first].size - 1) * dims[first].stride;
    return bytes;
  }
};

inline Grid grid_of(const BlockArray& a) {
  const char* begin = static_cast<const char*>(a.data);
  Grid grid = {begin, begin, a.shape.row_bytes, {}};
  if (a.num_blocks == 0 || a.shape.bytes() == 0) return grid;
  if (a.num_blocks > 1) grid.dims.push_back({a.block_stride, a.num_blocks});
  for (int k = 0; k < 3; ++k)
    if (a.shape.sizes[k] > 1) grid.dims.push_back({a.shape.strides[k], a.shape.sizes[k]});
  std::sort(grid.dims.begin(), grid.dims.end(), [](const Dim& x, const Dim& y) { return x.stride > y.stride; });
  grid.end = begin + grid.extent(0);
  return grid;
}

// Whether grids of equal strides share a byte, the dimensions from `first` on of b beginning `distance` bytes after
// those of a.  Exact where every stride spans all that is inside it, as in views of one tensor; else true at times
// where they do not.
inline bool grids_meet(const Grid& a, const Grid& b, int64_t distance, size_t first) {
  if (distance >= a.extent(first) || distance <= -b.extent(first)) return false;
  if (first == a.dims.size()) return true;
  const int64_t stride = a.dims[first].stride;
  if (stride < a.extent(first + 1) || stride < b.extent(first + 1)) return true;
  const int64_t below = distance / stride - (distance % stride < 0);
  for (const int64_t steps : {below, below + 1})  // along a, back to where b begins
    if (steps < a.dims[first].size && -steps < b.dims[first].size &&
        grids_meet(a, b, distance - steps * stride, first + 1))
      return true;
  return false;
}

inline bool grids_meet(const Grid& a, const Grid& b) {
  const auto same_stride = [](const Dim& x, const Dim& y) { return x.stride == y.stride; };
  if (!std::equal(a.dims.begin(), a.dims.end(), b.dims.begin(), b.dims.end(), same_stride)) return true;
  return grids_meet(a, b, b.begin - a.begin, 0);
}

inline bool sides_meet(const BlockArrays& arrays) {
  std::vector<Grid> src, dst;
  for (const BlockArray& a : arrays.src) src.push_back(grid_of(a));
  for (const BlockArray& a : arrays.dst) dst.push_back(grid_of(a));
  for (const Grid& a : src)
    for (const Grid& b : dst)
      if (a.begin < b.end && b.begin < a.end && grids_meet(a, b)) return true;
  return false;
}

}  // namespace detail

inline Overlap overlap_of(const BlockArrays& arrays) {
  if (std::equal(arrays.src.begin(), arrays.src.end(), arrays.dst.begin(), detail::same_array))
    return Overlap::kOnePool;
  return detail::sides_meet(arrays) ? Overlap::kOther : Overlap::kNone;
}

// An array that stands in the list again would be copied twice.
inline void drop_repeated(std::vector<BlockArray>& arrays) {
  const auto before = [](const BlockArray& a, const BlockArray& b) { return a.data < b.data; };
  std::stable_sort(arrays.begin(), arrays.end(), before);
  arrays.erase(std::unique(arrays.begin(), arrays.end(), detail::same_array), arrays.end());
}

inline void check_not_repeated(const char* name, std::vector<BlockArray> arrays) {
  const size_t count = arrays.size();
  drop_repeated(arrays);
  if (arrays.size() < count) fail(name, ": expected every cache once, got one of them twice");
}

inline void check_block_mapping(const Tensor& mapping) {
  check_dim("block_mapping", mapping, 2, "[num_pairs, 2]");
  check_size("block_mapping", mapping, 1, 2, "source and destination");
  check_dtype("block_mapping", mapping, ScalarType::Long);
}

// Every id in range, no destination twice.
inline void check_pairs(const Tensor& mapping, const char* src_name, const std::vector<BlockArray>& src,
                        const char* dst_name, const std::vector<BlockArray>& dst) {
  const int64_t num_src = src[0].num_blocks, num_dst = dst[0].num_blocks;
  const int64_t* pairs = static_cast<const int64_t*>(mapping.data_ptr());
  std::vector<bool> named(num_dst);
  for (int64_t i = 0; i < mapping.size(0); i++) {
    const int64_t from = pairs[i * mapping.stride(0)], to = pairs[i * mapping.stride(0) + mapping.stride(1)];
    if (from < 0 || from >= num_src)
      fail("block_mapping: expected sources from 0 to ", num_src - 1, " (", src_name, "), got ", from, " in row ", i);
    if (to < 0 || to >= num_dst)
      fail("block_mapping: expected destinations from 0 to ", num_dst - 1, " (", dst_name, "), got ", to, " in row ",
           i);
    if (named[to]) fail("block_mapping: expected every destination once, got ", to, " more than once");
    named[to] = true;
  }
}

}  // namespace paged_attn
