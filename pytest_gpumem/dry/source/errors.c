/* Errors: the last one of each thread, and their names. */
#include "abi.h"
#include "dry.h"

static __thread int last_error;

int fail(int error)
{
    last_error = error;
    return error;
}

API int cudaGetLastError(void)
{
    int error = last_error;
    last_error = SUCCESS;
    return error;
}

API int cudaPeekAtLastError(void) { return last_error; }

/* The texts of cudaGetErrorString in the manuals; torch prints them after "CUDA error: ". */
static const struct named_error {
    int number;
    const char *runtime_name, *driver_name, *text;
} ERRORS[] = {
    {SUCCESS, "cudaSuccess", "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "cudaErrorInvalidValue", "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {INVALID_DEVICE, "cudaErrorInvalidDevice", "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_HANDLE, "cudaErrorInvalidResourceHandle", "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "cudaErrorSymbolNotFound", "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "cudaErrorNotReady", "CUDA_ERROR_NOT_READY", "device not ready"},
    {PEER_ALREADY_ENABLED, "cudaErrorPeerAccessAlreadyEnabled", "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
     "peer access is already enabled"},
    {HOST_ALREADY_REGISTERED, "cudaErrorHostMemoryAlreadyRegistered", "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {HOST_NOT_REGISTERED, "cudaErrorHostMemoryNotRegistered", "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {NOT_SUPPORTED, "cudaErrorNotSupported", "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CAPTURE_UNSUPPORTED, "cudaErrorStreamCaptureUnsupported", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "cudaErrorStreamCaptureInvalidated", "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
};

static const struct named_error *named(int number)
{
    static const struct named_error unknown = {-1, "cudaErrorUnknown", "CUDA_ERROR_UNKNOWN", "unknown error"};
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (ERRORS[i].number == number)
            return &ERRORS[i];
    return &unknown;
}

API const char *cudaGetErrorString(int error) { return named(error)->text; }

API const char *cudaGetErrorName(int error) { return named(error)->runtime_name; }

API int cuGetErrorString(int error, const char **text)
{
    *text = named(error)->text;
    return SUCCESS;
}

API int cuGetErrorName(int error, const char **name)
{
    *name = named(error)->driver_name;
    return SUCCESS;
}
