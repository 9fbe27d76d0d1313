/* Virtual memory of the driver, which torch's expandable segments use: addresses are reserved, and physical memory of a
 * device is allocated and mapped to them. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>

#include "abi.h"
#include "dry.h"

#define GRANULARITY (2 * MIB)

struct physical {
    size_t size;
    int device, references;
};

/* The beginning of CUmemAllocationProp: kinds of allocation and handle, and the location. */
struct allocation_properties {
    int type, handle_types, location_type, location;
};

API int cuMemGetAllocationGranularity(size_t *granularity, IGNORED const void *properties, IGNORED int option)
{
    *granularity = GRANULARITY;
    return SUCCESS;
}

API int cuMemAddressReserve(void **address, size_t size, IGNORED size_t alignment, IGNORED void *wish,
                            IGNORED unsigned long long flags)
{
    *address = memory_take(size, VIRTUAL_RANGE, current_device());
    return *address == NULL ? OUT_OF_MEMORY : SUCCESS;
}

API int cuMemAddressFree(void *address, IGNORED size_t size)
{
    return memory_give(address, VIRTUAL_RANGE) ? SUCCESS : INVALID_VALUE;
}

API int cuMemCreate(struct physical **handle, size_t size, const struct allocation_properties *properties,
                    IGNORED unsigned long long flags)
{
    int device = properties == NULL ? current_device() : properties->location;
    struct physical *physical = malloc(sizeof *physical);
    if (physical == NULL || device_at(device) == NULL || !memory_charge(device, size)) {
        free(physical);
        return OUT_OF_MEMORY;
    }
    *physical = (struct physical){size, device, 1};
    *handle = physical;
    return SUCCESS;
}

API int cuMemRelease(struct physical *physical)
{
    if (--physical->references == 0) {
        memory_refund(physical->device, physical->size);
        free(physical);
    }
    return SUCCESS;
}

API int cuMemRetainAllocationHandle(struct physical **handle, IGNORED void *address)
{
    *handle = NULL;
    return NOT_SUPPORTED;
}

API int cuMemMap(IGNORED void *address, IGNORED size_t size, IGNORED size_t offset, IGNORED struct physical *physical,
                 IGNORED unsigned long long flags)
{
    return SUCCESS;
}

API int cuMemUnmap(void *address, size_t size)
{
    madvise(address, size, MADV_DONTNEED);
    return SUCCESS;
}
