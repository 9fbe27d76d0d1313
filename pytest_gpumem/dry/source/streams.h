/* Streams, events and captures, as streams.c and captures.c share them. */
#ifndef STREAMS_H
#define STREAMS_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Later work of a stream, behind its position `at`, comes after `until` of another stream. */
struct dependency {
    uint64_t at, until;
    struct stream *on;
    struct dependency *next;
};

struct stream {
    int device, priority;
    uint64_t issued, done;
    uint64_t slept; /* the first position that sleeps, if it lies behind `done` */
    struct capture *capture; /* NULL: what is called happens now */
    struct dependency *dependencies;
    struct stream *next;
};

struct event {
    struct stream *stream;
    uint64_t at;
    unsigned long long capture; /* its number; 0: none */
};

struct graph {
    size_t nodes;
};

/* A capture, of one stream and of those that wait for events in it. */
struct capture {
    unsigned long long number;
    struct graph *graph;
    int mode;
    pthread_t thread; /* that has begun it */
    bool broken;      /* by a call that no graph can contain: every further call fails, until the capture ends */
    struct capture *next;
};

/* captures.c */
int capture_break(struct capture *capture); /* returns the error of the call that does it */

/* streams.c */
void streams_leave(const struct capture *capture);

#endif
