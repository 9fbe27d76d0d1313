/* Memory that processes share ("CUDA Runtime API", cudaIpcGetMemHandle). The importing process gets addresses without
 * device memory; values are not shared. */
#include <string.h>
#include <unistd.h>

#include "abi.h"
#include "dry.h"

/* cudaIpcMemHandle_t and cudaIpcEventHandle_t have 64 bytes, and are passed by value. */
struct handle {
    uint64_t process, address, size;
    char rest[64 - 3 * sizeof(uint64_t)];
};

API int cudaIpcGetMemHandle(struct handle *handle, void *address)
{
    struct block block;
    if (!memory_find(address, &block))
        return fail(INVALID_VALUE);
    *handle = (struct handle){(uint64_t)getpid(), (uint64_t)(uintptr_t)block.start, block.size, {0}};
    return SUCCESS;
}

API int cudaIpcOpenMemHandle(void **address, struct handle handle, IGNORED unsigned flags)
{
    if (handle.process == (uint64_t)getpid())
        return fail(INVALID_VALUE); /* "not supported from within the exporting process" */
    *address = memory_take(handle.size, VIRTUAL_RANGE, current_device());
    return *address == NULL ? fail(OUT_OF_MEMORY) : SUCCESS;
}

API int cudaIpcCloseMemHandle(void *address)
{
    return memory_give(address, VIRTUAL_RANGE) ? SUCCESS : fail(INVALID_VALUE);
}

struct event;
int cudaEventCreateWithFlags(struct event **event, unsigned flags);

API int cudaIpcGetEventHandle(struct handle *handle, IGNORED void *event)
{
    memset(handle, 0, sizeof *handle);
    return SUCCESS;
}

API int cudaIpcOpenEventHandle(struct event **event, IGNORED struct handle handle)
{
    return cudaEventCreateWithFlags(event, 0);
}
