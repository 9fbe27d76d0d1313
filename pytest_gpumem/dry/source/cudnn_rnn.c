/* cuDNN's recurrent networks: the position of each layer's parameters in their common buffer, which torch reads when it
 * flattens them (get_parameters of aten/src/ATen/native/cudnn/RNN.cpp). Workspace and reserve have the sizes of the
 * simulated device's rule. */
#include <string.h>

#include "abi.h"
#include "cudnn_tensors.h"
#include "dry.h"
#include "libraries.h"

size_t element_size(int type)
{
    /* float, double, half, int8, int32, int8x4, uint8, uint8x4, int8x32, bfloat16, int64, boolean, two of 8 bits */
    static const size_t SIZES[] = {4, 8, 2, 1, 4, 4, 1, 4, 32, 2, 8, 1, 1, 1};
    return type >= 0 && type < (int)(sizeof SIZES / sizeof *SIZES) ? SIZES[type] : 4;
}

API int cudnnSetTensorNdDescriptor(struct tensor *tensor, int type, int count, const int *sizes, const int *strides)
{
    tensor->type = type;
    tensor->count = count < MOST_DIMENSIONS ? count : MOST_DIMENSIONS;
    memcpy(tensor->sizes, sizes, (size_t)tensor->count * sizeof *sizes);
    memcpy(tensor->strides, strides, (size_t)tensor->count * sizeof *strides);
    return SUCCESS;
}

API int cudnnGetTensorNdDescriptor(const struct tensor *tensor, int asked, int *type, int *count, int *sizes,
                                   int *strides)
{
    int known = tensor->count < asked ? tensor->count : asked;
    if (type != NULL)
        *type = tensor->type;
    if (count != NULL)
        *count = tensor->count;
    if (sizes != NULL)
        memcpy(sizes, tensor->sizes, (size_t)known * sizeof *sizes);
    if (strides != NULL)
        memcpy(strides, tensor->strides, (size_t)known * sizeof *strides);
    return SUCCESS;
}

API int cudnnSetFilterNdDescriptor(struct tensor *filter, int type, IGNORED int format, int count, const int *sizes)
{
    return cudnnSetTensorNdDescriptor(filter, type, count, sizes, sizes);
}

API int cudnnGetFilterNdDescriptor(const struct tensor *filter, int asked, int *type, int *format, int *count,
                                   int *sizes)
{
    int strides[MOST_DIMENSIONS];
    *format = 0;
    return cudnnGetTensorNdDescriptor(filter, asked < MOST_DIMENSIONS ? asked : MOST_DIMENSIONS, type, count, sizes,
                                      strides);
}

struct dropout {
    float probability;
};

API int cudnnSetDropoutDescriptor(struct dropout *dropout, IGNORED void *handle, float probability,
                                  IGNORED void *states, IGNORED size_t size, IGNORED unsigned long long seed)
{
    dropout->probability = probability;
    return SUCCESS;
}

API int cudnnRestoreDropoutDescriptor(struct dropout *dropout, void *handle, float probability, void *states,
                                      size_t size, unsigned long long seed)
{
    return cudnnSetDropoutDescriptor(dropout, handle, probability, states, size, seed);
}

enum cell { RELU = 0, TANH = 1, LSTM = 2, GRU = 3 };

struct rnn {
    int cell, type, directions, layers;
    size_t input, hidden, projected; /* projected: the hidden size if there is no projection */
    bool projects, drops;
};

API int cudnnSetRNNDescriptor_v8(struct rnn *rnn, IGNORED int algorithm, int cell, IGNORED int bias, int direction,
                                 IGNORED int input_mode, int type, IGNORED int precision, IGNORED int math, int input,
                                 int hidden, int projected, int layers, const struct dropout *dropout,
                                 IGNORED unsigned flags)
{
    *rnn = (struct rnn){.cell = cell,
                        .type = type,
                        .directions = direction == 0 ? 1 : 2,
                        .layers = layers,
                        .input = (size_t)input,
                        .hidden = (size_t)hidden,
                        .projected = (size_t)projected,
                        .projects = projected != hidden,
                        .drops = dropout != NULL && dropout->probability > 0};
    return SUCCESS;
}

static size_t gates_of(const struct rnn *rnn)
{
    static const size_t GATES[] = {[RELU] = 1, [TANH] = 1, [LSTM] = 4, [GRU] = 3};
    return GATES[rnn->cell];
}

/* A bidirectional layer reads the outputs of both directions of the layer below. */
static size_t input_of(const struct rnn *rnn, int pseudo_layer)
{
    return pseudo_layer < rnn->directions ? rnn->input : rnn->projected * (size_t)rnn->directions;
}

/* Elements of one pseudo layer's matrices: for the input, for the state, and for the projection. */
static size_t matrices_of(const struct rnn *rnn, int pseudo_layer)
{
    size_t columns = input_of(rnn, pseudo_layer) + rnn->projected;
    return gates_of(rnn) * rnn->hidden * columns + (rnn->projects ? rnn->hidden * rnn->projected : 0);
}

static size_t all_matrices(const struct rnn *rnn, int until)
{
    size_t elements = 0;
    for (int layer = 0; layer < until; layer++)
        elements += matrices_of(rnn, layer);
    return elements;
}

API int cudnnGetRNNWeightSpaceSize(IGNORED void *handle, const struct rnn *rnn, size_t *size)
{
    int layers = rnn->layers * rnn->directions;
    size_t biases = 2 * gates_of(rnn) * rnn->hidden * (size_t)layers;
    *size = (all_matrices(rnn, layers) + biases) * element_size(rnn->type);
    return SUCCESS;
}

