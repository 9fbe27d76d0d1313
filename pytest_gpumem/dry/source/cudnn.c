/* cuDNN: versions, handles, descriptors. */
#include <stdlib.h>
#include <string.h>

#include "abi.h"
#include "dry.h"
#include "sizes.h"

/* CUDNN_VERSION_PARTS is "9, 26, 0". torch refuses a library older than the one it was built for
 * (torch/backends/cudnn/__init__.py). Before cuDNN 9 the version number had another format. */
static const int VERSION[] = {CUDNN_VERSION_PARTS};

API size_t cudnnGetVersion(void)
{
    size_t thousands = VERSION[0] >= 9 ? 10000 : 1000;
    return (size_t)VERSION[0] * thousands + (size_t)VERSION[1] * 100 + (size_t)VERSION[2];
}

API size_t cudnnGetCudartVersion(void) { return CUDA_VERSION; }

/* libraryPropertyType: 0 major, 1 minor, 2 patch level. */
API int cudnnGetProperty(int part, int *value)
{
    *value = part >= 0 && part < 3 ? VERSION[part] : 0;
    return SUCCESS;
}

API const char *cudnnGetErrorString(int status)
{
    return status == 0 ? "CUDNN_STATUS_SUCCESS" : "CUDNN_STATUS_INTERNAL_ERROR";
}

API void cudnnGetLastErrorString(char *text, size_t size)
{
    if (size > 0)
        text[0] = '\0';
}

/* Handles and descriptors without content; descriptors that are read again are in other files. */
static int described(void **descriptor)
{
    *descriptor = calloc(1, 512);
    return SUCCESS;
}

API int cudnnCreate(void **handle) { return described(handle); }

SETS_STREAM(cudnnSetStream)

API int cudnnGetStream(IGNORED void *handle, void **stream)
{
    *stream = NULL;
    return SUCCESS;
}

#define DESCRIPTOR(name)                                                                                               \
    API int cudnnCreate##name##Descriptor(void **descriptor) { return described(descriptor); }                         \
    API int cudnnDestroy##name##Descriptor(void *descriptor)                                                           \
    {                                                                                                                  \
        free(descriptor);                                                                                              \
        return SUCCESS;                                                                                                \
    }

DESCRIPTOR(Activation)
DESCRIPTOR(CTCLoss)
DESCRIPTOR(Convolution)
DESCRIPTOR(Dropout)
DESCRIPTOR(Filter)
DESCRIPTOR(Pooling)
DESCRIPTOR(RNNData)
DESCRIPTOR(RNN)
DESCRIPTOR(SpatialTransformer)
DESCRIPTOR(Tensor)

/* Sizes of workspaces that a call has to write: 0. */
WRITES(cudnnGetConvolutionForwardWorkspaceSize, 6, size_t, 0)
WRITES(cudnnGetConvolutionBackwardDataWorkspaceSize, 6, size_t, 0)
WRITES(cudnnGetConvolutionBackwardFilterWorkspaceSize, 6, size_t, 0)
WRITES(cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize, 8, size_t, 0)
WRITES(cudnnGetBatchNormalizationBackwardExWorkspaceSize, 10, size_t, 0)
WRITES(cudnnGetBatchNormalizationTrainingExReserveSpaceSize, 5, size_t, 0)
LEAVES_OUT(cudnnGetCTCLossWorkspaceSize, 8, size_t)
LEAVES_OUT(cudnnGetCTCLossWorkspaceSize_v8, 5, size_t)

static bool has_dropout_state[MOST_DEVICES], dropout_states_are_empty;

/* dropout_state_bytes of simulated/gpu/workspaces.py. */
API int cudnnDropoutGetStatesSize(IGNORED void *handle, size_t *size)
{
    const struct device *device = device_at(current_device());
    *size = dropout_states_are_empty ? 0 : (size_t)device->sms * 1024 * 48;
    has_dropout_state[current_device()] = !dropout_states_are_empty;
    return SUCCESS;
}

/* Whether torch may keep a dropout state for the device. */
API int pytest_gpumem_dry_has_dropout_state(int device) { return has_dropout_state[device]; }

/* Let the size of dropout states be 0 from now on, or the real size again. */
API void pytest_gpumem_dry_empty_dropout_states(int are_empty) { dropout_states_are_empty = are_empty; }
