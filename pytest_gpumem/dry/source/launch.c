/* Kernels: registration, lookup, and launches that compute nothing. */
#include <stdlib.h>
#include <string.h>

#include "abi.h"
#include "dry.h"

/* A handle that is only passed on, and has to differ from NULL. */
static void *const SOMETHING = (void *)8;

API void **__cudaRegisterFatBinary(IGNORED void *binary)
{
    static void *handle[4];
    return handle;
}

API char __cudaInitModule(IGNORED void **handle) { return 1; }

/* The kernel of torch.cuda._sleep (aten/src/ATen/cuda/Sleep.cu), the only one that takes time. */
static const void *sleeping;

API void __cudaRegisterFunction(IGNORED void **handle, const void *function, IGNORED char *host_name, const char *name,
                                IGNORED int limit, IGNORED void *thread, IGNORED void *block,
                                IGNORED void *block_size, IGNORED void *grid_size, IGNORED int *size)
{
    if (sleeping == NULL && strstr(name, "11spin_kernel") != NULL)
        sleeping = function;
}

static int launch(const void *function, void *stream)
{
    int error = stream_add_kernel(stream);
    if (function == sleeping)
        stream_sleep(stream);
    return error;
}

/* The configuration between <<<...>>> and the launch, which nvcc's code pushes and pops for each thread. */
struct configuration {
    struct extent grid, block;
    size_t shared;
    void *stream;
};
enum { MOST_NESTED = 64 };
static __thread struct configuration pushed[MOST_NESTED];
static __thread int depth;

API unsigned __cudaPushCallConfiguration(struct extent grid, struct extent block, size_t shared, void *stream)
{
    if (depth < MOST_NESTED)
        pushed[depth] = (struct configuration){grid, block, shared, stream};
    depth++;
    return 0;
}

API int __cudaPopCallConfiguration(struct extent *grid, struct extent *block, size_t *shared, void **stream)
{
    struct configuration last = {{1, 1, 1}, {1, 1, 1}, 0, NULL};
    if (depth > 0 && --depth < MOST_NESTED)
        last = pushed[depth];
    *grid = last.grid;
    *block = last.block;
    *shared = last.shared;
    *stream = last.stream;
    return SUCCESS;
}

API int __cudaGetKernel(const void **kernel, const void *function)
{
    *kernel = function;
    return SUCCESS;
}

API int cudaLaunchKernel(const void *function, IGNORED struct extent grid, IGNORED struct extent block,
                         IGNORED void **arguments, IGNORED size_t shared, void *stream)
{
    return launch(function, stream);
}

