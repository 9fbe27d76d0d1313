/* NVML, as far as torch asks it: c10/cuda/driver_api.h and torch/csrc/distributed/c10d/symm_mem. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "abi.h"
#include "dry.h"

enum nvml_error { NVML_SUCCESS = 0, NVML_INVALID_ARGUMENT = 2, NVML_NOT_SUPPORTED = 3, NVML_NOT_FOUND = 6 };

/* A device's handle is its index, counted from 1. */
static void *handle_of(int index) { return (void *)(uintptr_t)(index + 1); }

static int index_of(void *handle) { return (int)(uintptr_t)handle - 1; }

API int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **handle)
{
    unsigned domain, number;
    if (sscanf(bus, "%x:%x:", &domain, &number) != 2 || device_at((int)number - 1) == NULL)
        return NVML_NOT_FOUND;
    *handle = handle_of((int)number - 1);
    return NVML_SUCCESS;
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    if (device_at((int)index) == NULL)
        return NVML_INVALID_ARGUMENT;
    *handle = handle_of((int)index);
    return NVML_SUCCESS;
}

API int nvmlDeviceGetCount_v2(unsigned *count)
{
    *count = (unsigned)device_count();
    return NVML_SUCCESS;
}

API int nvmlDeviceGetComputeRunningProcesses(IGNORED void *handle, unsigned *count, IGNORED void *processes)
{
    *count = 0;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, void *processes)
{
    return nvmlDeviceGetComputeRunningProcesses(handle, count, processes);
}

API int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    *version = CUDA_VERSION;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetName(void *handle, char *name, unsigned size)
{
    const struct device *device = device_at(index_of(handle));
    if (device == NULL)
        return NVML_INVALID_ARGUMENT;
    snprintf(name, size, "%s", device->name);
    return NVML_SUCCESS;
}

/* No NVLink. */
API int nvmlDeviceGetNvLinkRemoteDeviceType(IGNORED void *handle, IGNORED unsigned link, IGNORED int *type)
{
    return NVML_NOT_SUPPORTED;
}

API int nvmlDeviceGetNvLinkRemotePciInfo_v2(IGNORED void *handle, IGNORED unsigned link, IGNORED void *info)
{
    return NVML_NOT_SUPPORTED;
}

/* The beginning of nvmlGpuFabricInfoV_t. A GPU without a fabric says so in its state, 0, and its cluster is none. */
struct fabric {
    unsigned version;
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state;
};

API int nvmlDeviceGetGpuFabricInfoV(IGNORED void *handle, struct fabric *fabric)
{
    *fabric = (struct fabric){.version = fabric->version};
    return NVML_SUCCESS;
}

API int nvmlInit_v2(void) { return NVML_SUCCESS; }

API int nvmlInitWithFlags(IGNORED unsigned flags) { return NVML_SUCCESS; }

API int nvmlShutdown(void) { return NVML_SUCCESS; }
