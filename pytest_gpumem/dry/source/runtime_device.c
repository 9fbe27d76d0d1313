/* CUDA runtime: devices, versions, peers. */
#include <stdio.h>
#include <string.h>

#include "abi.h"
#include "dry.h"

API int cudaGetDeviceCount(int *count)
{
    *count = device_count();
    return SUCCESS;
}

API int cudaGetDevice(int *index)
{
    *index = current_device();
    return SUCCESS;
}

API int cudaSetDevice(int index) { return set_current_device(index); }

API int cudaDriverGetVersion(int *version)
{
    *version = CUDA_VERSION;
    return SUCCESS;
}

API int cudaRuntimeGetVersion(int *version)
{
    *version = CUDA_VERSION;
    return SUCCESS;
}

API int cudaDeviceGetPCIBusId(char *text, int size, int index)
{
    if (device_at(index) == NULL)
        return fail(INVALID_DEVICE);
    snprintf(text, (size_t)size, "0000:%02x:00.0", device_at(index)->gpu + 1);
    return SUCCESS;
}

/* Six priorities since Volta; c10/cuda/CUDAStream.h uses four of them. */
API int cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    if (least != NULL)
        *least = 0;
    if (greatest != NULL)
        *greatest = -5;
    return SUCCESS;
}

API int cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    *can = device != peer;
    return SUCCESS;
}

/* The resources of a kernel are unknown: this returns 32 registers and no static shared memory. CUB chooses its tuning,
 * and so the sizes of temporaries, by the PTX version. */
API int cudaFuncGetAttributes(struct function_attributes *attributes, IGNORED const void *function)
{
    const struct device *device = device_at(current_device());
    memset(attributes, 0, sizeof *attributes);
    attributes->max_threads = 1024;
    attributes->registers = 32;
    attributes->ptx_version = attributes->binary_version = (int)(device->major * 10 + device->minor);
    attributes->max_dynamic_shared = (int)device->optin;
    return SUCCESS;
}

API int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, IGNORED const void *function, int threads,
                                                      size_t shared)
{
    const struct device *device = device_at(current_device());
    int64_t fit = device->threads / (threads > 0 ? threads : 1);
    if (shared > 0 && fit > device->shared / (int64_t)shared)
        fit = device->shared / (int64_t)shared;
    *blocks = (int)(fit > device->blocks ? device->blocks : fit < 1 ? 1 : fit);
    return SUCCESS;
}

API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads,
                                                               size_t shared, IGNORED unsigned flags)
{
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}