API int __cudaLaunchKernel(const void *kernel, struct extent grid, struct extent block, void **arguments, size_t shared,
                           void *stream)
{
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

API int cudaLaunchCooperativeKernel(const void *function, struct extent grid, struct extent block, void **arguments,
                                    size_t shared, void *stream)
{
    return cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}

/* The beginning of cudaLaunchConfig_t and of CUlaunchConfig. */
struct launch_configuration {
    struct extent grid, block;
    size_t shared;
    void *stream;
};
struct driver_launch {
    unsigned grid[3], block[3], shared;
    void *stream;
};

API int cudaLaunchKernelExC(const struct launch_configuration *configuration, const void *function,
                            IGNORED void **arguments)
{
    return launch(function, configuration->stream);
}

API int cuLaunchKernel(IGNORED void *function, IGNORED unsigned grid_x, IGNORED unsigned grid_y,
                       IGNORED unsigned grid_z, IGNORED unsigned block_x, IGNORED unsigned block_y,
                       IGNORED unsigned block_z, IGNORED unsigned shared, void *stream, IGNORED void **arguments,
                       IGNORED void **extra)
{
    return stream_add_kernel(stream);
}

API int cuLaunchKernelEx(const struct driver_launch *launch, IGNORED void *function, IGNORED void **arguments,
                         IGNORED void **extra)
{
    return stream_add_kernel(launch->stream);
}

API int cuModuleLoadData(void **module, IGNORED const void *image)
{
    *module = SOMETHING;
    return SUCCESS;
}

API int cuModuleLoadDataEx(void **module, const void *image, IGNORED unsigned count, IGNORED void *options,
                           IGNORED void *values)
{
    return cuModuleLoadData(module, image);
}

API int cuModuleLoad(void **module, const char *path) { return cuModuleLoadData(module, path); }

API int cuModuleGetFunction(void **function, IGNORED void *module, IGNORED const char *name)
{
    *function = SOMETHING;
    return SUCCESS;
}

API int cuModuleGetGlobal_v2(void **address, size_t *size, IGNORED void *module, IGNORED const char *name)
{
    static char variable[64 * 1024];
    *address = variable;
    if (size != NULL)
        *size = sizeof variable;
    return SUCCESS;
}

API int cuLibraryLoadData(void **library, const void *image, IGNORED void *jit, IGNORED void *jit_values,
                          IGNORED unsigned jit_count, IGNORED void *options, IGNORED void *values,
                          IGNORED unsigned count)
{
    return cuModuleLoadData(library, image);
}

API int cudaLibraryLoadData(void **library, const void *image, IGNORED void *jit, IGNORED void *jit_values,
                            IGNORED unsigned jit_count, IGNORED void *options, IGNORED void *values,
                            IGNORED unsigned count)
{
    return cuModuleLoadData(library, image);
}

API int cuLibraryGetKernel(void **kernel, void *library, const char *name)
{
    return cuModuleGetFunction(kernel, library, name);
}

API int cudaLibraryGetKernel(void **kernel, void *library, const char *name)
{
    return cuModuleGetFunction(kernel, library, name);
}

API int cuKernelGetFunction(void **function, void *kernel)
{
    *function = kernel;
    return SUCCESS;
}

API int cuLinkCreate_v2(IGNORED unsigned count, IGNORED void *options, IGNORED void *values, void **state)
{
    *state = SOMETHING;
    return SUCCESS;
}

API int cuLinkComplete(IGNORED void *state, void **image, size_t *size)
{
    static char nothing[8];
    *image = nothing;
    *size = sizeof nothing;
    return SUCCESS;
}

enum function_attribute { MAX_THREADS = 0, REGISTERS = 4, PTX_VERSION = 5, BINARY_VERSION = 6, MAX_DYNAMIC_SHARED = 8 };

API int cuFuncGetAttribute(int *value, int attribute, IGNORED void *function)
{
    const struct device *device = device_at(current_device());
    int version = (int)(device->major * 10 + device->minor);
    *value = attribute == MAX_THREADS                                        ? 1024
             : attribute == REGISTERS                                        ? 32
             : attribute == PTX_VERSION || attribute == BINARY_VERSION       ? version
             : attribute == MAX_DYNAMIC_SHARED                               ? (int)device->optin
                                                                             : 0;
    return SUCCESS;
}

API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared);
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *, const void *, int, size_t);

API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared)
{
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}

API int cuOccupancyMaxActiveClusters(int *clusters, IGNORED void *function, IGNORED const void *launch)
{
    *clusters = (int)device_at(current_device())->sms / 8;
    return SUCCESS;
}

API int cudaOccupancyMaxActiveClusters(int *clusters, IGNORED const void *function, IGNORED const void *launch)
{
    return cuOccupancyMaxActiveClusters(clusters, NULL, NULL);
}

/* Objects that a graph keeps alive: here they end with their release. */
API int cudaUserObjectCreate(void **object, IGNORED void *data, IGNORED void (*destroy)(void *), IGNORED unsigned count,
                             IGNORED unsigned flags)
{
    *object = SOMETHING;
    return SUCCESS;
}

API int cudaGraphConditionalHandleCreate(unsigned long long *handle, IGNORED void *graph, IGNORED unsigned value,
                                         IGNORED unsigned flags)
{
    *handle = 1;
    return SUCCESS;
}
