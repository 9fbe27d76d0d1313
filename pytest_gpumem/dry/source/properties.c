/* The properties of a device: attributes by number, and cudaDeviceProp, whose fields are mostly attributes. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "abi.h"
#include "dry.h"

enum attribute {
    MAX_THREADS_PER_BLOCK = 1,
    MAX_BLOCK_X = 2,
    MAX_BLOCK_Y = 3,
    MAX_BLOCK_Z = 4,
    MAX_GRID_X = 5,
    MAX_GRID_Y = 6,
    MAX_GRID_Z = 7,
    SHARED_PER_BLOCK = 8,
    CONSTANT_MEMORY = 9,
    WARP_SIZE = 10,
    MAX_PITCH = 11,
    REGISTERS_PER_BLOCK = 12,
    CLOCK_RATE = 13,
    TEXTURE_ALIGNMENT = 14,
    MULTIPROCESSORS = 16,
    CAN_MAP_HOST = 19,
    CONCURRENT_KERNELS = 31,
    ECC = 32,
    PCI_BUS = 33,
    MEMORY_CLOCK_RATE = 36,
    BUS_WIDTH = 37,
    L2_BYTES = 38,
    THREADS_PER_MULTIPROCESSOR = 39,
    ASYNC_ENGINES = 40,
    UNIFIED_ADDRESSING = 41,
    CAPABILITY_MAJOR = 75,
    CAPABILITY_MINOR = 76,
    STREAM_PRIORITIES = 78,
    GLOBAL_L1 = 79,
    LOCAL_L1 = 80,
    SHARED_PER_MULTIPROCESSOR = 81,
    REGISTERS_PER_MULTIPROCESSOR = 82,
    MANAGED = 83,
    CONCURRENT_MANAGED = 89,
    PREEMPTION = 90,
    REGISTERED_HOST_POINTER = 91,
    COOPERATIVE_LAUNCH = 95,
    SHARED_PER_BLOCK_OPTIN = 97,
    HOST_REGISTER = 99,
    VIRTUAL_MEMORY = 102,
    POSIX_HANDLES = 103,
    BLOCKS_PER_MULTIPROCESSOR = 106,
    RESERVED_SHARED = 111,
    MEMORY_POOLS = 115,
    CLUSTER_LAUNCH = 120,
};

/* Values that all GPUs since Volta share: "CUDA C++ Programming Guide", "Technical Specifications per Compute
 * Capability". Clock rates are round numbers, as the device has no clock. Fabric handles, multicast and other kinds of
 * managed memory are not supported. */
static int64_t attribute_of(const struct device *device, int attribute)
{
    switch (attribute) {
    case MAX_THREADS_PER_BLOCK:
    case MAX_BLOCK_X:
    case MAX_BLOCK_Y:
        return 1024;
    case MAX_BLOCK_Z:
        return 64;
    case MAX_GRID_X:
    case MAX_PITCH:
        return 2147483647;
    case MAX_GRID_Y:
    case MAX_GRID_Z:
        return 65535;
    case SHARED_PER_BLOCK:
        return 48 * KIB;
    case CONSTANT_MEMORY:
        return 64 * KIB;
    case WARP_SIZE:
        return 32;
    case REGISTERS_PER_BLOCK:
    case REGISTERS_PER_MULTIPROCESSOR:
        return 65536;
    case CLOCK_RATE:
        return 1000000; /* kHz */
    case MEMORY_CLOCK_RATE: /* twice a period the whole bus (get_dram_gbps of triton/testing.py) */
        return device->bus_width ? device->bandwidth * 4000000 / device->bus_width : 0;
    case TEXTURE_ALIGNMENT:
        return 512;
    case MULTIPROCESSORS:
        return device->sms;
    case PCI_BUS:
        return device->gpu + 1;
    case BUS_WIDTH:
        return device->bus_width;
    case L2_BYTES:
        return device->l2;
    case THREADS_PER_MULTIPROCESSOR:
        return device->threads;
    case ASYNC_ENGINES:
        return 3;
    case CAPABILITY_MAJOR:
        return device->major;
    case CAPABILITY_MINOR:
        return device->minor;
    case SHARED_PER_MULTIPROCESSOR:
        return device->shared;
    case SHARED_PER_BLOCK_OPTIN:
        return device->optin;
    case BLOCKS_PER_MULTIPROCESSOR:
        return device->blocks;
    case RESERVED_SHARED:
        return device->major >= 8 ? 1 * KIB : 0;
    case CLUSTER_LAUNCH:
        return device->major >= 9;
    case CAN_MAP_HOST:
    case CONCURRENT_KERNELS:
    case ECC:
    case UNIFIED_ADDRESSING:
    case STREAM_PRIORITIES:
    case GLOBAL_L1:
    case LOCAL_L1:
    case MANAGED:
    case CONCURRENT_MANAGED:
    case PREEMPTION:
    case REGISTERED_HOST_POINTER:
    case COOPERATIVE_LAUNCH:
    case HOST_REGISTER:
    case VIRTUAL_MEMORY:
    case POSIX_HANDLES:
    case MEMORY_POOLS:
        return 1;
    default:
        trace("attribute %d is 0", attribute);
        return 0;
    }
}

