/* Descriptors of cuDNN that are read again. */
#ifndef CUDNN_TENSORS_H
#define CUDNN_TENSORS_H

#include <stddef.h>

enum { MOST_DIMENSIONS = 8 };

struct tensor {
    int type, count;
    int sizes[MOST_DIMENSIONS], strides[MOST_DIMENSIONS];
};

/* Bytes of an element by cudnnDataType_t. */
size_t element_size(int type);

#endif
