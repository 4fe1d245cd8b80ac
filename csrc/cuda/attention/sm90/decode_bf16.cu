#include "decode_instances.h"

namespace paged_attn::sm90 {
template void launch_for<__nv_bfloat16>(DecodeArgs&, Workspace&, cudaStream_t);
}