/* Writes only what the caller has passed pointers for. */
static void tell(struct tensor *tensor, void **place, int type, size_t rows, size_t columns, char *address)
{
    if (tensor != NULL) {
        *tensor = (struct tensor){.type = type};
        if (address != NULL)
            *tensor = (struct tensor){type, 3, {1, (int)rows, (int)columns}, {(int)(rows * columns), (int)columns, 1}};
    }
    if (place != NULL)
        *place = address;
}

/* The matrices of all layers come first, then the biases. In a layer the gates of the input come first, then the gates
 * of the state; the next number is the projection. */
API int cudnnGetRNNWeightParams(IGNORED void *handle, const struct rnn *rnn, int layer, IGNORED size_t size,
                                char *weights, int number, struct tensor *matrix, void **matrix_at, struct tensor *bias,
                                void **bias_at)
{
    size_t gates = gates_of(rnn), gate = (size_t)number, hidden = rnn->hidden;
    size_t input = input_of(rnn, layer), element = element_size(rnn->type);
    bool of_projection = gate == 2 * gates, of_state = gate >= gates;
    bool there = gate < 2 * gates || (of_projection && rnn->projects);
    size_t rows = of_projection ? rnn->projected : hidden;
    size_t columns = of_projection ? hidden : of_state ? rnn->projected : input;
    size_t offset = all_matrices(rnn, layer) + (of_state ? gates : gate) * hidden * input;
    offset += of_state ? (gate - gates) * hidden * rnn->projected : 0;
    tell(matrix, matrix_at, rnn->type, rows, columns, there ? weights + offset * element : NULL);
    offset = all_matrices(rnn, rnn->layers * rnn->directions) + (2 * gates * (size_t)layer + gate) * hidden;
    tell(bias, bias_at, rnn->type, hidden, 1, there && !of_projection ? weights + offset * element : NULL);
    return SUCCESS;
}

struct sequences {
    int64_t batch, longest, rows; /* sequences, steps of the longest, and steps of all of them */
    bool packed;
};

API int cudnnSetRNNDataDescriptor(struct sequences *sequences, IGNORED int type, int layout, int longest, int batch,
                                  IGNORED int size, const int *lengths, IGNORED void *padding)
{
    enum { PACKED = 1 }; /* CUDNN_RNN_DATA_LAYOUT_SEQ_MAJOR_PACKED */
    *sequences = (struct sequences){.batch = batch, .longest = longest, .packed = layout == PACKED};
    for (int i = 0; i < batch; i++)
        sequences->rows += lengths[i];
    return SUCCESS;
}

/* The sentences on workspace and reserve of this thread's last query. */
static __thread int64_t sentences[2];

API int cudnnGetRNNTempSpaceSizes(IGNORED void *handle, const struct rnn *rnn, int mode, const struct sequences *data,
                                  size_t *work, size_t *reserve)
{
    enum { TRAINING = 1 };
    int64_t answers[MOST_ANSWERS];
    int64_t projected = rnn->projects ? (int64_t)rnn->projected : 0;
    int64_t numbers[] = {rnn->cell,
                         rnn->type,
                         (int64_t)rnn->input,
                         (int64_t)rnn->hidden,
                         projected,
                         rnn->layers,
                         rnn->directions,
                         data->batch,
                         data->longest,
                         data->rows,
                         data->packed,
                         rnn->drops,
                         mode == TRAINING};
    library_asks(RECURRENT_BYTES, numbers, sizeof numbers / sizeof *numbers, answers);
    sentences[0] = answers[2];
    sentences[1] = answers[3];
    if (work != NULL)
        *work = (size_t)answers[0];
    if (reserve != NULL)
        *reserve = mode == TRAINING ? (size_t)answers[1] : 0;
    return SUCCESS;
}

static int ran(size_t work_size, const void *work, size_t reserve_size, const void *reserve)
{
    estimate_used(work_size > 0 ? work : NULL, work_size, sentences[0]);
    estimate_used(reserve_size > 0 ? reserve : NULL, reserve_size, sentences[1]);
    return SUCCESS;
}

#define WORD IGNORED long

API int cudnnRNNForward(WORD handle, WORD rnn, IGNORED int mode, WORD lengths, WORD x, WORD x_at, WORD y, WORD y_at,
                        WORD h, WORD hx, WORD hy, WORD c, WORD cx, WORD cy, WORD weight_size, WORD weights,
                        size_t work_size, const void *work, size_t reserve_size, const void *reserve)
{
    return ran(work_size, work, reserve_size, reserve);
}

API int cudnnRNNBackwardData_v8(WORD handle, WORD rnn, WORD lengths, WORD y, WORD y_at, WORD dy, WORD x, WORD dx,
                                WORD h, WORD hx, WORD dhy, WORD dhx, WORD c, WORD cx, WORD dcy, WORD dcx,
                                WORD weight_size, WORD weights, size_t work_size, const void *work, size_t reserve_size,
                                const void *reserve)
{
    return ran(work_size, work, reserve_size, reserve);
}

API int cudnnRNNBackwardWeights_v8(WORD handle, WORD rnn, IGNORED int add, WORD lengths, WORD x, WORD x_at, WORD h,
                                   WORD hx, WORD y, WORD y_at, WORD weight_size, WORD weights, size_t work_size,
                                   const void *work, size_t reserve_size, const void *reserve)
{
    return ran(work_size, work, reserve_size, reserve);
}
