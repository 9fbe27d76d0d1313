/* Numbers of CUDA's interfaces that the dry runtime answers with.
 *
 * Source: "CUDA Runtime API" and "CUDA Driver API" reference manuals, 12.4 and 13.2, "Data types used by CUDA Runtime"
 * (cudaError, cudaDeviceAttr, cudaDeviceProp) and "Data types used by CUDA driver". Numbers of errors and attributes
 * are the same in both interfaces.
 */
#ifndef ABI_H
#define ABI_H

#include <stddef.h>

#if !defined(CUDA_VERSION) || !defined(CUDNN_VERSION_PARTS) || !defined(NCCL_VERSION)
#error "build.py defines the versions of the libraries that torch was built for"
#endif

enum error {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    PEER_ALREADY_ENABLED = 704,
    HOST_ALREADY_REGISTERED = 712,
    HOST_NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
};

enum memory_type { TYPE_UNREGISTERED = 0, TYPE_HOST = 1, TYPE_DEVICE = 2, TYPE_MANAGED = 3 };

enum capture_status { CAPTURE_NONE = 0, CAPTURE_ACTIVE = 1, CAPTURE_BROKEN = 2 };

/* struct cudaPointerAttributes */
struct pointer_attributes {
    int type;
    int device;
    void *device_pointer;
    void *host_pointer;
};

/* struct cudaFuncAttributes, whose size is 144 bytes since CUDA 12 */
struct function_attributes {
    size_t shared_bytes, constant_bytes, local_bytes;
    int max_threads, registers, ptx_version, binary_version, cache_mode, max_dynamic_shared;
    char others[144 - 3 * sizeof(size_t) - 6 * sizeof(int)];
};

/* dim3 */
struct extent {
    unsigned x, y, z;
};

#endif
