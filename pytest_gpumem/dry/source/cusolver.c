/* cuSOLVER: handles, and the sizes of workspaces. Only the library knows them: here they are from the simulated
 * device's table, else 0.
 * Source of the arguments' places: "cuSOLVER API Reference", 12.4 and 13.2. */
#include "sizes.h"

CREATES(cusolverDnCreate)
SETS_STREAM(cusolverDnSetStream)
DESTROYS(cusolverDnDestroy)
CREATES(cusolverDnCreateParams)
DESTROYS(cusolverDnDestroyParams)
CREATES(cusolverDnCreateGesvdjInfo)
DESTROYS(cusolverDnDestroyGesvdjInfo)
CREATES(cusolverDnCreateSyevjInfo)
DESTROYS(cusolverDnDestroySyevjInfo)

/* The order of ROUTINES in simulated/operators/cusolver.py, of CUDA 13. */
enum routine { POTRF, GETRF, GEQRF, ORGQR, SYTRF, GESVDJ, GESVDJ_BATCHED };

static size_t workspace_of(const char *name, enum routine routine, bool is_known, int64_t rows, int64_t columns,
                           size_t size)
{
    const struct device *device = device_at(current_device());
    int64_t numbers[] = {routine, device->major, device->minor, rows, columns, (int64_t)size};
    int64_t answers[MOST_ANSWERS];
    int count = sizeof numbers / sizeof *numbers;
    if (CUDA_VERSION >= 13000 && is_known && library_asks(SOLVER_BYTES, numbers, count, answers) && answers[0] >= 0)
        return (size_t)answers[0];
    library_leaves_out(name);
    return 0;
}

