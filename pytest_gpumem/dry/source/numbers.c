/* Numbers of autograd's nodes.
 *
 * Torch numbers the nodes that each thread makes (aten/src/ATen/SequenceNumber.cpp, torch 2.6 to 2.15), and runs the
 * ready node with the highest number first. A second backward pass has nodes of two threads, so its order depends on
 * the number of nodes that each has made before: here the count restarts with each test. The functions are
 * libtorch_cpu's, but torch's libraries find those in this file first.
 */
#include <stdatomic.h>
#include <stdint.h>

#include "dry.h"

static atomic_uint tests;
static __thread unsigned test;
static __thread uint64_t next;

API uint64_t peek(void) __asm__("_ZN2at15sequence_number4peekEv");
API uint64_t get_and_increment(void) __asm__("_ZN2at15sequence_number17get_and_incrementEv");

uint64_t peek(void)
{
    unsigned present = atomic_load_explicit(&tests, memory_order_relaxed);
    if (test != present) {
        test = present;
        next = 0;
    }
    return next;
}

uint64_t get_and_increment(void)
{
    peek();
    return next++;
}

/* Count from zero in all threads: a test begins. */
API void pytest_gpumem_dry_number_anew(void) { atomic_fetch_add(&tests, 1); }
