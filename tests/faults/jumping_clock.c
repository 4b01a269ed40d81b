/* The time of day jumps by up to eleven days in either direction, at every tenth call or so; or, where AUTOTUNE_CLOCK_JUMPS_WITH
   names a file, once, by nine days, when that file appears. What only runs forward is left alone. Loaded before libc by LD_PRELOAD, so that one run sees it and the machine's clock stays as it is. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static unsigned long calls;

static long jump(void) {
    const char *file = getenv("AUTOTUNE_CLOCK_JUMPS_WITH");
    if (file) return access(file, F_OK) == 0 ? 9 * 86400L : 0;
    unsigned long number = __sync_add_and_fetch(&calls, 1) / 10;
    return (long)((number * 2654435761UL) % 2000000UL) - 1000000L;
}

int clock_gettime(clockid_t clock, struct timespec *when) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, when);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) when->tv_sec += jump();
    return result;
}

int gettimeofday(struct timeval *restrict when, void *restrict zone) {
    struct timespec now;
    (void)zone;
    int result = clock_gettime(CLOCK_REALTIME, &now);
    when->tv_sec = now.tv_sec;
    when->tv_usec = now.tv_nsec / 1000;
    return result;
}

time_t time(time_t *when) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (when) *when = now.tv_sec;
    return now.tv_sec;
}
