/* A driver of one GPU that cannot be used: it writes down which process asks CUDA or NVML.

   Built as libcuda.so.1 and as libnvidia-ml.so.1. The file is named by TEST_DRIVER_LOG. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, CUDA_NO_DEVICE = 100 };

static void note(const char *what) {
    const char *path = getenv("TEST_DRIVER_LOG");
    FILE *log = path ? fopen(path, "a") : NULL;
    if (log) {
        fprintf(log, "%d %s\n", getpid(), what);
        fclose(log);
    }
}

int nvmlInit(void) { note("asks NVML"); return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return SUCCESS; }

int cuInit(unsigned flags) {
    (void)flags;
    note("asks CUDA");
    open("/dev/nvidia-uvm", O_RDONLY | O_CLOEXEC);
    return CUDA_NO_DEVICE;
}
int cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
int cuGetExportTable(const void **table, const void *id) { (void)table; (void)id; return CUDA_NO_DEVICE; }
static int unusable(void) { return CUDA_NO_DEVICE; }

int cuGetProcAddress_v2(const char *name, void **found, int version, unsigned long flags, void *status) {
    (void)version; (void)flags; (void)status;
    *found = !strcmp(name, "cuInit") ? (void *)cuInit
           : !strcmp(name, "cuDriverGetVersion") ? (void *)cuDriverGetVersion
           : !strcmp(name, "cuGetProcAddress") ? (void *)cuGetProcAddress_v2 : (void *)unusable;
    return SUCCESS;
}
