/* cuSOLVER: handles, and the sizes of workspaces, which only the library knows: here it asks for none.
 * Source of the arguments' places: "cuSOLVER API Reference", 12.4 and 13.2. */
#include "sizes.h"

CREATES(cusolverDnCreate)
DESTROYS(cusolverDnDestroy)
CREATES(cusolverDnCreateParams)
DESTROYS(cusolverDnDestroyParams)
CREATES(cusolverDnCreateGesvdjInfo)
DESTROYS(cusolverDnDestroyGesvdjInfo)
CREATES(cusolverDnCreateSyevjInfo)
DESTROYS(cusolverDnDestroySyevjInfo)

#define REAL(routine, count)                                                                                           \
    WRITES(cusolverDnS##routine##_bufferSize, count, int, 0)                                                           \
    WRITES(cusolverDnD##routine##_bufferSize, count, int, 0)
#define COMPLEX(routine, count)                                                                                        \
    WRITES(cusolverDnC##routine##_bufferSize, count, int, 0)                                                           \
    WRITES(cusolverDnZ##routine##_bufferSize, count, int, 0)
#define ALL(routine, count) REAL(routine, count) COMPLEX(routine, count)

ALL(potrf, 5)
ALL(getrf, 5)
ALL(geqrf, 5)
ALL(sytrf, 4)
ALL(gesvd, 3)
ALL(gesvdj, 12)
ALL(gesvdjBatched, 11)
ALL(gesvdaStridedBatched, 16)
REAL(orgqr, 7)
COMPLEX(ungqr, 7)
REAL(ormqr, 11)
COMPLEX(unmqr, 11)
REAL(syevd, 7)
COMPLEX(heevd, 7)
REAL(syevj, 7)
COMPLEX(heevj, 7)
REAL(syevjBatched, 7)
COMPLEX(heevjBatched, 7)

WRITES_BOTH(cusolverDnXpotrf_bufferSize, 8)
WRITES_BOTH(cusolverDnXgetrf_bufferSize, 8)
WRITES_BOTH(cusolverDnXgeqrf_bufferSize, 10)
WRITES_BOTH(cusolverDnXsytrs_bufferSize, 11)
WRITES_BOTH(cusolverDnXsyevd_bufferSize, 11)
WRITES_BOTH(cusolverDnXsyevBatched_bufferSize, 11)
WRITES_BOTH(cusolverDnXgeev_bufferSize, 17)
