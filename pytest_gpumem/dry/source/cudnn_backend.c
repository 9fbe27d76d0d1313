/* cuDNN's backend, by which torch chooses convolutions since version 8 of the library (cudnn-frontend): descriptors
 * with attributes. Asked for engines it names one, whose plan needs no workspace. */
#include <stdlib.h>
#include <string.h>

#include "abi.h"
#include "dry.h"

enum attribute {
    HEURISTIC_RESULTS = 202,
    PLAN_WORKSPACE = 402,
    ENGINE_COUNT = 802,
};

/* cudnnBackendAttributeType_t */
enum { TYPE_INT64 = 3, TYPE_DESCRIPTOR = 15 };

API int cudnnBackendCreateDescriptor(IGNORED int type, void **descriptor)
{
    *descriptor = calloc(1, 64);
    return SUCCESS;
}

API int cudnnBackendDestroyDescriptor(void *descriptor)
{
    free(descriptor);
    return SUCCESS;
}

API int cudnnBackendGetAttribute(IGNORED void *descriptor, int attribute, int type, int64_t asked, int64_t *count,
                                 void *elements)
{
    bool one = attribute == HEURISTIC_RESULTS || attribute == PLAN_WORKSPACE || attribute == ENGINE_COUNT;
    if (count != NULL)
        *count = one;
    if (!one || asked == 0 || elements == NULL)
        return SUCCESS;
    /* The caller made the descriptors of the results beforehand. */
    if (type == TYPE_INT64)
        *(int64_t *)elements = attribute == ENGINE_COUNT;
    return SUCCESS;
}
