/* cuDNN's backend interface, by which torch chooses convolutions since cuDNN 8 (cudnn-frontend): descriptors with
 * attributes. The heuristics return two engines: the first one's plan has the workspace of the simulated device's rule;
 * the second one's, which torch tries if memory is short, has none. A graph with matrix products is attention: torch
 * makes no other.
 * Source of the numbers: "cuDNN Backend API", cudnnBackendAttributeName_t and cudnnBackendAttributeType_t. */
#include <stdlib.h>
#include <string.h>

#include "abi.h"
#include "dry.h"
#include "libraries.h"

enum attribute_name {
    DILATIONS = 102,
    FILTER_STRIDES = 103,
    HEURISTIC_GRAPH = 201,
    HEURISTIC_RESULTS = 202,
    SHARED_MEMORY_USED = 304,
    PLAN_CONFIGURATION = 401,
    PLAN_WORKSPACE = 402,
    FORWARD_CONVOLUTION = 702,
    INPUT_CONVOLUTION = 708,
    WEIGHT_CONVOLUTION = 714,
    GRAPH_OPERATIONS = 801,
    ENGINE_COUNT = 802,
    DATA_TYPE = 901,
    DIMENSIONS = 902,
    STRIDES = 903,
    PACK_WORKSPACE = 1003,
};

enum { MOST_ATTRIBUTES = 16, MOST_VALUES = 8, MOST_NUMBERS = 5 + 8 * MOST_VALUES };

struct attribute {
    int name;
    int64_t count;
    int64_t values[MOST_VALUES];
};

enum descriptor_type { MATMUL = 19, ATTENTION = 41, ATTENTION_BACKWARD = 43 };

/* The query for the rule, on a convolution or attention; empty for other operations. */
struct asked {
    enum question question;
    int count;
    int64_t numbers[MOST_NUMBERS];
};

struct descriptor {
    int count;
    struct attribute attributes[MOST_ATTRIBUTES];
    struct asked asked;
    bool is_answered;
    int64_t workspace, sentence;
};

API int cudnnBackendCreateDescriptor(int type, void **place)
{
    struct descriptor *descriptor = *place = calloc(1, sizeof(struct descriptor));
    if (type == MATMUL || type == ATTENTION || type == ATTENTION_BACKWARD)
        descriptor->asked = (struct asked){.question = ATTENTION_BYTES, .count = 1};
    return SUCCESS;
}

API int cudnnBackendDestroyDescriptor(void *descriptor)
{
    free(descriptor);
    return SUCCESS;
}

static const struct attribute *attribute_of(const struct descriptor *descriptor, int name)
{
    for (int i = 0; descriptor != NULL && i < descriptor->count; i++)
        if (descriptor->attributes[i].name == name)
            return &descriptor->attributes[i];
    return NULL;
}

static struct descriptor *descriptor_of(const struct descriptor *descriptor, int name, int64_t index)
{
    const struct attribute *found = attribute_of(descriptor, name);
    return found == NULL || index >= found->count ? NULL : (struct descriptor *)(intptr_t)found->values[index];
}

static void append(struct asked *asked, const struct descriptor *descriptor, int name, int64_t count)
{
    const struct attribute *found = attribute_of(descriptor, name);
    for (int64_t i = 0; i < count && asked->count < MOST_NUMBERS; i++)
        asked->numbers[asked->count++] = found == NULL || i >= found->count ? 0 : found->values[i];
}

/* Capability, direction, type and dimensions; then sizes of input, weight and output, strides of the first two,
 * strides of the convolution and its dilations. */
static struct asked asked_of(const struct descriptor *operation)
{
    static const struct {
        int convolution, weight, input, output;
    } DIRECTIONS[] = {
        {FORWARD_CONVOLUTION, 703, 704, 705}, {INPUT_CONVOLUTION, 709, 710, 711}, {WEIGHT_CONVOLUTION, 715, 716, 717}};
    struct asked asked = {.question = CONVOLUTION_BYTES};
    for (int i = 0; i < 3; i++) {
        const struct descriptor *convolution = descriptor_of(operation, DIRECTIONS[i].convolution, 0);
        const struct descriptor *input = descriptor_of(operation, DIRECTIONS[i].input, 0);
        const struct descriptor *weight = descriptor_of(operation, DIRECTIONS[i].weight, 0);
        const struct descriptor *output = descriptor_of(operation, DIRECTIONS[i].output, 0);
        const struct attribute *sizes = attribute_of(input, DIMENSIONS);
        const struct device *device = device_at(current_device());
        if (convolution == NULL || sizes == NULL || device == NULL)
            continue;
        int64_t dimensions = sizes->count;
        asked.count = 3;
        memcpy(asked.numbers, (int64_t[]){device->major, device->minor, i}, 3 * sizeof *asked.numbers);
        append(&asked, input, DATA_TYPE, 1);
        asked.numbers[asked.count++] = dimensions;
        append(&asked, input, DIMENSIONS, dimensions);
        append(&asked, weight, DIMENSIONS, dimensions);
        append(&asked, output, DIMENSIONS, dimensions);
        append(&asked, input, STRIDES, dimensions);
        append(&asked, weight, STRIDES, dimensions);
        append(&asked, output, STRIDES, dimensions);
        append(&asked, convolution, FILTER_STRIDES, dimensions - 2);
        append(&asked, convolution, DILATIONS, dimensions - 2);
    }
    return asked;
}

