/* As much of NVIDIA's header of this name as a C compiler needs to read cuda_runtime_api.h. The wheel that brings the header
 * (nvidia-cuda-crt, or nvidia-cuda-nvcc before CUDA 13) is no part of an environment for training; where it is installed, it is
 * found first. */
#pragma once
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDART_CB
#define __builtin_align__(bytes) __attribute__((aligned(bytes)))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __managed__
#define __forceinline__ __inline__ __attribute__((always_inline))
#define __no_return__ __attribute__((noreturn))
#define __noinline__ __attribute__((noinline))
