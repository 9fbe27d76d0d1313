/* Queries for the sizes of workspaces, which only NVIDIA's libraries know. The simulated device has rules for some of
 * them, in Python, which are used here, too (workspaces.py). */
#ifndef LIBRARIES_H
#define LIBRARIES_H

#include "dry.h"

/* A query is a list of numbers, and so is its result. */
enum question {
    CONVOLUTION_BYTES = 1, /* -> bytes, and the number of the sentence on the workspace; 0 is none */
    RECURRENT_BYTES = 2,   /* -> bytes of the workspace, of the reserve, and the numbers of their sentences */
    PLACE = 3,             /* number of a sentence -> number of the sentence with the user's current line */
    ATTENTION_BYTES = 4,   /* -> bytes */
    SOLVER_BYTES = 5,      /* -> bytes, or a number below 0 where they are unknown */
};

enum { MOST_ANSWERS = 4 };

/* False, with all results 0, if this process has no Python, or Python has no package pytest_gpumem. */
bool library_asks(enum question question, const int64_t *numbers, int count, int64_t *answers);

/* Records that the workspace of a call of `name`, a string literal, is not estimated. */
void library_leaves_out(const char *name);

/* estimates.c: records that the size of the block at the address is an estimate; `sentence` names its purpose. */
void estimate_used(const void *address, size_t size, int64_t sentence);
void estimate_allocated(const void *address, size_t size, size_t allocated, int device);
void estimate_freed(const void *address, size_t size, int device);

#endif
