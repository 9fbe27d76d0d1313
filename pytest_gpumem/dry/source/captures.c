/* Capture of graphs: a graph is a list of nodes with their dependencies.
 *
 * torch's allocator reads the dependencies where it reuses a block of several streams during a capture
 * (graph_capture_record_stream_reuse, c10/cuda/CUDACachingAllocator.cpp).
 *
 * A call that no graph can contain, such as waiting for a captured stream, fails and invalidates the capture. All
 * further calls in the capture fail, too, until cudaStreamEndCapture, which ends it and returns an error and no graph
 * (CUDA C++ Programming Guide, "Prohibited and Unhandled Operations"). So does a call that is unsafe during captures,
 * depending on the modes of the captures and of the calling thread (cudaThreadExchangeStreamCaptureMode).
 */
#include <stdlib.h>
#include <string.h>

#include "abi.h"
#include "dry.h"
#include "streams.h"

enum mode { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 };
enum { CONDITIONAL_NODE = 13 }; /* enum cudaGraphNodeType */
enum { SET_DEPENDENCIES = 1 };  /* enum cudaStreamUpdateCaptureDependenciesFlags */

/* Functions with parameters for edges, whose names have no version suffix since CUDA 13. */
#if CUDA_VERSION >= 13000
#define WITH_EDGES(name) name
#define EDGES IGNORED void *edges,
#else
#define WITH_EDGES(name) name##_v2
#define EDGES
#endif

/* struct cudaGraphNodeParams of a conditional node */
struct node_params {
    int type, reserved[3];
    uint64_t handle;
    int kind;
    unsigned count;
    struct graph **bodies; /* `count` of them */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct capture *captures; /* those that have not ended */
static unsigned long long begun;
static __thread int thread_mode = GLOBAL;

int capture_break(struct capture *capture)
{
    capture->broken = true;
    return fail(CAPTURE_UNSUPPORTED);
}

/* Whether the capture forbids unsafe calls in this thread. */
static bool forbids(const struct capture *capture)
{
    if (thread_mode == RELAXED || capture->mode == RELAXED)
        return false;
    if (pthread_equal(capture->thread, pthread_self()))
        return true;
    return thread_mode == GLOBAL && capture->mode == GLOBAL;
}

int captures_refuse(void)
{
    int error = SUCCESS;
    pthread_mutex_lock(&lock);
    for (struct capture *capture = captures; capture != NULL; capture = capture->next)
        if (forbids(capture))
            error = capture_break(capture);
    pthread_mutex_unlock(&lock);
    return error;
}

API int cudaThreadExchangeStreamCaptureMode(int *mode)
{
    int before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return SUCCESS;
}

static int frontier_add(struct frontier *frontier, struct node *node)
{
    for (size_t i = 0; i < frontier->count; i++)
        if (frontier->nodes[i] == node)
            return SUCCESS;
    struct node **nodes = realloc(frontier->nodes, (frontier->count + 1) * sizeof *nodes);
    if (nodes == NULL)
        return fail(OUT_OF_MEMORY);
    nodes[frontier->count++] = node;
    frontier->nodes = nodes;
    return SUCCESS;
}

int frontier_join(struct frontier *frontier, const struct frontier *other)
{
    int error = SUCCESS;
    for (size_t i = 0; i < other->count && error == SUCCESS; i++)
        error = frontier_add(frontier, other->nodes[i]);
    return error;
}

static struct node *graph_add_node(struct graph *graph, struct node *const *before, size_t count)
{
    struct node *node = malloc(sizeof *node + count * sizeof *before);
    if (node == NULL)
        return NULL;
    if (count > 0)
        memcpy(node->before, before, count * sizeof *before);
    node->count = count;
    node->older = graph->newest;
    graph->newest = node;
    graph->nodes++;
    return node;
}

int capture_add_node(struct stream *stream)
{
    struct frontier *last = &stream->last;
    struct node *node = graph_add_node(stream->capture->graph, last->nodes, last->count);
    if (node == NULL)
        return fail(OUT_OF_MEMORY);
    last->count = 0;
    return frontier_add(last, node);
}

static int begin_capture(void *handle, int mode, struct graph *graph)
{
    struct stream *stream = stream_of(handle);
    if ((uintptr_t)handle <= 2)
        return fail(CAPTURE_UNSUPPORTED);
    if (stream->capture != NULL)
        return fail(INVALID_VALUE);
    struct capture *capture = malloc(sizeof *capture);
    if (graph == NULL)
        graph = calloc(1, sizeof *graph);
    if (capture == NULL || graph == NULL)
        return fail(OUT_OF_MEMORY);
    pthread_mutex_lock(&lock);
    *capture = (struct capture){++begun, graph, mode, pthread_self(), false, captures};
    captures = capture;
    pthread_mutex_unlock(&lock);
    stream->capture = capture;
    return SUCCESS;
}

API int cudaStreamBeginCapture(void *handle, int mode) { return begin_capture(handle, mode, NULL); }

API int cudaStreamBeginCaptureToGraph(void *handle, struct graph *graph, IGNORED const void *nodes,
                                      IGNORED const void *edges, IGNORED size_t count, int mode)
{
    return begin_capture(handle, mode, graph);
}

API int cudaStreamEndCapture(void *handle, struct graph **graph)
{
    struct capture *capture = stream_of(handle)->capture;
    if (graph != NULL)
        *graph = NULL;
    if (capture == NULL)
        return fail(INVALID_VALUE);
    streams_leave(capture);
    pthread_mutex_lock(&lock);
    struct capture **link = &captures;
    while (*link != capture)
        link = &(*link)->next;
    *link = capture->next;
    pthread_mutex_unlock(&lock);
    bool broken = capture->broken;
    if (!broken && graph != NULL)
        *graph = capture->graph;
    free(capture);
    return broken ? fail(CAPTURE_INVALIDATED) : SUCCESS;
}

API int cudaStreamIsCapturing(void *handle, int *status)
{
    const struct capture *capture = stream_of(handle)->capture;
    *status = capture == NULL ? CAPTURE_NONE : capture->broken ? CAPTURE_BROKEN : CAPTURE_ACTIVE;
    return SUCCESS;
}

/* In CUDA 12 the _v2 function has no edges; in CUDA 13 there is one function, with the edges before the count. */
API int cudaStreamGetCaptureInfo_v2(void *handle, int *status, unsigned long long *identity, void **graph,
                                    struct node ***dependencies, size_t *count)
{
    const struct stream *stream = stream_of(handle);
    const struct capture *capture = stream->capture;
    cudaStreamIsCapturing(handle, status);
    if (identity != NULL)
        *identity = capture == NULL ? 0 : capture->number;
    if (graph != NULL)
        *graph = capture == NULL ? NULL : capture->graph;
    if (dependencies != NULL)
        *dependencies = stream->last.nodes;
    if (count != NULL)
        *count = stream->last.count;
    return SUCCESS;
}

API int cudaStreamGetCaptureInfo_v3(void *handle, int *status, unsigned long long *identity, void **graph,
                                    struct node ***dependencies, const void **edges, size_t *count)
{
    if (edges != NULL)
        *edges = NULL;
    return cudaStreamGetCaptureInfo_v2(handle, status, identity, graph, dependencies, count);
}

API int cudaStreamGetCaptureInfo(void *handle, int *status, unsigned long long *identity, void **graph,
                                 struct node ***dependencies, const void **edges, size_t *count)
{
    return cudaStreamGetCaptureInfo_v3(handle, status, identity, graph, dependencies, edges, count);
}

API int cudaGraphInstantiate(void **executable, void *graph, IGNORED unsigned long long flags)
{
    *executable = graph;
    return SUCCESS;
}

API int cudaGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags)
{
    return cudaGraphInstantiate(executable, graph, flags);
}

