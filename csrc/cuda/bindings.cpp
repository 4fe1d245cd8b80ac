// The CUDA side of the ops: device guard, stream, memory, launch.
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <mutex>
#include <string>
#include <vector>

#include "../ops.h"
#include "launchers.h"
#include "marked_memory.h"

// A torch without CUDA does not define this; weak, so that it can load the library all the same.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** ret_stream);

namespace paged_attn {
namespace {

using torch::stable::accelerator::DeviceGuard;

cudaStream_t current_stream(int device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

// Work queued on `later` from now on waits for what `earlier`, a stream of `device`, holds now.
void order_streams(int device, cudaStream_t earlier, cudaStream_t later) {
  const DeviceGuard guard(device);
  cudaEvent_t event;
  check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  check_cuda(cudaEventRecord(event, earlier));
  check_cuda(cudaStreamWaitEvent(later, event, 0));
  check_cuda(cudaEventDestroy(event));
}

class TorchWorkspace final : public Workspace {
 public:
  TorchWorkspace(const Tensor& on, cudaStream_t stream) : on_(on), stream_(stream) {}

  void* scratch(size_t bytes) override {
    scratch_.push_back(empty(bytes));
    return scratch_.back().data_ptr();
  }

  void* marked(size_t bytes) override { return marked_memory(on_, stream_, bytes); }

 private:
  Tensor empty(size_t bytes) const {
    return torch::stable::new_empty(on_, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
  }

  const Tensor& on_;
  cudaStream_t stream_;
  std::vector<Tensor> scratch_;
};

// Everything a launch needs from the tensor that names the device.
struct Launch {
  explicit Launch(const Tensor& on)
      : guard(on.get_device_index()), stream(current_stream(on.get_device_index())), workspace(on, stream) {}
  void check() const { check_cuda(cudaGetLastError()); }

  DeviceGuard guard;
  cudaStream_t stream;
  TorchWorkspace workspace;
};

// For kernels that use marked memory.  Of threads that share a stream none may launch between the kernels of another's
// call: the memory would serve two calls at once.
struct MarkedLaunch : Launch {
  explicit MarkedLaunch(const Tensor& on) : Launch(on), in_turn(mutexes[on.get_device_index() % kMutexes]) {}

  static constexpr int kMutexes = 64;  // one a device
  static inline std::mutex mutexes[kMutexes];
  std::lock_guard<std::mutex> in_turn;
};

struct CudaBackend {
  static void paged_attention(const AttentionParams& p, const Tensor& on) {
    if (p.num_tokens == 0) return;
    MarkedLaunch launch(on);
    launch_paged_attention(p, launch.workspace, launch.stream);
    launch.check();
  }
  static void write_kv(const KvWriteParams& p, const Tensor& on) {
    Launch launch(on);
    launch_write_kv(p, launch.stream);
    launch.check();
  }
  static void rope_write_kv(const RopeWriteParams& p, const Tensor& on) {
    Launch launch(on);
    launch_rope_write_kv(p, launch.stream);
    launch.check();
  }
  static void gather_kv(const GatherParams& p, const Tensor& on) {
    if (p.num_tokens == 0) return;
    Launch launch(on);
    launch_gather_kv(p, launch.stream);
    launch.check();
  }
  static void merge_attn_states(const MergeParams& p, const Tensor& on) {
    Launch launch(on);
    launch_merge_attn_states(p, launch.stream);
    launch.check();
  }
  static void copy_blocks(const std::vector<BlockArray>& caches, const Tensor& pairs, const Tensor& on) {
    if (!on.is_cuda()) fail("caches: expected tensors on a CUDA device, got ", device_of(on));
    MarkedLaunch launch(on);
    launch_copy_blocks(caches, static_cast<const int64_t*>(pairs.data_ptr()), pairs.size(0), pairs.is_cpu(),
                       launch.workspace, launch.stream);
    launch.check();
  }
  static void swap_blocks(const std::vector<BlockArray>& src, const std::vector<BlockArray>& dst, const Tensor& pairs,
                          const Tensor& src_on, const Tensor& dst_on, Overlap overlap, bool host_is_pinned) {
    if (overlap == Overlap::kOnePool) return copy_blocks(src, pairs, src_on);  // which orders chains and cycles
    const CopyDirection direction = src_on.is_cpu()   ? CopyDirection::kHostToDevice
                                    : dst_on.is_cpu() ? CopyDirection::kDeviceToHost
                                                      : CopyDirection::kDeviceToDevice;
    Launch launch(src_on.is_cuda() ? src_on : dst_on);
    const int src_device = src_on.get_device_index(), dst_device = dst_on.get_device_index();
    const bool two_devices = direction == CopyDirection::kDeviceToDevice && src_device != dst_device;
    if (two_devices) order_streams(dst_device, current_stream(dst_device), launch.stream);
    launch_swap_blocks(src, dst, static_cast<const int64_t*>(pairs.data_ptr()), pairs.size(0), direction, overlap,
                       host_is_pinned, launch.workspace, launch.stream);
    if (two_devices) order_streams(src_device, launch.stream, current_stream(dst_device));
    launch.check();
  }
};

// "toolkit|driver|architectures", for `python -m paged_attn info`.
std::string build_info() {
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
  const auto version = [](int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); };
  return version(CUDART_VERSION) + "|" + (driver ? version(driver) : "none") + "|" PAGED_ATTN_ARCHS;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(paged_attn, CUDA, m) { register_ops<CudaBackend>(m); }

STABLE_TORCH_LIBRARY_FRAGMENT(paged_attn, m) { m.def("build_info() -> str"); }

STABLE_TORCH_LIBRARY_IMPL(paged_attn, CompositeExplicitAutograd, m) { m.impl("build_info", TORCH_BOX(&build_info)); }

}  // namespace paged_attn
