/* NVML, as far as torch (c10/cuda/driver_api.h and torch/csrc/distributed/c10d/symm_mem) and nvidia-ml-py ask it.
 * Source of structures and numbers: "NVML API Reference Guide", nvml.h.
 *
 * It knows all GPUs of the machine, whatever CUDA_VISIBLE_DEVICES hides, and all processes that use them (shared.c).
 * There is no driver, no context outside the allocator, and no time: what NVML says of these it does not support, or
 * answers as of a GPU that computes nothing. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "abi.h"
#include "dry.h"

enum nvml_error {
    NVML_SUCCESS = 0,
    NVML_INVALID_ARGUMENT = 2,
    NVML_NOT_SUPPORTED = 3,
    NVML_NOT_FOUND = 6,
    NVML_INSUFFICIENT_SIZE = 7,
};

/* A device's handle is its index, counted from 1. */
static void *handle_of(int index) { return (void *)(uintptr_t)(index + 1); }

static int index_of(void *handle) { return (int)(uintptr_t)handle - 1; }

static const struct device *device_of(void *handle) { return machine_at(index_of(handle)); }

API int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **handle)
{
    unsigned domain, number;
    if (sscanf(bus, "%x:%x:", &domain, &number) != 2 || machine_at((int)number - 1) == NULL)
        return NVML_NOT_FOUND;
    *handle = handle_of((int)number - 1);
    return NVML_SUCCESS;
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    if (machine_at((int)index) == NULL)
        return NVML_INVALID_ARGUMENT;
    *handle = handle_of((int)index);
    return NVML_SUCCESS;
}

API int nvmlDeviceGetCount_v2(unsigned *count)
{
    *count = (unsigned)machine_count();
    return NVML_SUCCESS;
}

API int nvmlDeviceGetUUID(void *handle, char *text, unsigned size)
{
    const struct device *device = device_of(handle);
    char digits[37] = "";
    if (device == NULL)
        return NVML_INVALID_ARGUMENT;
    for (int i = 0; i < 16; i++)
        snprintf(digits + strlen(digits), 4, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", device->uuid[i]);
    snprintf(text, size, "GPU-%s", digits);
    return NVML_SUCCESS;
}

API int nvmlDeviceGetHandleByUUID(const char *wanted, void **handle)
{
    char text[64];
    for (int i = 0; i < machine_count(); i++)
        if (nvmlDeviceGetUUID(handle_of(i), text, sizeof text) == NVML_SUCCESS && strcmp(text, wanted) == 0) {
            *handle = handle_of(i);
            return NVML_SUCCESS;
        }
    return NVML_NOT_FOUND;
}

/* nvmlMemory_t, and nvmlMemory_v2_t with what the driver keeps for itself */
struct memory {
    unsigned long long total, free, used;
};

struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

API int nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory)
{
    const struct device *device = device_of(handle);
    if (device == NULL)
        return NVML_INVALID_ARGUMENT;
    size_t used = shared_used(device->index);
    *memory = (struct memory){device->memory, device->memory > used ? device->memory - used : 0, used};
    return NVML_SUCCESS;
}

API int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *memory)
{
    struct memory known;
    int error = nvmlDeviceGetMemoryInfo(handle, &known);
    if (error == NVML_SUCCESS)
        *memory = (struct memory_v2){memory->version, known.total, 0, known.free, known.used};
    return error;
}

/* nvmlProcessInfo_t of the second and the third version of the function */
struct process {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};

API int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, struct process *processes)
{
    const struct device *device = device_of(handle);
    unsigned room = *count, found = 0;
    int pid;
    size_t used;
    if (device == NULL)
        return NVML_INVALID_ARGUMENT;
    for (; shared_process((int)found, device->index, &pid, &used); found++)
        if (processes != NULL && found < room)
            processes[found] = (struct process){(unsigned)pid, used, ~0u, ~0u};
    *count = found;
    return found > room ? NVML_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

API int nvmlDeviceGetComputeRunningProcesses_v2(void *handle, unsigned *count, struct process *processes)
{
    return nvmlDeviceGetComputeRunningProcesses_v3(handle, count, processes);
}

/* nvmlProcessInfo_v1_t, which torch asks for when memory runs out (c10/cuda/CUDACachingAllocator.cpp) */
struct process_v1 {
    unsigned pid;
    unsigned long long used;
};

API int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, struct process_v1 *processes)
{
    struct process known[64];
    unsigned room = *count;
    *count = sizeof known / sizeof *known;
    int error = nvmlDeviceGetComputeRunningProcesses_v3(handle, count, known);
    if (error == NVML_SUCCESS && *count > room)
        error = NVML_INSUFFICIENT_SIZE;
    for (unsigned i = 0; error == NVML_SUCCESS && i < *count; i++)
        processes[i] = (struct process_v1){known[i].pid, known[i].used};
    return error;
}

