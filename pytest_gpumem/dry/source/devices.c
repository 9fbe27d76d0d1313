/* The GPUs: read once from PYTEST_GPUMEM_DRY_DEVICES, which devices.py writes.
 *
 * One GPU is "name=NVIDIA A100-SXM4-40GB,memory=42298834944,major=8,..."; several are separated by ";".
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "abi.h"
#include "dry.h"

#define MOST_DEVICES 120 /* C10_COMPILE_TIME_MAX_GPUS of c10/cuda/CUDAMacros.h */

static struct device all[MOST_DEVICES], devices[MOST_DEVICES];
static int count, all_count;
static __thread int current;

static void read_field(struct device *device, char *field)
{
    static const struct {
        const char *key;
        size_t offset;
    } numbers[] = {
        {"major", offsetof(struct device, major)},   {"minor", offsetof(struct device, minor)},
        {"sms", offsetof(struct device, sms)},       {"threads", offsetof(struct device, threads)},
        {"l2", offsetof(struct device, l2)},         {"shared", offsetof(struct device, shared)},
        {"optin", offsetof(struct device, optin)},   {"blocks", offsetof(struct device, blocks)},
        {"bus", offsetof(struct device, bus_width)}, {"memory", offsetof(struct device, memory)},
    };
    char *value = strchr(field, '=');
    if (value == NULL)
        return;
    *value++ = '\0';
    if (strcmp(field, "name") == 0)
        snprintf(device->name, sizeof device->name, "%s", value);
    if (strcmp(field, "uuid") == 0)
        for (int i = 0; i < 16 && sscanf(value + 2 * i, "%2hhx", &device->uuid[i]) == 1; i++)
            ;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (strcmp(field, numbers[i].key) == 0)
            *(int64_t *)((char *)device + numbers[i].offset) = strtoll(value, NULL, 10);
}

/* CUDA_VISIBLE_DEVICES hides and orders devices, as it does for the real runtime; an index that does not exist ends
 * the list ("CUDA C++ Programming Guide", environment variables). */
static void choose_visible(void)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    all_count = count;
    for (int i = 0; i < count; i++)
        devices[i].index = i;
    memcpy(all, devices, sizeof all);
    if (visible == NULL)
        return;
    int known = count;
    count = 0;
    for (const char *at = visible; *at != '\0' && count < MOST_DEVICES;) {
        char *end;
        long index = strtol(at, &end, 10);
        if (end == at || index < 0 || index >= known)
            break;
        devices[count++] = all[index];
        at = *end == ',' ? end + 1 : end;
    }
}

static void read_devices(void)
{
    const char *text = getenv("PYTEST_GPUMEM_DRY_DEVICES");
    char *copy = strdup(text == NULL ? "" : text), *rest = copy, *one;
    while (copy != NULL && (one = strsep(&rest, ";")) != NULL && count < MOST_DEVICES) {
        if (*one == '\0')
            continue;
        char *field;
        while ((field = strsep(&one, ",")) != NULL)
            read_field(&devices[count], field);
        count++;
    }
    free(copy);
    choose_visible();
}

static void read_once(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, read_devices);
}

int device_count(void)
{
    read_once();
    driver_begin();
    return count;
}

int current_device(void) { return current; }

int set_current_device(int index)
{
    if (index < 0 || index >= device_count())
        return fail(INVALID_DEVICE);
    current = index;
    return SUCCESS;
}

const struct device *device_at(int index)
{
    return index < 0 || index >= device_count() ? NULL : &devices[index];
}

int machine_count(void)
{
    read_once();
    return all_count;
}

const struct device *machine_at(int index) { return index < 0 || index >= machine_count() ? NULL : &all[index]; }