/* The size in elements, for a matrix whose rows and columns are among the arguments. */
#define SIZED(name, count, routine, is_known, rows, columns, size)                                                     \
    API int name(AFTER_##count, int *written)                                                                          \
    {                                                                                                                  \
        *written = (int)(workspace_of(#name, routine, is_known, (int)(rows), (int)(columns), size) / (size));          \
        return 0;                                                                                                      \
    }
#define SIZED_REAL(routine, count, kind, is_known, rows, columns)                                                      \
    SIZED(cusolverDnS##routine##_bufferSize, count, kind, is_known, rows, columns, 4)                                   \
    SIZED(cusolverDnD##routine##_bufferSize, count, kind, is_known, rows, columns, 8)
#define SIZED_COMPLEX(routine, count, kind, is_known, rows, columns)                                                   \
    SIZED(cusolverDnC##routine##_bufferSize, count, kind, is_known, rows, columns, 8)                                   \
    SIZED(cusolverDnZ##routine##_bufferSize, count, kind, is_known, rows, columns, 16)
#define SIZED_ALL(routine, count, kind, is_known, rows, columns)                                                       \
    SIZED_REAL(routine, count, kind, is_known, rows, columns)                                                          \
    SIZED_COMPLEX(routine, count, kind, is_known, rows, columns)

/* By cudaDataType: real and complex numbers of four and eight bytes. */
static size_t bytes_of(long type)
{
    static const size_t BYTES[] = {[0] = 4, [1] = 8, [4] = 8, [5] = 16};
    return BYTES[(size_t)type % (sizeof BYTES / sizeof *BYTES)];
}

#define SIZED_BOTH(name, count, routine, rows, columns, type)                                                          \
    API int name(AFTER_##count, size_t *on_device, size_t *on_host)                                                    \
    {                                                                                                                  \
        *on_device = workspace_of(#name, routine, true, rows, columns, bytes_of((int)(type)));                         \
        *on_host = 0;                                                                                                  \
        return 0;                                                                                                      \
    }

#define REAL(routine, count)                                                                                           \
    LEAVES_OUT(cusolverDnS##routine##_bufferSize, count, int)                                                           \
    LEAVES_OUT(cusolverDnD##routine##_bufferSize, count, int)
#define COMPLEX(routine, count)                                                                                        \
    LEAVES_OUT(cusolverDnC##routine##_bufferSize, count, int)                                                           \
    LEAVES_OUT(cusolverDnZ##routine##_bufferSize, count, int)
#define ALL(routine, count) REAL(routine, count) COMPLEX(routine, count)

ALL(potrf, 5)
SIZED_ALL(getrf, 5, GETRF, true, b, c)
ALL(geqrf, 5)
SIZED_ALL(sytrf, 4, SYTRF, true, b, b)
ALL(gesvd, 3)
SIZED_ALL(gesvdj, 12, GESVDJ, (int)c == 1, d, e)
SIZED_ALL(gesvdjBatched, 11, GESVDJ_BATCHED, true, c, d)
ALL(gesvdaStridedBatched, 16)
SIZED_REAL(orgqr, 7, ORGQR, (int)c == (int)d, b, c)
SIZED_COMPLEX(ungqr, 7, ORGQR, (int)c == (int)d, b, c)
REAL(ormqr, 11)
COMPLEX(unmqr, 11)
REAL(syevd, 7)
COMPLEX(heevd, 7)
REAL(syevj, 7)
COMPLEX(heevj, 7)
REAL(syevjBatched, 7)
COMPLEX(heevjBatched, 7)

SIZED_BOTH(cusolverDnXpotrf_bufferSize, 8, POTRF, d, d, e)
LEAVES_OUT_BOTH(cusolverDnXgetrf_bufferSize, 8)
SIZED_BOTH(cusolverDnXgeqrf_bufferSize, 10, GEQRF, c, d, e)
LEAVES_OUT_BOTH(cusolverDnXsytrs_bufferSize, 11)
LEAVES_OUT_BOTH(cusolverDnXsyevd_bufferSize, 11)
LEAVES_OUT_BOTH(cusolverDnXsyevBatched_bufferSize, 11)
LEAVES_OUT_BOTH(cusolverDnXgeev_bufferSize, 17)

#define REAL_SUCCEEDS(routine, count)                                                                                  \
    SUCCEEDS(cusolverDnS##routine, count)                                                                              \
    SUCCEEDS(cusolverDnD##routine, count)
#define COMPLEX_SUCCEEDS(routine, count)                                                                               \
    SUCCEEDS(cusolverDnC##routine, count)                                                                              \
    SUCCEEDS(cusolverDnZ##routine, count)
#define BOTH_SUCCEED(routine, count) REAL_SUCCEEDS(routine, count) COMPLEX_SUCCEEDS(routine, count)

BOTH_SUCCEED(potrf, 7)
BOTH_SUCCEED(potrs, 8)
BOTH_SUCCEED(getrf, 7)
BOTH_SUCCEED(getrs, 9)
BOTH_SUCCEED(geqrf, 8)
BOTH_SUCCEED(sytrf, 8)
BOTH_SUCCEED(gesvd, 15)
BOTH_SUCCEED(gesvdj, 14)
REAL_SUCCEEDS(orgqr, 9)
COMPLEX_SUCCEEDS(ungqr, 9)
REAL_SUCCEEDS(ormqr, 13)
COMPLEX_SUCCEEDS(unmqr, 13)
REAL_SUCCEEDS(syevd, 9)
COMPLEX_SUCCEEDS(heevd, 9)
ALL_SUCCEED(cusolverDnSpotrfBatched, 5)
ALL_SUCCEED(cusolverDnDpotrfBatched, 5)
ALL_SUCCEED(cusolverDnCpotrfBatched, 5)
ALL_SUCCEED(cusolverDnZpotrfBatched, 5)
ALL_SUCCEED_BY_SETTINGS(cusolverDnSgesvdjBatched, 13)
ALL_SUCCEED_BY_SETTINGS(cusolverDnDgesvdjBatched, 13)
ALL_SUCCEED_BY_SETTINGS(cusolverDnCgesvdjBatched, 13)
ALL_SUCCEED_BY_SETTINGS(cusolverDnZgesvdjBatched, 13)
ALL_SUCCEED_BY_SETTINGS(cusolverDnSgesvdaStridedBatched, 18)
ALL_SUCCEED_BY_SETTINGS(cusolverDnDgesvdaStridedBatched, 18)
ALL_SUCCEED_BY_SETTINGS(cusolverDnCgesvdaStridedBatched, 18)
ALL_SUCCEED_BY_SETTINGS(cusolverDnZgesvdaStridedBatched, 18)
ALL_SUCCEED_BY_SETTINGS(cusolverDnSsyevjBatched, 9)
ALL_SUCCEED_BY_SETTINGS(cusolverDnDsyevjBatched, 9)
ALL_SUCCEED_BY_SETTINGS(cusolverDnCheevjBatched, 9)
ALL_SUCCEED_BY_SETTINGS(cusolverDnZheevjBatched, 9)
ALL_SUCCEED(cusolverDnXsyevBatched, 15)

SUCCEEDS(cusolverDnXpotrf, 12)
SUCCEEDS(cusolverDnXgetrf, 13)
SUCCEEDS(cusolverDnXgeqrf, 14)
SUCCEEDS(cusolverDnXsyevd, 15)
SUCCEEDS(cusolverDnXsytrs, 15)
SUCCEEDS(cusolverDnXgeev, 21)
