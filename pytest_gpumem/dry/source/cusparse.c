/* cuSPARSE and cuSPARSELt: handles, descriptors, and the sizes of workspaces. Only the library knows these: here they
 * are 0. Products of sparse matrices have no entries.
 * Source of the arguments' places: "cuSPARSE API Reference" 12.4 and 13.2, "cuSPARSELt API Reference" 0.8. */
#include "sizes.h"

CREATES(cusparseCreate)
SETS_STREAM(cusparseSetStream)
DESTROYS(cusparseDestroy)
CREATES(cusparseCreateMatDescr)
DESTROYS(cusparseDestroyMatDescr)
CREATES(cusparseCreateBsrsm2Info)
DESTROYS(cusparseDestroyBsrsm2Info)
CREATES(cusparseCreateBsrsv2Info)
DESTROYS(cusparseDestroyBsrsv2Info)
CREATES(cusparseCreateCsr)
CREATES(cusparseCreateCoo)
DESTROYS(cusparseDestroySpMat)
CREATES(cusparseCreateDnMat)
DESTROYS(cusparseDestroyDnMat)
CREATES(cusparseCreateDnVec)
DESTROYS(cusparseDestroyDnVec)
CREATES(cusparseSpGEMM_createDescr)
DESTROYS(cusparseSpGEMM_destroyDescr)
CREATES(cusparseSpSM_createDescr)
DESTROYS(cusparseSpSM_destroyDescr)
CREATES(cusparseSpSV_createDescr)
DESTROYS(cusparseSpSV_destroyDescr)

API const char *cusparseGetErrorString(int status) { return status == 0 ? "success" : "internal error"; }

#define ALL(routine, count, type)                                                                                      \
    LEAVES_OUT(cusparseS##routine, count, type)                                                                        \
    LEAVES_OUT(cusparseD##routine, count, type)                                                                        \
    LEAVES_OUT(cusparseC##routine, count, type)                                                                        \
    LEAVES_OUT(cusparseZ##routine, count, type)

ALL(csrgeam2_bufferSizeExt, 19, size_t)
ALL(bsrsm2_bufferSize, 13, int)
ALL(bsrsv2_bufferSize, 11, int)
WRITES(cusparseXcsrgeam2Nnz, 13, int, 0)
LEAVES_OUT(cusparseXcoosort_bufferSizeExt, 6, size_t)
LEAVES_OUT(cusparseXcsrsort_bufferSizeExt, 6, size_t)
LEAVES_OUT(cusparseSpMV_bufferSize, 9, size_t)
LEAVES_OUT(cusparseSpSV_bufferSize, 9, size_t)
LEAVES_OUT(cusparseSpMM_bufferSize, 10, size_t)
LEAVES_OUT(cusparseSDDMM_bufferSize, 10, size_t)
LEAVES_OUT(cusparseSpSM_bufferSize, 10, size_t)
LEAVES_OUT(cusparseSpGEMM_workEstimation, 11, size_t)
LEAVES_OUT(cusparseSpGEMM_compute, 11, size_t)

API int cusparseSpMatGetSize(IGNORED void *matrix, int64_t *rows, int64_t *columns, int64_t *entries)
{
    *rows = *columns = *entries = 0;
    return 0;
}

LEAVES_OUT(cusparseLtMatmulGetWorkspace, 2, size_t)
WRITES(cusparseLtMatmulAlgGetAttribute, 3, int, 0)

/* A descriptor begins with the bytes of its compressed matrix: half of the values, and their positions. That is 9 of 16
 * bytes, and 10 of 16 for values of one byte (compression_factor of torch's cuSPARSELtOps.cpp). */
API int cusparseLtStructuredDescriptorInit(WORD handle, size_t *made, int64_t rows, int64_t columns, WORD leading,
                                           WORD alignment, int type)
{
    enum { FLOAT = 0, HALF = 2, BFLOAT = 14 }; /* cudaDataType */
    size_t size = type == FLOAT ? 4 : type == HALF || type == BFLOAT ? 2 : 1;
    *made = (size_t)(rows * columns) * size * (size == 1 ? 10 : 9) / 16;
    return 0;
}

API int cusparseLtSpMMACompressedSize2(WORD handle, const size_t *matrix, size_t *compressed, size_t *buffer)
{
    *compressed = *matrix;
    *buffer = 0;
    library_leaves_out("cusparseLtSpMMACompressedSize2");
    return 0;
}
