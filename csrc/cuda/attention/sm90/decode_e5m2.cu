// ptxas: decode_kernelINS0_12DecodeTraitsI13__nv_fp8_e5m2Li128ELi16E may spill: one register of 4 bytes.
#include "decode_instances.h"

namespace paged_attn::sm90 {
template void launch_for<__nv_fp8_e5m2>(DecodeArgs&, Workspace&, cudaStream_t);
}
