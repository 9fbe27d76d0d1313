/* The driver's functions: devices, contexts, addresses. Programs find them in libcuda.so.1, or by name through the
 * runtime. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "abi.h"
#include "dry.h"

static const char CONTEXTS[120]; /* a context is the address of its device's element */

static void *context_of(int device) { return (void *)(uintptr_t)&CONTEXTS[device]; }

static int device_of(const void *context) { return (int)((const char *)context - CONTEXTS); }

/* The driver is initialised by cuInit, which the runtime calls when it is asked about devices, but not when torch is
 * imported ("CUDA Driver API", cuInit). */
static atomic_bool begun;

void driver_begin(void) { atomic_store(&begun, true); }

API int cuInit(IGNORED unsigned flags)
{
    driver_begin();
    return SUCCESS;
}

API int cuDriverGetVersion(int *version)
{
    *version = CUDA_VERSION;
    return SUCCESS;
}

API int cuDeviceGet(int *device, int index)
{
    *device = index;
    return device_at(index) == NULL ? INVALID_DEVICE : SUCCESS;
}

API int cuDeviceGetCount(int *count)
{
    if (!atomic_load(&begun))
        return NOT_INITIALIZED;
    *count = device_count();
    return SUCCESS;
}

API int cuDeviceGetName(char *name, int size, int index)
{
    if (device_at(index) == NULL)
        return INVALID_DEVICE;
    snprintf(name, (size_t)size, "%s", device_at(index)->name);
    return SUCCESS;
}

API int cuDeviceTotalMem_v2(size_t *bytes, int index)
{
    if (device_at(index) == NULL)
        return INVALID_DEVICE;
    *bytes = device_at(index)->memory;
    return SUCCESS;
}

API int cuDeviceGetUuid(unsigned char *uuid, int index)
{
    if (device_at(index) == NULL)
        return INVALID_DEVICE;
    memcpy(uuid, device_at(index)->uuid, 16);
    return SUCCESS;
}

API int cuDeviceGetUuid_v2(unsigned char *uuid, int index) { return cuDeviceGetUuid(uuid, index); }

API int cuDeviceComputeCapability(int *major, int *minor, int index)
{
    if (device_at(index) == NULL)
        return INVALID_DEVICE;
    *major = (int)device_at(index)->major;
    *minor = (int)device_at(index)->minor;
    return SUCCESS;
}

API int cuDevicePrimaryCtxGetState(IGNORED int device, unsigned *flags, int *active)
{
    if (flags != NULL)
        *flags = 0;
    *active = 1;
    return SUCCESS;
}

API int cuDevicePrimaryCtxRetain(void **context, int device)
{
    *context = context_of(device);
    return SUCCESS;
}

API int cuCtxCreate_v2(void **context, IGNORED unsigned flags, int device)
{
    *context = context_of(device);
    return SUCCESS;
}

API int cuCtxGetCurrent(void **context)
{
    *context = context_of(current_device());
    return SUCCESS;
}

API int cuCtxGetDevice(int *device)
{
    *device = current_device();
    return SUCCESS;
}

API int cuCtxSetCurrent(const void *context) { return context == NULL ? SUCCESS : set_current_device(device_of(context)); }

API int cuCtxPushCurrent_v2(const void *context) { return cuCtxSetCurrent(context); }

API int cuCtxPopCurrent_v2(void **context)
{
    return context == NULL ? SUCCESS : cuCtxGetCurrent(context);
}

API int cuCtxGetLimit(size_t *value, IGNORED int limit)
{
    *value = 0;
    return SUCCESS;
}

API int cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    *free_bytes = memory_free_bytes(current_device());
    *total = device_at(current_device())->memory;
    return SUCCESS;
}

API int cuMemAlloc_v2(void **address, size_t size)
{
    *address = memory_take(size, DEVICE_MEMORY, current_device());
    return *address == NULL ? OUT_OF_MEMORY : SUCCESS;
}

API int cuMemFree_v2(void *address) { return memory_give(address, DEVICE_MEMORY) ? SUCCESS : INVALID_VALUE; }

API int cuMemcpyDtoH_v2(void *to, const void *from, size_t size)
{
    memory_copy(to, from, size);
    return SUCCESS;
}

API int cuMemcpyHtoD_v2(void *to, const void *from, size_t size) { return cuMemcpyDtoH_v2(to, from, size); }

API int cuMemGetAddressRange_v2(void **start, size_t *size, const void *address)
{
    struct block block;
    if (!memory_find(address, &block))
        return INVALID_VALUE;
    if (start != NULL)
        *start = block.start;
    if (size != NULL)
        *size = block.size;
    return SUCCESS;
}

enum pointer_attribute { CONTEXT = 1, MEMORY_TYPE = 2, DEVICE_POINTER = 3, ORDINAL = 9, RANGE_START = 11, RANGE_SIZE = 12 };

API int cuPointerGetAttribute(void *value, int attribute, const void *address)
{
    struct block block;
    if (!memory_find(address, &block))
        return INVALID_VALUE;
    bool host = block.kind == HOST_MEMORY || block.kind == REGISTERED_HOST;
    switch (attribute) {
    case CONTEXT:
        *(void **)value = context_of(block.device);
        break;
    case MEMORY_TYPE:
        *(unsigned *)value = host ? TYPE_HOST : TYPE_DEVICE;
        break;
    case DEVICE_POINTER:
        *(const void **)value = address;
        break;
    case ORDINAL:
        *(int *)value = block.device;
        break;
    case RANGE_START:
        *(void **)value = block.start;
        break;
    case RANGE_SIZE:
        *(size_t *)value = block.size;
        break;
    default:
        *(int *)value = 0;
    }
    return SUCCESS;
}

/* A function of the driver by its name, which may lack the version suffix ("cuMemCreate" has no suffix, "cuMemAlloc"
 * means "cuMemAlloc_v2"). */
static void *function_named(const char *name)
{
    char versioned[128];
    snprintf(versioned, sizeof versioned, "%s_v2", name);
    void *function = dlsym(RTLD_DEFAULT, versioned);
    return function != NULL ? function : dlsym(RTLD_DEFAULT, name);
}

API int cudaGetDriverEntryPointByVersion(const char *name, void **function, IGNORED unsigned version,
                                         IGNORED unsigned long long flags, int *status)
{
    *function = function_named(name);
    trace("driver function %s at %p", name, *function);
    if (status != NULL)
        *status = *function == NULL; /* 1: cudaDriverEntryPointSymbolNotFound */
    return SUCCESS;
}

API int cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *status)
{
    return cudaGetDriverEntryPointByVersion(name, function, CUDA_VERSION, flags, status);
}

API int cuGetProcAddress_v2(const char *name, void **function, IGNORED int version, IGNORED uint64_t flags, int *status)
{
    return cudaGetDriverEntryPointByVersion(name, function, CUDA_VERSION, 0, status);
}

int cudaStreamIsCapturing(void *stream, int *status);

API int cuStreamIsCapturing(void *stream, int *status) { return cudaStreamIsCapturing(stream, status); }

API int cuStreamGetCtx(IGNORED void *stream, void **context) { return cuCtxGetCurrent(context); }

API int cuKernelGetAttribute(int *value, IGNORED int attribute, IGNORED void *kernel, IGNORED int device)
{
    *value = 0;
    return SUCCESS;
}
