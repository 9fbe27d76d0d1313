/* NCCL for one rank of several, without the other ranks. An all-gather of few bytes writes this rank's data to each
 * rank's slot, so that DDP finds equal parameters on all ranks. So does a group of broadcasts, one from each rank, by
 * which torch gathers into separate tensors (ProcessGroupNCCL::allgather of torch/csrc/distributed/c10d). A sum of few
 * numbers is a multiple of this rank's numbers. The results of other collectives are unknown. */
#include <stdlib.h>
#include <string.h>

#include "abi.h"
#include "dry.h"

struct communicator {
    int ranks, rank, device;
};

API int ncclGetVersion(int *version)
{
    *version = NCCL_VERSION;
    return SUCCESS;
}

API const char *ncclGetErrorString(int error) { return error == 0 ? "no error" : "internal error"; }

API const char *ncclGetLastError(IGNORED void *communicator) { return ""; }

/* ncclUniqueId has 128 bytes, and is passed by value. */
struct unique_id {
    char bytes[128];
};

API int ncclGetUniqueId(struct unique_id *id)
{
    memset(id, 0, sizeof *id);
    return SUCCESS;
}

static int communicate(struct communicator **made, int ranks, int rank)
{
    struct communicator *communicator = malloc(sizeof *communicator);
    if (communicator == NULL)
        return 2; /* ncclSystemError */
    *communicator = (struct communicator){ranks, rank, current_device()};
    *made = communicator;
    return SUCCESS;
}

API int ncclCommInitRank(struct communicator **made, int ranks, IGNORED struct unique_id id, int rank)
{
    return communicate(made, ranks, rank);
}

API int ncclCommInitRankConfig(struct communicator **made, int ranks, IGNORED struct unique_id id, int rank,
                               IGNORED void *config)
{
    return communicate(made, ranks, rank);
}

API int ncclCommInitRankScalable(struct communicator **made, int ranks, int rank, IGNORED int ids,
                                 IGNORED struct unique_id *id, IGNORED void *config)
{
    return communicate(made, ranks, rank);
}

/* A color below zero gives no communicator. The size of the new communicator is unknown; that of the whole is used. */
API int ncclCommSplit(struct communicator *whole, int color, int key, struct communicator **made, IGNORED void *config)
{
    *made = NULL;
    return color < 0 ? SUCCESS : communicate(made, whole->ranks, key < whole->ranks ? key : whole->rank);
}

API int ncclCommInitAll(struct communicator **made, int count, const int *devices)
{
    for (int i = 0; i < count; i++) {
        communicate(&made[i], count, i);
        made[i]->device = devices == NULL ? i : devices[i];
    }
    return SUCCESS;
}

API int ncclCommDestroy(struct communicator *communicator)
{
    free(communicator);
    return SUCCESS;
}

API int ncclCommAbort(struct communicator *communicator) { return ncclCommDestroy(communicator); }

API int ncclCommCount(const struct communicator *communicator, int *count)
{
    *count = communicator->ranks;
    return SUCCESS;
}

API int ncclCommUserRank(const struct communicator *communicator, int *rank)
{
    *rank = communicator->rank;
    return SUCCESS;
}

API int ncclCommGetAsyncError(IGNORED struct communicator *communicator, int *error)
{
    *error = SUCCESS;
    return SUCCESS;
}

API int ncclMemAlloc(void **address, size_t size)
{
    *address = memory_take(size, DEVICE_MEMORY, current_device());
    return *address == NULL ? 1 : SUCCESS; /* ncclUnhandledCudaError */
}

API int ncclMemFree(void *address)
{
    memory_give(address, DEVICE_MEMORY);
    return SUCCESS;
}

/* ncclDataType_t: int8, uint8, int32, uint32, int64, uint64, half, float, double, bfloat16, two of 8 bits */
static size_t all_bytes_of(size_t count, int type)
{
    static const size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && type < 12 ? count * SIZES[type] : 0;
}

static size_t bytes_of(size_t count, int type)
{
    size_t size = all_bytes_of(count, type);
    return size <= 64 * KIB ? size : 0;
}

/* If operators are followed, Python writes the results of collectives: pytest_gpumem/dry/values/libraries.py. */
static int receive(const void *received, size_t count, int type, void *stream)
{
    stream_add_node(stream);
    if (!written_is_followed())
        written_drop(received, all_bytes_of(count, type));
    return SUCCESS;
}

#define MULTIPLY(kind)                           \
    for (size_t at = 0; at < count; at++)        \
    ((kind *)numbers)[at] *= (kind)factor

