/* What torch's caching allocator hands out, which the runtime below it does not hear of otherwise.
 *
 * The allocator tells c10::reportMemoryUsageToProfiler (c10/core/Allocator.h) of each block that it hands out and takes
 * back, torch 2.6 to 2.15. The function is libc10's, and libc10_cuda finds the one here first.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>

#include "dry.h"
#include "libraries.h"

#define REPORT "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE"
/* DeviceType of torch/headeronly/core/DeviceType.h, the first byte of a c10::Device; the second one is its index. */
#define CUDA 1

typedef void report_function(void *block, int64_t size, size_t allocated, size_t reserved, uint16_t device);

API report_function report __asm__(REPORT);

static report_function *torchs_own(void)
{
    static report_function *known;
    if (known == NULL) {
        void *library = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
        void *symbol = library == NULL ? NULL : dlsym(library, REPORT);
        __builtin_memcpy(&known, &symbol, sizeof known);
        if (known == NULL)
            abort();
    }
    return known;
}

void report(void *block, int64_t size, size_t allocated, size_t reserved, uint16_t device)
{
    if ((device & 0xff) == CUDA && size > 0) {
        written_drop(block, (size_t)size); /* what an earlier tensor held there is not this one's */
        estimate_allocated(block, (size_t)size, allocated, device >> 8);
    } else if ((device & 0xff) == CUDA)
        estimate_freed(block, (size_t)-size, device >> 8);
    torchs_own()(block, size, allocated, reserved, device);
}
