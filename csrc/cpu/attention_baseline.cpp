// The attention kernels for any CPU.
#include "attention.h"
#include "types.h"

#define PAGED_ATTN_ISA baseline
#define PAGED_ATTN_LANES 4
#include "attention_isa.h"
