/* What a library asks for as workspace only the library knows. The simulated device has rules for some of it, in
 * Python, and they answer here, too (workspaces.py). */
#ifndef LIBRARIES_H
#define LIBRARIES_H

#include "dry.h"

/* A question is a list of numbers, and so is its answer. */
enum question {
    CONVOLUTION_BYTES = 1, /* -> bytes, and a number that stands for the sentence on the workspace; 0 is none */
    RECURRENT_BYTES = 2,   /* -> bytes of the workspace, of the reserve, and a sentence of each */
    PLACE = 3,             /* of a sentence -> the sentence with the line that runs */
    ATTENTION_BYTES = 4,   /* -> bytes */
    SOLVER_BYTES = 5,      /* -> bytes, or a number below 0 where they are unknown */
};

enum { MOST_ANSWERS = 4 };

/* False where there is no Python in this process, or no package of ours: all answers are 0. */
bool library_asks(enum question question, const int64_t *numbers, int count, int64_t *answers);

/* The workspace of a call of `name`, a literal, is in no number. */
void library_leaves_out(const char *name);

/* estimates.c: the block at the address has a size that an estimate gave; `sentence` says for what. */
void estimate_used(const void *address, size_t size, int64_t sentence);
void estimate_allocated(const void *address, size_t size, size_t allocated, int device);
void estimate_freed(const void *address, size_t size, int device);

#endif
