#include "tensor_core.cuh"

namespace paged_attn::mma {

template void launch_tensor_core<__nv_bfloat16, 128>(const AttentionParams&, QueryRange, bool, Workspace&,
                                                     cudaStream_t);

}  // namespace paged_attn::mma
