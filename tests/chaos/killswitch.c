/* Kills its own process just before the n-th write, fsync or rename below a path.
 *
 * Loaded with LD_PRELOAD. `killswitch_arm(n, part)` starts counting calls that touch a path containing `part`; at call n the
 * process gets SIGKILL (n = 0 only counts). `killswitch_count()` tells how many there were. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char watched[4096];
static volatile long deadline = -1, calls = 0;

void killswitch_arm(long n, const char *part) {
    strncpy(watched, part, sizeof watched - 1);
    calls = 0;
    deadline = n;
}

long killswitch_count(void) { return calls; }

static void touch(const char *path) {
    if (deadline < 0 || !path || !strstr(path, watched)) return;
    if (__sync_add_and_fetch(&calls, 1) == deadline) kill(getpid(), SIGKILL);
}

static void touch_descriptor(int fd) {
    char link[64], path[4096];
    if (deadline < 0) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return;
    path[length] = 0;
    touch(path);
}

#define NEXT(name) ((__typeof__(name) *)dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *b, size_t n) { touch_descriptor(fd); return NEXT(write)(fd, b, n); }
ssize_t pwrite64(int fd, const void *b, size_t n, off64_t o) { touch_descriptor(fd); return NEXT(pwrite64)(fd, b, n, o); }
ssize_t writev(int fd, const struct iovec *v, int n) { touch_descriptor(fd); return NEXT(writev)(fd, v, n); }
int ftruncate64(int fd, off64_t n) { touch_descriptor(fd); return NEXT(ftruncate64)(fd, n); }
int fsync(int fd) { touch_descriptor(fd); return NEXT(fsync)(fd); }
int fdatasync(int fd) { touch_descriptor(fd); return NEXT(fdatasync)(fd); }
int mkdir(const char *p, mode_t m) { touch(p); return NEXT(mkdir)(p, m); }
int rmdir(const char *p) { touch(p); return NEXT(rmdir)(p); }
int unlink(const char *p) { touch(p); return NEXT(unlink)(p); }
int rename(const char *a, const char *b) { touch(b); return NEXT(rename)(a, b); }
int renameat(int d, const char *a, int e, const char *b) { touch(b); return NEXT(renameat)(d, a, e, b); }
int renameat2(int d, const char *a, int e, const char *b, unsigned f) { touch(b); return NEXT(renameat2)(d, a, e, b, f); }
int unlinkat(int d, const char *p, int f) { touch_descriptor(d); return NEXT(unlinkat)(d, p, f); }