/* Multiplies known numbers; returns whether it did. C has no type for half precision. */
static bool multiply(void *numbers, size_t count, int type, int factor)
{
    size_t size = bytes_of(count, type);
    if (size == 0 || !written_has(numbers, size))
        return false;
    switch (type) {
    case 0: MULTIPLY(int8_t); break;
    case 1: MULTIPLY(uint8_t); break;
    case 2: MULTIPLY(int32_t); break;
    case 3: MULTIPLY(uint32_t); break;
    case 4: MULTIPLY(int64_t); break;
    case 5: MULTIPLY(uint64_t); break;
    case 7: MULTIPLY(float); break;
    case 8: MULTIPLY(double); break;
    default: return false;
    }
    return true;
}

enum { SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE, MADE }; /* ncclRedOp_t */
static __thread int reduction;

/* The reduction of the last call; a sum if torch has called no reduction since it was asked for. */
API int pytest_gpumem_dry_reduction(void)
{
    int last = reduction;
    reduction = SUM;
    return last;
}

/* Operations that multiply by a factor have the numbers after those of ncclRedOp_t. */
API int ncclRedOpCreatePreMulSum(int *operation, IGNORED void *factor, IGNORED int type, IGNORED int residence,
                                  IGNORED const struct communicator *communicator)
{
    *operation = MADE;
    return SUCCESS;
}

/* The average and the extremes of equal numbers are the same number. */
API int ncclAllReduce(const void *sent, void *received, size_t count, int type, int operation,
                      const struct communicator *communicator, void *stream)
{
    reduction = operation;
    int ranks = communicator == NULL ? 1 : communicator->ranks;
    bool known = ranks == 1 || (operation >= MAXIMUM && operation <= AVERAGE);
    if (written_is_followed() || (!known && operation != SUM))
        return receive(received, count, type, stream);
    if (sent != received)
        memory_copy(received, sent, all_bytes_of(count, type));
    if (!known && !multiply(received, count, type, ranks))
        return receive(received, count, type, stream);
    stream_add_node(stream);
    return SUCCESS;
}

/* Ranks other than the root receive nothing, and may pass NULL. */
API int ncclReduce(const void *sent, void *received, size_t count, int type, int operation, int root,
                   const struct communicator *communicator, void *stream)
{
    reduction = operation;
    if (communicator != NULL && root != communicator->rank) {
        stream_add_node(stream);
        return SUCCESS;
    }
    return ncclAllReduce(sent, received, count, type, operation, communicator, stream);
}

API int ncclReduceScatter(IGNORED const void *sent, void *received, size_t count, int type, int operation,
                          IGNORED const struct communicator *communicator, void *stream)
{
    reduction = operation;
    return receive(received, count, type, stream);
}

API int ncclRecv(void *received, size_t count, int type, IGNORED int peer,
                 IGNORED const struct communicator *communicator, void *stream)
{
    return receive(received, count, type, stream);
}

API int ncclAllGather(const void *sent, char *received, size_t count, int type, const struct communicator *communicator,
                      void *stream)
{
    size_t size = bytes_of(count, type);
    stream_add_node(stream);
    for (int rank = 0; size > 0 && communicator != NULL && rank < communicator->ranks; rank++)
        memory_copy(received + (size_t)rank * size, sent, size);
    return SUCCESS;
}

/* The broadcasts of a group: the target of each, and the data that this rank sends. */
enum { MOST_BROADCASTS = 1024 };
static __thread struct {
    int depth, count;
    struct {
        void *received;
        size_t size;
    } broadcasts[MOST_BROADCASTS];
    const void *sent;
    size_t size;
} group;

API int ncclGroupStart(void)
{
    if (group.depth++ == 0) {
        group.count = 0;
        group.sent = NULL;
    }
    return SUCCESS;
}

API int ncclBroadcast(const void *sent, void *received, size_t count, int type, int root,
                      const struct communicator *communicator, void *stream)
{
    stream_add_node(stream);
    if (communicator != NULL && root == communicator->rank) {
        memory_copy(received, sent, bytes_of(count, type));
        group.sent = sent;
        group.size = bytes_of(count, type);
    } else if (group.depth > 0 && group.count < MOST_BROADCASTS) {
        group.broadcasts[group.count].received = received;
        group.broadcasts[group.count++].size = bytes_of(count, type);
    }
    return SUCCESS;
}

API int ncclGroupEnd(void)
{
    if (--group.depth > 0 || group.sent == NULL)
        return SUCCESS;
    for (int i = 0; i < group.count; i++)
        if (group.broadcasts[i].size == group.size)
            memory_copy(group.broadcasts[i].received, group.sent, group.size);
    return SUCCESS;
}