/* Bytes of a value by its type; 0: values of that type are not read again. */
static size_t size_of_type(int type)
{
    enum { OF_DATA_TYPE = 1, OF_INT64 = 3, OF_ADDRESS = 6, OF_DESCRIPTOR = 15 };
    return type == OF_DATA_TYPE ? 4 : type == OF_INT64 || type == OF_ADDRESS || type == OF_DESCRIPTOR ? 8 : 0;
}

API int cudnnBackendSetAttribute(struct descriptor *descriptor, int name, int type, int64_t count, const void *elements)
{
    size_t size = size_of_type(type);
    if (size == 0 || elements == NULL || descriptor->count == MOST_ATTRIBUTES)
        return SUCCESS;
    struct attribute *attribute = &descriptor->attributes[descriptor->count++];
    *attribute = (struct attribute){.name = name, .count = count < MOST_VALUES ? count : MOST_VALUES};
    for (int64_t i = 0; i < attribute->count; i++)
        memcpy(&attribute->values[i], (const char *)elements + (size_t)i * size, size);
    /* The caller may destroy a descriptor as soon as another one contains it. */
    bool is_part = name == GRAPH_OPERATIONS || name == HEURISTIC_GRAPH || name == PLAN_CONFIGURATION;
    for (int64_t i = 0; is_part && i < attribute->count && descriptor->asked.count == 0; i++)
        descriptor->asked = descriptor_of(descriptor, name, i)->asked;
    return SUCCESS;
}

API int cudnnBackendFinalize(struct descriptor *descriptor)
{
    if (descriptor->asked.count == 0)
        descriptor->asked = asked_of(descriptor);
    return SUCCESS;
}

static void ask(struct descriptor *plan)
{
    int64_t answers[MOST_ANSWERS];
    if (!plan->is_answered && plan->asked.count > 0 &&
        library_asks(plan->asked.question, plan->asked.numbers, plan->asked.count, answers)) {
        plan->workspace = answers[0];
        plan->sentence = answers[1];
    }
    plan->is_answered = true;
}

API int cudnnBackendGetAttribute(struct descriptor *descriptor, int name, IGNORED int type, int64_t asked,
                                 int64_t *count, void *elements)
{
    enum { ENGINES = 2 };
    bool is_number = name == PLAN_WORKSPACE || name == ENGINE_COUNT || name == SHARED_MEMORY_USED;
    int64_t results = asked > 0 && asked < ENGINES ? asked : ENGINES;
    if (count != NULL)
        *count = name == HEURISTIC_RESULTS ? results : is_number;
    if (asked == 0 || elements == NULL)
        return SUCCESS;
    if (name == SHARED_MEMORY_USED)
        *(int *)elements = 0; /* torch rejects a configuration that needs more than the device has */
    if (name == ENGINE_COUNT)
        *(int64_t *)elements = ENGINES;
    /* The caller made the descriptors of the results beforehand. */
    if (name == HEURISTIC_RESULTS)
        (*(struct descriptor **)elements)->asked = descriptor->asked;
    if (name == PLAN_WORKSPACE) {
        ask(descriptor);
        *(int64_t *)elements = descriptor->workspace;
    }
    return SUCCESS;
}

API int cudnnBackendExecute(IGNORED void *handle, const struct descriptor *plan, const struct descriptor *pack)
{
    const struct attribute *workspace = attribute_of(pack, PACK_WORKSPACE);
    if (plan->sentence > 0 && workspace != NULL)
        estimate_used((void *)(intptr_t)workspace->values[0], (size_t)plan->workspace, plan->sentence);
    return SUCCESS;
}