static int none(unsigned *count)
{
    *count = 0;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetGraphicsRunningProcesses_v3(IGNORED void *handle, unsigned *count, IGNORED void *processes)
{
    return none(count);
}

API int nvmlDeviceGetMPSComputeRunningProcesses_v3(IGNORED void *handle, unsigned *count, IGNORED void *processes)
{
    return none(count);
}

API int nvmlSystemGetProcessName(unsigned pid, char *name, unsigned size)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    FILE *file = fopen(path, "r");
    if (file == NULL)
        return NVML_NOT_FOUND;
    size_t read = size > 0 ? fread(name, 1, size - 1, file) : 0;
    fclose(file);
    if (size > 0)
        name[read] = '\0';
    return NVML_SUCCESS;
}

static int answer(void *handle, unsigned *value, unsigned is)
{
    if (device_of(handle) == NULL)
        return NVML_INVALID_ARGUMENT;
    *value = is;
    return NVML_SUCCESS;
}

API int nvmlSystemGetDriverVersion(IGNORED char *version, IGNORED unsigned size) { return NVML_NOT_SUPPORTED; }

API int nvmlDeviceGetMigMode(IGNORED void *handle, IGNORED unsigned *current, IGNORED unsigned *pending)
{
    return NVML_NOT_SUPPORTED;
}

API int nvmlDeviceGetVirtualizationMode(IGNORED void *handle, int *mode)
{
    *mode = 0; /* bare metal */
    return NVML_SUCCESS;
}

API int nvmlDeviceGetComputeMode(IGNORED void *handle, int *mode)
{
    *mode = 0; /* any number of processes */
    return NVML_SUCCESS;
}

/* nvmlUtilization_t: percents of time in which a kernel ran, or memory was read or written */
struct utilization {
    unsigned gpu, memory;
};

API int nvmlDeviceGetUtilizationRates(void *handle, struct utilization *rates)
{
    rates->memory = 0;
    return answer(handle, &rates->gpu, 0);
}

API int nvmlDeviceGetTemperature(void *handle, IGNORED int sensor, unsigned *celsius)
{
    return answer(handle, celsius, 30);
}

API int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) { return answer(handle, milliwatts, 50000); }

/* The rate of CLOCK_RATE in properties.c, whatever clock is asked for. */
API int nvmlDeviceGetClockInfo(void *handle, IGNORED int clock, unsigned *megahertz)
{
    return answer(handle, megahertz, 1000);
}

API int nvmlDeviceGetMaxClockInfo(void *handle, int clock, unsigned *megahertz)
{
    return nvmlDeviceGetClockInfo(handle, clock, megahertz);
}

API int nvmlDeviceGetProcessUtilization(IGNORED void *handle, IGNORED void *samples, unsigned *count,
                                        IGNORED unsigned long long since)
{
    *count = 0;
    return NVML_NOT_FOUND;
}

API const char *nvmlErrorString(int error)
{
    switch (error) {
    case NVML_SUCCESS:
        return "Success";
    case NVML_INVALID_ARGUMENT:
        return "Invalid Argument";
    case NVML_NOT_SUPPORTED:
        return "Not Supported";
    case NVML_NOT_FOUND:
        return "Not Found";
    case NVML_INSUFFICIENT_SIZE:
        return "Insufficient Size";
    default:
        return "Unknown Error";
    }
}

API int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    *version = CUDA_VERSION;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetName(void *handle, char *name, unsigned size)
{
    const struct device *device = device_of(handle);
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
