/* Streams, events and captures, as streams.c and captures.c share them. */
#ifndef STREAMS_H
#define STREAMS_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Work of a stream after its position `at` waits for position `until` of another stream. */
struct dependency {
    uint64_t at, until;
    struct stream *on;
    struct dependency *next;
};

/* A node of a graph, and the nodes of the graph that it depends on. */
struct node {
    struct node *older; /* in the graph */
    size_t count;
    struct node *before[];
};

/* The nodes on which the next node of a captured stream, or of one that waits for a captured event, depends. */
struct frontier {
    size_t count;
    struct node **nodes;
};

struct stream {
    int device, priority;
    uint64_t issued, done;
    uint64_t slept; /* the position of the first sleep, if it is after `done` */
    uint64_t search, searched; /* the last search for a sleep, and the position that it reached */
    struct capture *capture; /* NULL: calls are executed, not captured */
    struct frontier last;
    struct dependency *dependencies;
    struct stream *next;
};

struct event {
    struct stream *stream;
    uint64_t at;
    unsigned long long capture; /* its number; 0: none */
    struct frontier last;
    uint64_t blocks; /* that torch had allocated on the device */
};

struct graph {
    size_t nodes;
    struct node *newest;
    struct graph *bodies, *next; /* graphs of conditional nodes; the next one of the same graph */
};

/* A capture, of one stream and of those that wait for events in it. */
struct capture {
    unsigned long long number;
    struct graph *graph;
    int mode;
    pthread_t thread; /* the thread that began it */
    bool broken;      /* after a call that no graph can contain: every further call fails, until the capture ends */
    struct capture *next;
};

/* captures.c */
int capture_break(struct capture *capture); /* returns the error for the call that breaks it */
int capture_add_node(struct stream *stream);
int frontier_join(struct frontier *frontier, const struct frontier *other);

/* streams.c */
void streams_leave(const struct capture *capture);

#endif
