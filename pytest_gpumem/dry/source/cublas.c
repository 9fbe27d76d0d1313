/* cuBLAS and cuBLASLt: handles and descriptors; products compute nothing. torch allocates the libraries' workspaces
 * (aten/src/ATen/cuda/CublasHandlePool.cpp), so the libraries allocate none. */
#include <stdlib.h>
#include <string.h>

#include "abi.h"
#include "dry.h"
#include "sizes.h"

struct handle {
    void *stream;
    int math_mode, pointer_mode;
};

API int cublasCreate_v2(struct handle **handle)
{
    *handle = calloc(1, sizeof **handle);
    return SUCCESS;
}

API int cublasDestroy_v2(struct handle *handle)
{
    free(handle);
    return SUCCESS;
}

/* torch sets the stream before each call (getCurrentCUDABlasHandle), so the call's work becomes a node of a capture. */
API int cublasSetStream_v2(struct handle *handle, void *stream)
{
    handle->stream = stream;
    stream_add_kernel(stream);
    return SUCCESS;
}

API int cublasGetStream_v2(struct handle *handle, void **stream)
{
    *stream = handle->stream;
    return SUCCESS;
}

API int cublasSetMathMode(struct handle *handle, int mode)
{
    handle->math_mode = mode;
    return SUCCESS;
}

API int cublasGetMathMode(struct handle *handle, int *mode)
{
    *mode = handle->math_mode;
    return SUCCESS;
}

API int cublasSetPointerMode_v2(struct handle *handle, int mode)
{
    handle->pointer_mode = mode;
    return SUCCESS;
}

API int cublasGetPointerMode_v2(struct handle *handle, int *mode)
{
    *mode = handle->pointer_mode;
    return SUCCESS;
}

API int cublasGetVersion_v2(IGNORED void *handle, int *version)
{
    *version = CUDA_VERSION * 10;
    return SUCCESS;
}

API const char *cublasGetStatusString(int status)
{
    return status == 0 ? "CUBLAS_STATUS_SUCCESS" : "CUBLAS_STATUS_INTERNAL_ERROR";
}

API size_t cublasLtGetVersion(void) { return CUDA_VERSION * 10; }

API int cublasLtMatmul(AFTER_15, void *stream)
{
    stream_add_kernel(stream);
    return SUCCESS;
}

/* Descriptors of cuBLASLt are passed on and never read. */
static int described(void **descriptor)
{
    *descriptor = calloc(1, 512);
    return SUCCESS;
}

API int cublasLtCreate(void **handle) { return described(handle); }

API int cublasLtMatmulDescCreate(void **descriptor) { return described(descriptor); }

API int cublasLtMatrixLayoutCreate(void **descriptor) { return described(descriptor); }

API int cublasLtMatmulPreferenceCreate(void **descriptor) { return described(descriptor); }

static int dropped(void *descriptor)
{
    free(descriptor);
    return SUCCESS;
}

API int cublasLtDestroy(void *handle) { return dropped(handle); }

API int cublasLtMatmulDescDestroy(void *descriptor) { return dropped(descriptor); }

API int cublasLtMatrixLayoutDestroy(void *descriptor) { return dropped(descriptor); }

API int cublasLtMatmulPreferenceDestroy(void *descriptor) { return dropped(descriptor); }

/* cublasLtMatmulHeuristicResult_t: the algorithm, its workspace, success, waves. */
struct heuristic {
    uint64_t algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

API int cublasLtMatmulAlgoGetHeuristic(IGNORED void *handle, IGNORED void *operation, IGNORED void *a, IGNORED void *b,
                                       IGNORED void *c, IGNORED void *d, IGNORED void *preference, int asked,
                                       struct heuristic *results, int *found)
{
    *found = asked > 0;
    if (asked > 0)
        memset(results, 0, sizeof *results);
    return SUCCESS;
}

/* Batched solvers report to the host whether an argument is wrong; 0: none is. */
#define BATCHED(letter)                                                                                                \
    WRITES(cublas##letter##geqrfBatched, 6, int, 0)                                                                    \
    WRITES(cublas##letter##gelsBatched, 9, int, 0)                                                                     \
    WRITES(cublas##letter##getrsBatched, 9, int, 0)                                                                    \
    ALL_SUCCEED(cublas##letter##getrfBatched, 5)                                                              \
    ALL_SUCCEED(cublas##letter##getriBatched, 7)
BATCHED(S)
BATCHED(D)
BATCHED(C)
BATCHED(Z)
