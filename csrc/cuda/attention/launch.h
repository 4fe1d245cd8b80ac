// What launchers share: facts about the current device, and a launch with programmatic dependence.
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

namespace paged_attn {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

struct DeviceInfo {
  int id, sm_count, major;
  int smem_per_sm, smem_per_block,
      smem_reserved;  // bytes; smem_per_block: with opt-in; smem_reserved: per block, added
};

inline DeviceInfo current_device() {
  constexpr int kMaxDevices = 64;
  static DeviceInfo known[kMaxDevices];  // written with the same values whoever comes first
  static bool ready[kMaxDevices];
  int id = 0;
  check_cuda(cudaGetDevice(&id), "cudaGetDevice");
  if (id < kMaxDevices && __atomic_load_n(&ready[id], __ATOMIC_ACQUIRE)) return known[id];
  auto attribute = [id](cudaDeviceAttr a) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, a, id), "cudaDeviceGetAttribute");
    return value;
  };
  const DeviceInfo info = {id,
                           attribute(cudaDevAttrMultiProcessorCount),
                           attribute(cudaDevAttrComputeCapabilityMajor),
                           attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor),
                           attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
                           attribute(cudaDevAttrReservedSharedMemoryPerBlock)};
  if (id < kMaxDevices) {
    known[id] = info;
    __atomic_store_n(&ready[id], true, __ATOMIC_RELEASE);
  }
  return info;
}

// Lets `kernel` have so much dynamic shared memory on the current device.  Asks the runtime once: that is slow.
inline void allow_shared_memory(const void* kernel, int bytes) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, int> allowed;  // by kernel and device
  const std::lock_guard<std::mutex> lock(mutex);
  int& most = allowed[{kernel, current_device().id}];
  if (bytes <= most) return;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "cudaFuncSetAttribute");
  most = bytes;
}

// With `dependent` (compute capability 9.0 and up) the kernel may start before the one ahead of it on the stream has
// ended: it must call ptx::pdl_wait before it touches memory that kernels ahead of it write or still read.
template <class... Params, class... Args>
void launch_kernel(void (*kernel)(Params...), dim3 grid, dim3 block, size_t smem_bytes, cudaStream_t stream,
                   bool dependent, Args&&... args) {
  if (smem_bytes > 48 * 1024) allow_shared_memory(reinterpret_cast<const void*>(kernel), static_cast<int>(smem_bytes));
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...), "kernel launch");
}

}  // namespace paged_attn
