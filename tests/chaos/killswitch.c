/* Kills its own process just before the n-th write, fsync or rename below a path, or lets that call fail.
 *
 * Loaded with LD_PRELOAD. `killswitch_arm(n, part, error)` starts counting calls that touch a path containing `part`; at
 * call n the process gets SIGKILL or, where `error` is not 0, the call fails with this errno and does nothing (n = 0 only
 * counts). `killswitch_count()` tells how many there were. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char watched[4096];
static volatile long deadline = -1, calls = 0;
static volatile int failure = 0;

void killswitch_arm(long n, const char *part, int error) {
    strncpy(watched, part, sizeof watched - 1);
    calls = 0;
    failure = error;
    deadline = n;
}

long killswitch_count(void) { return calls; }

static int fails(const char *path) {
    if (deadline < 0 || !path || !strstr(path, watched)) return 0;
    if (__sync_add_and_fetch(&calls, 1) != deadline) return 0;
    if (!failure) kill(getpid(), SIGKILL);
    errno = failure;
    return 1;
}

static int fails_at(int fd) {
    char link[64], path[4096];
    if (deadline < 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return fails(path);
}

#define NEXT(name) ((__typeof__(name) *)dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *b, size_t n) { return fails_at(fd) ? -1 : NEXT(write)(fd, b, n); }
ssize_t pwrite64(int fd, const void *b, size_t n, off64_t o) { return fails_at(fd) ? -1 : NEXT(pwrite64)(fd, b, n, o); }
ssize_t writev(int fd, const struct iovec *v, int n) { return fails_at(fd) ? -1 : NEXT(writev)(fd, v, n); }
int ftruncate64(int fd, off64_t n) { return fails_at(fd) ? -1 : NEXT(ftruncate64)(fd, n); }
int fsync(int fd) { return fails_at(fd) ? -1 : NEXT(fsync)(fd); }
int fdatasync(int fd) { return fails_at(fd) ? -1 : NEXT(fdatasync)(fd); }
int mkdir(const char *p, mode_t m) { return fails(p) ? -1 : NEXT(mkdir)(p, m); }
int rmdir(const char *p) { return fails(p) ? -1 : NEXT(rmdir)(p); }
int unlink(const char *p) { return fails(p) ? -1 : NEXT(unlink)(p); }
int rename(const char *a, const char *b) { return fails(b) ? -1 : NEXT(rename)(a, b); }
int renameat(int d, const char *a, int e, const char *b) { return fails(b) ? -1 : NEXT(renameat)(d, a, e, b); }
int renameat2(int d, const char *a, int e, const char *b, unsigned f) { return fails(b) ? -1 : NEXT(renameat2)(d, a, e, b, f); }
int unlinkat(int d, const char *p, int f) { return fails_at(d) ? -1 : NEXT(unlinkat)(d, p, f); }
