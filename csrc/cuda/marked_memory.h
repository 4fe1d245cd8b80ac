// Workspace::marked on the CUDA side.
//
// The memory is not torch's.  Torch knows pools that eager calls share with graphs: what such a call keeps there until
// the next one could lie where a graph captured earlier has its temporaries.  And torch.compile with graphs of its own
// ("reduce-overhead") refuses whatever lives on in its pool without being an output.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "../ops.h"

namespace paged_attn {

// torch's own check is missing from a torch without CUDA, which must be able to load the library.
inline void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA error: ") + cudaGetErrorString(error));
}

// Inside, this thread may allocate while it or another one captures a graph.
class RelaxedCapture {
 public:
  RelaxedCapture() { check_cuda(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// The memory of one device's graphs: each has its own, since two may run at once, and leaves it to the next ones.
class GraphMemory {
 public:
  static GraphMemory& of(int device) {
    constexpr int kDevices = 64;
    static auto* memories = new GraphMemory[kDevices];  // never destroyed: graphs may go later
    return memories[device % kDevices];
  }

  // `graph`, and what is instantiated from it, holds the memory until it is destroyed and has run for the last time.
  // Null where there is none.
  void* take(size_t bytes, cudaGraph_t graph) {
    auto lease = std::make_unique<Lease>(Lease{this, bytes, nullptr});
    if (!reuse(*lease) && cudaMalloc(&lease->data, bytes) != cudaSuccess) return nullptr;
    void* data = lease->data;
    cudaUserObject_t object;
    check_cuda(cudaUserObjectCreate(&object, lease.release(), end, 1, cudaUserObjectNoDestructorSync));
    check_cuda(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
    return data;
  }

 private:
  struct Lease {
    GraphMemory* memory;
    size_t size;
    void* data;
  };

  bool reuse(Lease& lease) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto it = free_.lower_bound(lease.size);
    if (it == free_.end() || it->first > 2 * lease.size) return false;
    std::tie(lease.size, lease.data) = *it;
    free_.erase(it);
    return true;
  }

  // Runs on a thread of CUDA's, where none of its functions may be called.
  static void CUDART_CB end(void* object) {
    const std::unique_ptr<Lease> lease(static_cast<Lease*>(object));
    const std::lock_guard<std::mutex> lock(lease->memory->mutex_);
    lease->memory->free_.emplace(lease->size, lease->data);
  }

  std::mutex mutex_;                   // held for no call of CUDA's
  std::multimap<size_t, void*> free_;  // by size
};

struct MarkedKey {
  int device;
  cudaStream_t stream;
  unsigned long long capture;  // 0: not capturing
  bool operator<(const MarkedKey& o) const {
    return std::tie(device, stream, capture) < std::tie(o.device, o.stream, o.capture);
  }
};

struct MarkedMemory {
  void* data = nullptr;
  size_t size = 0;
  std::optional<Tensor> tensor;  // where the device has no memory left that torch does not hold
};

inline void* marked_memory(const Tensor& on, cudaStream_t stream, size_t bytes) {
  MarkedKey key = {on.get_device_index(), stream, 0};
  cudaStreamCaptureStatus status;
  cudaGraph_t graph = nullptr;
  check_cuda(cudaStreamGetCaptureInfo(stream, &status, &key.capture, &graph));
  const bool capturing = status == cudaStreamCaptureStatusActive;
  if (!capturing) key.capture = 0;

  static std::mutex mutex;
  static auto* memories = new std::map<MarkedKey, MarkedMemory>;  // never destroyed: the CUDA context may go first
  const std::lock_guard<std::mutex> lock(mutex);
  // What an ended capture on this stream used belongs to its graph alone now.
  for (auto it = memories->upper_bound({key.device, stream, 0}); it != memories->end();) {
    if (it->first.device != key.device || it->first.stream != stream) break;
    it = it->first.capture == key.capture ? std::next(it) : memories->erase(it);
  }
  MarkedMemory& memory = (*memories)[key];
  if (memory.size >= bytes) return memory.data;

  if (!capturing && memory.data && !memory.tensor) check_cuda(cudaFreeAsync(memory.data, stream));
  memory = {};
  {
    const RelaxedCapture relaxed;
    if (capturing)
      memory.data = GraphMemory::of(key.device).take(bytes, graph);
    else if (cudaMallocAsync(&memory.data, bytes, stream) != cudaSuccess)
      memory.data = nullptr;
    if (memory.data == nullptr) cudaGetLastError();
  }
  if (memory.data == nullptr) {
    memory.tensor = torch::stable::new_empty(on, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
    memory.data = memory.tensor->data_ptr();
  }
  // In a graph this is one of its nodes: every replay starts from clean marks.
  check_cuda(cudaMemsetAsync(memory.data, 0xff, bytes, stream));
  memory.size = bytes;
  return memory.data;
}

}  // namespace paged_attn
