/* Functions of NVIDIA's libraries that only write a result: sizes of workspaces, new descriptors.
 *
 * Only the position of the argument that points to the result matters. Every argument before it is an integer or an
 * address, which both the System V ABI of x86-64 and the AAPCS64 pass in a register or a slot of eight bytes, so they
 * are declared as words.
 */
#ifndef SIZES_H
#define SIZES_H

#include <stdlib.h>
#include <string.h>

#include "dry.h"
#include "libraries.h"

#define WORD IGNORED long
#define AFTER_1 WORD a
#define AFTER_2 AFTER_1, WORD b
#define AFTER_3 AFTER_2, WORD c
#define AFTER_4 AFTER_3, WORD d
#define AFTER_5 AFTER_4, WORD e
#define AFTER_6 AFTER_5, WORD f
#define AFTER_7 AFTER_6, WORD g
#define AFTER_8 AFTER_7, WORD h
#define AFTER_9 AFTER_8, WORD i
#define AFTER_10 AFTER_9, WORD j
#define AFTER_11 AFTER_10, WORD k
#define AFTER_12 AFTER_11, WORD l
#define AFTER_13 AFTER_12, WORD m
#define AFTER_14 AFTER_13, WORD n
#define AFTER_15 AFTER_14, WORD o
#define AFTER_16 AFTER_15, WORD p
#define AFTER_17 AFTER_16, WORD q
#define AFTER_18 AFTER_17, WORD r
#define AFTER_19 AFTER_18, WORD s
#define AFTER_21 AFTER_19, WORD t, WORD u

/* WRITES(name, number of arguments before the result, type of the result, value) */
#define WRITES(name, count, type, value)                                                                               \
    API int name(AFTER_##count, type *written)                                                                         \
    {                                                                                                                  \
        *written = value;                                                                                              \
        return 0;                                                                                                      \
    }

/* The size of a workspace that only the library knows: 0, and the call is recorded. */
#define LEAVES_OUT(name, count, type)                                                                                  \
    API int name(AFTER_##count, type *written)                                                                         \
    {                                                                                                                  \
        *written = 0;                                                                                                  \
        library_leaves_out(#name);                                                                                     \
        return 0;                                                                                                      \
    }

/* The same for a workspace on the device and one on the host. */
#define LEAVES_OUT_BOTH(name, count)                                                                                   \
    API int name(AFTER_##count, size_t *on_device, size_t *on_host)                                                    \
    {                                                                                                                  \
        *on_device = *on_host = 0;                                                                                     \
        library_leaves_out(#name);                                                                                     \
        return 0;                                                                                                      \
    }

/* A solver writes its status to the device: 0, because the memory may contain old data. A batched solver writes one for
 * each matrix; the number of matrices is the next argument or the one after it. */
#define SUCCEEDS(name, count)                                                                                          \
    API int name(AFTER_##count, int *info)                                                                             \
    {                                                                                                                  \
        *info = 0;                                                                                                     \
        return 0;                                                                                                      \
    }
#define ALL_SUCCEED(name, count)                                                                                       \
    API int name(AFTER_##count, int *info, int batch)                                                                  \
    {                                                                                                                  \
        memset(info, 0, (size_t)batch * sizeof *info);                                                                 \
        return 0;                                                                                                      \
    }
#define ALL_SUCCEED_BY_SETTINGS(name, count)                                                                           \
    API int name(AFTER_##count, int *info, WORD settings, int batch)                                                   \
    {                                                                                                                  \
        memset(info, 0, (size_t)batch * sizeof *info);                                                                 \
        return 0;                                                                                                      \
    }

/* Sets the stream of a library's next call. */
#define SETS_STREAM(name)                                                                                              \
    API int name(WORD handle, void *stream)                                                                            \
    {                                                                                                                  \
        stream_add_kernel(stream);                                                                                     \
        return 0;                                                                                                      \
    }

/* Descriptors are passed on and never read. */
#define CREATES(name)                                                                                                  \
    API int name(void **made)                                                                                          \
    {                                                                                                                  \
        *made = calloc(1, 512);                                                                                        \
        return 0;                                                                                                      \
    }

#define DESTROYS(name)                                                                                                 \
    API int name(void *made)                                                                                           \
    {                                                                                                                  \
        free(made);                                                                                                    \
        return 0;                                                                                                      \
    }

#endif
