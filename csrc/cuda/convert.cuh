// Pieces of eight elements to float and back: float types rounded to nearest even, quantised types also saturated.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "vector.cuh"

namespace paged_attn {

__device__ __forceinline__ void to_float(const Piece<4>& piece, float, float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = __uint_as_float(piece.words[i]);
}

__device__ __forceinline__ void to_float(const Piece<2>& piece, __half, float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    __half2_raw raw;
    raw.x = static_cast<unsigned short>(piece.words[i]);
    raw.y = static_cast<unsigned short>(piece.words[i] >> 16);
    const float2 pair = __half22float2(__half2(raw));
    v[2 * i] = pair.x;
    v[2 * i + 1] = pair.y;
  }
}

__device__ __forceinline__ void to_float(const Piece<2>& piece, __nv_bfloat16, float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[2 * i] = __uint_as_float(piece.words[i] << 16);
    v[2 * i + 1] = __uint_as_float(piece.words[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ Piece<4> from_float(const float (&v)[8], float) {
  Piece<4> piece;
#pragma unroll
  for (int i = 0; i < 8; ++i) piece.words[i] = __float_as_uint(v[i]);
  return piece;
}

__device__ __forceinline__ Piece<2> from_float(const float (&v)[8], __half) {
  Piece<2> piece;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __half2_raw raw = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
    piece.words[i] = raw.x | static_cast<uint32_t>(raw.y) << 16;
  }
  return piece;
}

__device__ __forceinline__ Piece<2> from_float(const float (&v)[8], __nv_bfloat16) {
  Piece<2> piece;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162_raw raw = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
    piece.words[i] = raw.x | static_cast<uint32_t>(raw.y) << 16;
  }
  return piece;
}

// The values of a quantised piece, without its scale.
__device__ __forceinline__ void dequantize(const Piece<1>& piece, DType dtype, float (&v)[8]) {
  if (dtype == DType::kInt8) {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = static_cast<int8_t>(piece.words[i / 4] >> (i % 4 * 8));
  } else {
    const auto kind = dtype == DType::kFloat8E5M2 ? __NV_E5M2 : __NV_E4M3;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto two = static_cast<__nv_fp8x2_storage_t>(piece.words[i / 2] >> (i % 2 * 16));
      const float2 pair = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(two, kind)));
      v[2 * i] = pair.x;
      v[2 * i + 1] = pair.y;
    }
  }
}

// v rounded and saturated, infinities too; NaN stays NaN, and becomes 0 as int8.
__device__ __forceinline__ Piece<1> quantize(const float (&v)[8], DType dtype) {
  Piece<1> piece = {};
  if (dtype == DType::kInt8) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int rounded = v[i] == v[i] ? __float2int_rn(fminf(fmaxf(v[i], -127.0f), 127.0f)) : 0;
      piece.words[i / 4] |= static_cast<uint32_t>(rounded & 0xff) << (i % 4 * 8);
    }
  } else {
    const auto kind = dtype == DType::kFloat8E5M2 ? __NV_E5M2 : __NV_E4M3;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t two = __nv_cvt_float2_to_fp8x2(make_float2(v[2 * i], v[2 * i + 1]), __NV_SATFINITE, kind);
      piece.words[i / 2] |= two << (i % 2 * 16);
    }
  }
  return piece;
}

__device__ __forceinline__ float largest_finite(DType dtype) {
  return dtype == DType::kInt8 ? 127.0f : dtype == DType::kFloat8E5M2 ? 57344.0f : 448.0f;
}

// Calls f with a value of the C++ type behind a float dtype.
template <class F>
void dispatch_float(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat16:
      return f(__half{});
    case DType::kBFloat16:
      return f(__nv_bfloat16{});
    default:
      return f(float{});
  }
}

}  // namespace paged_attn
