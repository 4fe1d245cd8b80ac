#include "decode_instances.h"

namespace paged_attn::sm90 {
template void launch_for<__nv_fp8_e5m2>(DecodeArgs&, Workspace&, cudaStream_t);
}
