/* The functions of NVML used by torch (c10/cuda/driver_api.h, torch/csrc/distributed/c10d/symm_mem) and nvidia-ml-py.
 * Source of structures and numbers: "NVML API Reference Guide", nvml.h.
 *
 * It reports all GPUs of the machine, regardless of CUDA_VISIBLE_DEVICES, and all processes that use them (shared.c).
 * There is no driver, no context outside the allocator, and no clock: functions on these are not supported, or return
 * the values of an idle GPU. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "abi.h"
#include "dry.h"

enum nvml_error {
    NVML_SUCCESS = 0,
    NVML_INVALID_ARGUMENT = 2,
    NVML_NOT_SUPPORTED = 3,
    NVML_NOT_FOUND = 6,
    NVML_INSUFFICIENT_SIZE = 7,
};

/* A device's handle is its index in the machine, counted from 1. */
static int give(const struct device *device, void **handle, int otherwise)
{
    if (device == NULL)
        return otherwise;
    *handle = (void *)(uintptr_t)(device->index + 1);
    return NVML_SUCCESS;
}

static const struct device *device_of(void *handle) { return machine_at((int)(uintptr_t)handle - 1); }

API int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **handle)
{
    unsigned domain, number;
    if (sscanf(bus, "%x:%x:", &domain, &number) != 2)
        return NVML_NOT_FOUND;
    return give(gpu_at((int)number - 1), handle, NVML_NOT_FOUND);
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    return give(gpu_at((int)index), handle, NVML_INVALID_ARGUMENT);
}

API int nvmlDeviceGetCount_v2(unsigned *count)
{
    for (*count = 0; gpu_at((int)*count) != NULL;)
        ++*count;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetUUID(void *handle, char *text, unsigned size)
{
    const struct device *device = device_of(handle);
    char uuid[UUID_TEXT];
    if (device == NULL)
        return NVML_INVALID_ARGUMENT;
    device_uuid(device, uuid);
    snprintf(text, size, "%s", uuid);
    return NVML_SUCCESS;
}

API int nvmlDeviceGetHandleByUUID(const char *wanted, void **handle)
{
    char text[UUID_TEXT];
    for (int i = 0; i < machine_count(); i++) {
        device_uuid(machine_at(i), text);
        if (strcmp(text, wanted) == 0)
            return give(machine_at(i), handle, NVML_NOT_FOUND);
    }
    return NVML_NOT_FOUND;
}

/* MIG instances. Those of one GPU follow it in the machine; their memory together is the memory that it reports. */
static bool is_part(int index, const struct device *whole)
{
    const struct device *part = machine_at(index);
    return part != NULL && part->gpu == whole->gpu && (part == whole || whole->is_divided);
}

static size_t used_of(const struct device *device)
{
    size_t used = 0;
    for (int i = device->index; is_part(i, device); i++)
        used += shared_used(i);
    return used;
}

API int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending)
{
    const struct device *device = device_of(handle);
    if (device == NULL || device->instance)
        return NVML_INVALID_ARGUMENT;
    if (device->instances == 0)
        return NVML_NOT_SUPPORTED;
    *current = *pending = device->is_divided;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count)
{
    const struct device *device = device_of(handle);
    if (device == NULL || device->instance)
        return NVML_INVALID_ARGUMENT;
    *count = (unsigned)device->instances;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **instance)
{
    const struct device *device = device_of(handle);
    if (device == NULL || device->instance || index >= device->instances)
        return NVML_INVALID_ARGUMENT;
    int at = device->index + 1 + (int)index;
    return give(is_part(at, device) ? machine_at(at) : NULL, instance, NVML_NOT_FOUND);
}

API int nvmlDeviceIsMigDeviceHandle(void *handle, unsigned *is)
{
    const struct device *device = device_of(handle);
    if (device == NULL)
        return NVML_INVALID_ARGUMENT;
    *is = device->instance != 0;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *instance, void **handle)
{
    const struct device *device = device_of(instance);
    return give(device == NULL || !device->instance ? NULL : gpu_at(device->gpu), handle, NVML_INVALID_ARGUMENT);
}

/* nvmlMemory_t, and nvmlMemory_v2_t with the driver's reserve */
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
    size_t used = used_of(device);
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
    for (int i = device->index; is_part(i, device); i++)
        for (int j = 0; shared_process(j, i, &pid, &used); j++) {
            if (used == 0 && (device->is_divided || device->instance))
                continue; /* it uses another instance */
            if (processes != NULL && found < room)
                processes[found] = (struct process){(unsigned)pid, used, ~0u, ~0u};
            found++;
        }
    *count = found;
    return found > room ? NVML_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

API int nvmlDeviceGetComputeRunningProcesses_v2(void *handle, unsigned *count, struct process *processes)
{
    return nvmlDeviceGetComputeRunningProcesses_v3(handle, count, processes);
}

/* nvmlProcessInfo_v1_t, which torch reads when memory runs out (c10/cuda/CUDACachingAllocator.cpp) */
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

/* The rate of CLOCK_RATE in properties.c, for any clock. */
API int nvmlDeviceGetClockInfo(void *handle, IGNORED int clock, unsigned *megahertz)
{
    return answer(handle, megahertz, 1000);
}

API int nvmlDeviceGetMaxClockInfo(void *handle, int clock, unsigned *megahertz)
{
    return nvmlDeviceGetClockInfo(handle, clock, megahertz);
}

/* Every CPU is near to the GPU: the machine has one NUMA node. */
API int nvmlDeviceGetCpuAffinity(void *handle, unsigned words, unsigned long *cpus)
{
    const unsigned bits = 8 * sizeof *cpus;
    if (device_of(handle) == NULL)
        return NVML_INVALID_ARGUMENT;
    memset(cpus, 0, words * sizeof *cpus);
    for (long cpu = sysconf(_SC_NPROCESSORS_CONF) - 1; cpu >= 0; cpu--)
        if (cpu / bits < words)
            cpus[cpu / bits] |= 1ul << cpu % bits;
    return NVML_SUCCESS;
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

/* The beginning of nvmlGpuFabricInfoV_t. A GPU without a fabric has the state 0 and no cluster. */
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