API int cudaGraphLaunch(IGNORED void *executable, void *handle)
{
    return stream_add_kernel(handle);
}

API int cudaGraphDestroy(struct graph *graph)
{
    for (struct node *node = graph->newest; node != NULL;) {
        struct node *older = node->older;
        free(node);
        node = older;
    }
    for (struct graph *body = graph->bodies; body != NULL;) {
        struct graph *next = body->next;
        cudaGraphDestroy(body);
        body = next;
    }
    free(graph);
    return SUCCESS;
}

API int cudaGraphGetNodes(const struct graph *graph, struct node **nodes, size_t *count)
{
    size_t most = nodes == NULL ? 0 : *count, position = graph->nodes;
    *count = graph->nodes;
    for (struct node *node = graph->newest; node != NULL; node = node->older)
        if (--position < most)
            nodes[position] = node;
    return SUCCESS;
}

API int cudaGraphNodeGetDependencies(const struct node *node, struct node **before, EDGES size_t *count)
{
    for (size_t i = 0; before != NULL && i < *count && i < node->count; i++)
        before[i] = node->before[i];
    *count = node->count;
    return SUCCESS;
}

API int WITH_EDGES(cudaStreamUpdateCaptureDependencies)(void *handle, struct node **nodes, IGNORED const void *edges,
                                                        size_t count, unsigned flags)
{
    struct frontier *last = &stream_of(handle)->last;
    if ((flags & SET_DEPENDENCIES) != 0)
        last->count = 0;
    return frontier_join(last, &(struct frontier){count, nodes});
}

/* Each body of a conditional node is a separate graph, which the program captures next. */
API int WITH_EDGES(cudaGraphAddNode)(struct node **node, struct graph *graph, struct node *const *before,
                                     IGNORED const void *edges, size_t count, struct node_params *params)
{
    *node = graph_add_node(graph, before, count);
    if (*node == NULL)
        return fail(OUT_OF_MEMORY);
    if (params->type != CONDITIONAL_NODE)
        return SUCCESS;
    params->bodies = calloc(params->count, sizeof *params->bodies);
    if (params->bodies == NULL)
        return fail(OUT_OF_MEMORY);
    for (unsigned i = 0; i < params->count; i++) {
        struct graph *body = calloc(1, sizeof *body);
        if (body == NULL)
            return fail(OUT_OF_MEMORY);
        body->next = graph->bodies;
        graph->bodies = params->bodies[i] = body;
    }
    return SUCCESS;
}
