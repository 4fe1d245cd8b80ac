// swap_blocks: whole blocks between device and host, or between devices.
#include <cuda_runtime.h>

#include "block_transfer.h"
#include "launchers.h"

namespace paged_attn {
namespace {

// So many CTAs of loads or stores over the host link fill it, as long as blocks share them out evenly: a power of two.
// More would only take multiprocessors from other work.
constexpr int kHostLinkCtas = 16;

// The arrays as the device sees pinned host memory; false where it cannot.
bool map_to_device(std::vector<BlockArray>& arrays) {
  for (BlockArray& array : arrays) {
    cudaPointerAttributes attributes = {};
    if (cudaPointerGetAttributes(&attributes, array.data) != cudaSuccess || attributes.devicePointer == nullptr) {
      cudaGetLastError();
      return false;
    }
    array.data = attributes.devicePointer;
  }
  return true;
}

bool contiguous(const BlockArray& array) {
  return array.shape.row_bytes == array.shape.bytes() && array.shape.row_bytes == array.block_stride;
}

cudaMemcpyKind kind_of(CopyDirection direction) {
  switch (direction) {
    case CopyDirection::kHostToDevice:
      return cudaMemcpyHostToDevice;
    case CopyDirection::kDeviceToHost:
      return cudaMemcpyDeviceToHost;
    default:
      return cudaMemcpyDefault;
  }
}

void copy_block(const BlockArray& src, const BlockArray& dst, int64_t from, int64_t to, cudaMemcpyKind kind,
                cudaStream_t stream) {
  const BlockShape &a = src.shape, &b = dst.shape;
  const char* source = static_cast<const char*>(src.data) + from * src.block_stride;
  char* target = static_cast<char*>(dst.data) + to * dst.block_stride;
  for (int64_t i = 0; i < a.sizes[0]; ++i)
    for (int64_t j = 0; j < a.sizes[1]; ++j) {
      const char* rows = source + i * a.strides[0] + j * a.strides[1];
      char* out = target + i * b.strides[0] + j * b.strides[1];
      if (a.sizes[2] == 1)
        cudaMemcpyAsync(out, rows, a.row_bytes, kind, stream);
      else
        cudaMemcpy2DAsync(out, b.strides[2], rows, a.strides[2], a.row_bytes, a.sizes[2], kind, stream);
    }
}

// Through the copy engine, a run of neighbouring blocks at a time: for pageable host memory and between two devices.
void copy_runs(const BlockArray& src, const BlockArray& dst, const int64_t* pairs, int64_t num_pairs,
               cudaMemcpyKind kind, cudaStream_t stream) {
  if (src.shape.bytes() == 0) return;
  const bool mergeable = contiguous(src) && contiguous(dst);
  for (int64_t i = 0; i < num_pairs;) {
    const int64_t from = pairs[2 * i], to = pairs[2 * i + 1];
    int64_t length = 1;
    while (mergeable && i + length < num_pairs && pairs[2 * (i + length)] == from + length &&
           pairs[2 * (i + length) + 1] == to + length)
      ++length;
    if (mergeable)
      cudaMemcpyAsync(static_cast<char*>(dst.data) + to * dst.block_stride,
                      static_cast<const char*>(src.data) + from * src.block_stride, length * src.block_stride, kind,
                      stream);
    else
      copy_block(src, dst, from, to, kind, stream);
    i += length;
  }
}

int device_of(const void* p) {
  cudaPointerAttributes attributes = {};
  cudaPointerGetAttributes(&attributes, p);
  return attributes.device;
}

// By way of scratch memory, so that every source is read before any destination is written.
void copy_aside(const std::vector<BlockArray>& src, const std::vector<BlockArray>& dst, const int64_t* pairs,
                int64_t num_pairs, Workspace& workspace, cudaStream_t stream) {
  std::vector<BlockArray> aside = src;
  for (BlockArray& array : aside) {
    BlockShape& shape = array.shape;
    array.num_blocks = num_pairs;
    array.block_stride = shape.bytes();
    array.data = workspace.scratch(num_pairs * array.block_stride);
    shape.strides[2] = shape.row_bytes;
    shape.strides[1] = shape.strides[2] * shape.sizes[2];
    shape.strides[0] = shape.strides[1] * shape.sizes[1];
  }
  std::vector<int64_t> out(2 * num_pairs), in(2 * num_pairs);
  for (int64_t i = 0; i < num_pairs; ++i) {
    out[2 * i] = pairs[2 * i];
    out[2 * i + 1] = in[2 * i] = i;
    in[2 * i + 1] = pairs[2 * i + 1];
  }
  TransferPairs transfer;
  transfer.count = num_pairs;
  transfer.host = out.data();
  launch_transfer(src, aside, transfer, 0, workspace, stream);
  transfer.host = in.data();
  launch_transfer(aside, dst, transfer, 0, workspace, stream);
}

}  // namespace

void launch_swap_blocks(const std::vector<BlockArray>& src, const std::vector<BlockArray>& dst, const int64_t* pairs,
                        int64_t num_pairs, CopyDirection direction, Overlap overlap, bool host_is_pinned,
                        Workspace& workspace, cudaStream_t stream) {
  if (src.empty() || num_pairs == 0) return;
  if (overlap == Overlap::kOther) return copy_aside(src, dst, pairs, num_pairs, workspace, stream);
  TransferPairs transfer;
  transfer.host = pairs;
  transfer.count = num_pairs;
  if (direction == CopyDirection::kDeviceToDevice) {
    if (device_of(src[0].data) == device_of(dst[0].data))
      return launch_transfer(src, dst, transfer, 0, workspace, stream);
  } else if (host_is_pinned) {
    std::vector<BlockArray> mapped = direction == CopyDirection::kHostToDevice ? src : dst;
    if (map_to_device(mapped)) {
      const bool to_device = direction == CopyDirection::kHostToDevice;
      return launch_transfer(to_device ? mapped : src, to_device ? dst : mapped, transfer, kHostLinkCtas, workspace,
                             stream);
    }
  }
  for (size_t i = 0; i < src.size(); ++i) copy_runs(src[i], dst[i], pairs, num_pairs, kind_of(direction), stream);
}

}  // namespace paged_attn