API int cudaDeviceGetAttribute(int *value, int attribute, int index)
{
    const struct device *device = device_at(index);
    if (device == NULL)
        return fail(INVALID_DEVICE);
    *value = (int)attribute_of(device, attribute);
    return SUCCESS;
}

API int cuDeviceGetAttribute(int *value, int attribute, int index)
{
    return cudaDeviceGetAttribute(value, attribute, index);
}

/* Fields of cudaDeviceProp that are attributes, with their offsets in bytes. CUDA 13 removed clock rates, compute and
 * memory modes, so that later fields moved forward. */
static const struct {
    unsigned short at_12, at_13, size;
    enum attribute attribute;
} FIELDS[] = {
    {296, 296, 8, SHARED_PER_BLOCK},
    {304, 304, 4, REGISTERS_PER_BLOCK},
    {308, 308, 4, WARP_SIZE},
    {312, 312, 8, MAX_PITCH},
    {320, 320, 4, MAX_THREADS_PER_BLOCK},
    {324, 324, 4, MAX_BLOCK_X},
    {328, 328, 4, MAX_BLOCK_Y},
    {332, 332, 4, MAX_BLOCK_Z},
    {336, 336, 4, MAX_GRID_X},
    {340, 340, 4, MAX_GRID_Y},
    {344, 344, 4, MAX_GRID_Z},
    {352, 352, 8, CONSTANT_MEMORY},
    {360, 360, 4, CAPABILITY_MAJOR},
    {364, 364, 4, CAPABILITY_MINOR},
    {368, 368, 8, TEXTURE_ALIGNMENT},
    {388, 384, 4, MULTIPROCESSORS},
    {400, 392, 4, CAN_MAP_HOST},
    {576, 560, 4, CONCURRENT_KERNELS},
    {580, 564, 4, ECC},
    {584, 568, 4, PCI_BUS},
    {600, 584, 4, ASYNC_ENGINES},
    {604, 588, 4, UNIFIED_ADDRESSING},
    {612, 592, 4, BUS_WIDTH},
    {616, 596, 4, L2_BYTES},
    {624, 604, 4, THREADS_PER_MULTIPROCESSOR},
    {628, 608, 4, STREAM_PRIORITIES},
    {632, 612, 4, GLOBAL_L1},
    {636, 616, 4, LOCAL_L1},
    {640, 624, 8, SHARED_PER_MULTIPROCESSOR},
    {648, 632, 4, REGISTERS_PER_MULTIPROCESSOR},
    {652, 636, 4, MANAGED},
    {676, 656, 4, CONCURRENT_MANAGED},
    {680, 660, 4, PREEMPTION},
    {684, 664, 4, REGISTERED_HOST_POINTER},
    {688, 668, 4, COOPERATIVE_LAUNCH},
    {696, 672, 8, SHARED_PER_BLOCK_OPTIN},
    {712, 688, 4, BLOCKS_PER_MULTIPROCESSOR},
    {720, 696, 8, RESERVED_SHARED},
    {744, 720, 4, MEMORY_POOLS},
    {772, 748, 4, CLUSTER_LAUNCH},
};
enum { SIZE_12 = 1032, SIZE_13 = 1008, NAME_AT = 0, UUID_AT = 256, TOTAL_MEMORY_AT = 288 };

API int cudaGetDeviceProperties(char *properties, int index)
{
    const struct device *device = device_at(index);
    shared_join(); /* torch reads the properties when it makes its context */
    if (device == NULL)
        return fail(INVALID_DEVICE);
    memset(properties, 0, CUDA_VERSION < 13000 ? SIZE_12 : SIZE_13);
    snprintf(properties + NAME_AT, 256, "%s", device->name);
    memcpy(properties + UUID_AT, device->uuid, sizeof device->uuid);
    memcpy(properties + TOTAL_MEMORY_AT, &device->memory, sizeof device->memory);
    for (size_t i = 0; i < sizeof FIELDS / sizeof *FIELDS; i++) {
        int64_t value = attribute_of(device, FIELDS[i].attribute);
        char *field = properties + (CUDA_VERSION < 13000 ? FIELDS[i].at_12 : FIELDS[i].at_13);
        if (FIELDS[i].size == 8)
            memcpy(field, &value, 8);
        else
            memcpy(field, &(int32_t){(int32_t)value}, 4);
    }
    return SUCCESS;
}

/* CUDA 12 has a separate name for the function with the structure of 1032 bytes. */
API int cudaGetDeviceProperties_v2(char *properties, int index) { return cudaGetDeviceProperties(properties, index); }
