/* cuFFT and NVRTC: plans, versions, and the sizes that a call has to write. */
#include <stdlib.h>
#include <string.h>

#include "abi.h"
#include "dry.h"
#include "sizes.h"

static int handle(void **made)
{
    *made = calloc(1, 512);
    return SUCCESS;
}

SETS_STREAM(cufftSetStream)

/* cufftHandle is a number. */
API int cufftCreate(int *plan)
{
    *plan = 1;
    return SUCCESS;
}

API int cufftXtMakePlanMany(IGNORED int plan, IGNORED int rank, IGNORED void *n, IGNORED void *in, IGNORED long long a,
                            IGNORED long long b, IGNORED int c, IGNORED void *out, IGNORED long long d,
                            IGNORED long long e, IGNORED int f, IGNORED long long batch, size_t *size, IGNORED int type)
{
    *size = 0;
    return SUCCESS;
}

/* Plans are kept and reused, so the missing workspace is recorded at each use. */
API int cufftXtExec(IGNORED int plan, IGNORED void *in, IGNORED void *out, IGNORED int direction)
{
    library_leaves_out("cufftXtExec");
    return SUCCESS;
}

API const char *nvrtcGetErrorString(int status) { return status == 0 ? "NVRTC_SUCCESS" : "NVRTC_ERROR"; }

API int nvrtcVersion(int *major, int *minor)
{
    *major = CUDA_VERSION / 1000;
    *minor = CUDA_VERSION % 1000 / 10;
    return SUCCESS;
}

API int nvrtcCreateProgram(void **program) { return handle(program); }

API int nvrtcDestroyProgram(void **program)
{
    free(*program);
    *program = NULL;
    return SUCCESS;
}

static int one_byte(size_t *size)
{
    *size = 1;
    return SUCCESS;
}

API int nvrtcGetPTXSize(IGNORED void *program, size_t *size) { return one_byte(size); }

API int nvrtcGetCUBINSize(IGNORED void *program, size_t *size) { return one_byte(size); }

API int nvrtcGetProgramLogSize(IGNORED void *program, size_t *size) { return one_byte(size); }

static int empty(char *text)
{
    text[0] = '\0';
    return SUCCESS;
}

API int nvrtcGetPTX(IGNORED void *program, char *text) { return empty(text); }

API int nvrtcGetCUBIN(IGNORED void *program, char *text) { return empty(text); }

API int nvrtcGetProgramLog(IGNORED void *program, char *text) { return empty(text); }

API int nvrtcGetLoweredName(IGNORED void *program, const char *name, const char **lowered)
{
    *lowered = name;
    return SUCCESS;
}
