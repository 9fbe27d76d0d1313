/* CUDA runtime: memory of the device and of the host, copies, pools. */
#include <string.h>

#include "abi.h"
#include "dry.h"
#include "streams.h"

static int taken(void **address, size_t size, enum kind kind)
{
    *address = NULL;
    if (size == 0)
        return SUCCESS;
    *address = memory_take(size, kind, current_device());
    trace("%zu bytes of kind %d at %p", size, (int)kind, *address);
    return *address == NULL ? fail(OUT_OF_MEMORY) : SUCCESS;
}

static int given(void *address, enum kind kind)
{
    return address == NULL || memory_give(address, kind) ? SUCCESS : fail(INVALID_VALUE);
}

API int cudaMalloc(void **address, size_t size)
{
    int error = captures_refuse();
    return error == SUCCESS ? taken(address, size, DEVICE_MEMORY) : error;
}

API int cudaFree(void *address)
{
    return memory_give(address, MANAGED_MEMORY) ? SUCCESS : given(address, DEVICE_MEMORY);
}

API int cudaMallocManaged(void **address, size_t size, IGNORED unsigned flags)
{
    return taken(address, size, MANAGED_MEMORY);
}

API int cudaHostAlloc(void **address, size_t size, IGNORED unsigned flags) { return taken(address, size, HOST_MEMORY); }

API int cudaMallocHost(void **address, size_t size) { return taken(address, size, HOST_MEMORY); }

API int cudaFreeHost(void *address) { return given(address, HOST_MEMORY); }

API int cudaHostRegister(void *address, size_t size, IGNORED unsigned flags)
{
    return memory_register(address, size) ? SUCCESS : fail(HOST_ALREADY_REGISTERED);
}

API int cudaHostUnregister(void *address)
{
    return memory_give(address, REGISTERED_HOST) ? SUCCESS : fail(HOST_NOT_REGISTERED);
}

API int cudaHostGetDevicePointer(void **device, void *host, IGNORED unsigned flags)
{
    *device = host;
    return SUCCESS;
}

API int cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    *free_bytes = memory_free_bytes(current_device());
    *total = device_at(current_device())->memory;
    return SUCCESS;
}

API int cudaPointerGetAttributes(struct pointer_attributes *attributes, const void *address)
{
    static const int TYPES[] = {[DEVICE_MEMORY] = TYPE_DEVICE,
                                [VIRTUAL_RANGE] = TYPE_DEVICE,
                                [HOST_MEMORY] = TYPE_HOST,
                                [REGISTERED_HOST] = TYPE_HOST,
                                [MANAGED_MEMORY] = TYPE_MANAGED};
    struct block block;
    if (!memory_find(address, &block)) {
        *attributes = (struct pointer_attributes){TYPE_UNREGISTERED, -2, NULL, (void *)(uintptr_t)address};
        return SUCCESS;
    }
    void *at = (void *)(uintptr_t)address;
    int type = TYPES[block.kind];
    *attributes = (struct pointer_attributes){type, block.device, at, type == TYPE_DEVICE ? NULL : at};
    return SUCCESS;
}

/* After a synchronous copy the host knows that the stream's work is done. */
API int cudaMemcpy(void *to, const void *from, size_t size, IGNORED int direction)
{
    memory_copy(to, from, size);
    stream_finish(NULL);
    return SUCCESS;
}

/* A copy from a device to pageable memory returns when it is over ("API synchronization behavior" of CUDA's manual). */
API int cudaMemcpyAsync(void *to, const void *from, size_t size, IGNORED int direction, void *stream)
{
    trace("copy of %zu bytes from %p to %p", size, from, to);
    memory_copy(to, from, size);
    int error = stream_add_node(stream);
    struct block block;
    if (error == SUCCESS && on_device(from) && !memory_find(to, &block) && stream_of(stream)->capture == NULL)
        stream_finish(stream);
    return error;
}

API int cudaMemcpyPeerAsync(void *to, IGNORED int device, const void *from, IGNORED int source, size_t size,
                            void *stream)
{
    return cudaMemcpyAsync(to, from, size, 0, stream);
}

API int cudaMemcpyBatchAsync(void **to, void **from, size_t *sizes, size_t count, IGNORED void *attributes,
                             IGNORED size_t *indices, IGNORED size_t attribute_count, void *stream)
{
    for (size_t i = 0; i < count; i++)
        cudaMemcpyAsync(to[i], from[i], sizes[i], 0, stream);
    return SUCCESS;
}

API int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                          IGNORED int direction, void *stream)
{
    if (values_are_copied(width * height, MIB))
        for (size_t row = 0; row < height; row++)
            memory_copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return stream_add_node(stream);
}

API int cudaMemset(void *at, int value, size_t size)
{
    memory_set(at, value, size);
    return SUCCESS;
}

API int cudaMemsetAsync(void *at, int value, size_t size, void *stream)
{
    memory_set(at, value, size);
    return stream_add_node(stream);
}

/* cudaMallocAsync (PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync): each device has one pool. */
static struct pool {
    uint64_t used, used_high;
} pools[120];

API int cudaDeviceGetDefaultMemPool(void **pool, int index)
{
    if (device_at(index) == NULL)
        return fail(INVALID_DEVICE);
    *pool = &pools[index];
    return SUCCESS;
}

API int cudaMallocAsync(void **address, size_t size, IGNORED void *stream)
{
    int error = cudaMalloc(address, size);
    struct pool *pool = &pools[current_device()];
    if (error == SUCCESS) {
        pool->used += size;
        pool->used_high = pool->used > pool->used_high ? pool->used : pool->used_high;
    }
    return error;
}

API int cudaMallocFromPoolAsync(void **address, size_t size, IGNORED void *pool, void *stream)
{
    return cudaMallocAsync(address, size, stream);
}

API int cudaFreeAsync(void *address, IGNORED void *stream)
{
    struct block block;
    if (memory_find(address, &block)) {
        struct pool *pool = &pools[block.device];
        pool->used -= block.size < pool->used ? block.size : pool->used;
    }
    return cudaFree(address);
}

enum pool_attribute { RESERVED_CURRENT = 5, RESERVED_HIGH = 6, USED_CURRENT = 7, USED_HIGH = 8 };

API int cudaMemPoolGetAttribute(struct pool *pool, int attribute, uint64_t *value)
{
    if (attribute < RESERVED_CURRENT) {
        memset(value, 0, attribute <= 3 ? sizeof(int) : sizeof *value);
        return SUCCESS;
    }
    *value = attribute == RESERVED_HIGH || attribute == USED_HIGH ? pool->used_high : pool->used;
    return SUCCESS;
}

API int cudaMemPoolSetAttribute(struct pool *pool, int attribute, IGNORED void *value)
{
    if (attribute == RESERVED_HIGH || attribute == USED_HIGH)
        pool->used_high = pool->used;
    return SUCCESS;
}

/* A variable of device code, which only kernels would read: host memory as the target of copies. */
API int cudaGetSymbolAddress(void **address, IGNORED const void *symbol)
{
    return taken(address, 64 * KIB, HOST_MEMORY);
}
