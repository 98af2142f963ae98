/* The few functions of libcuda that PyTorch loads by itself (c10/cuda/driver_api.h): expandable segments. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
int fake_take(size_t);
void fake_give(size_t);
uint64_t fake_address(size_t);
int cuMemCreate(uint64_t *handle, size_t n, void *p, uint64_t f) {
  *handle = n;
  return fake_take(n);
}
int cuMemRelease(uint64_t handle) {
  fake_give(handle);
  return 0;
}
int cuMemAddressReserve(uint64_t *p, size_t n, size_t align, uint64_t a, uint64_t f) {
  *p = fake_address(n);
  return 0;
}
int cuMemGetAllocationGranularity(size_t *g, void *p, int o) {
  *g = 2 << 20;
  return 0;
}
int cuGetErrorString(int e, const char **s) {
  *s = "no error";
  return 0;
}
int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *active) {
  *f = 0;
  *active = 1;
  return 0;
}
int cuCtxGetCurrent(void **c) {
  *c = (void *)1;
  return 0;
}
int cudaDeviceGetAttribute(int *, int, int); /* both number attributes alike */
int cuDeviceGetAttribute(int *v, int a, int d) { return cudaDeviceGetAttribute(v, a, d); }

/* What Triton's launcher asks (triton/backends/nvidia/driver.c and driver.py): cubins are read as nothing and launched as
 * the runtime's kernels are. */
void fake_launched(const char *, unsigned, unsigned, unsigned, unsigned, void *);
int cuInit(unsigned f) { return 0; }
int cuDeviceGet(int *d, int i) {
  *d = i;
  return 0;
}
int cuDeviceGetCount(int *n) {
  *n = 1;
  return 0;
}
int cuDriverGetVersion(int *v) {
  *v = 12040;
  return 0;
}
int cuCtxSetCurrent(void *c) { return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) {
  *c = (void *)1;
  return 0;
}
int cuModuleLoadData(void **m, const void *image) {
  *m = (void *)1;
  return 0;
}
int cuModuleGetFunction(void **f, void *m, const char *name) {
  *f = strdup(name);
  return 0;
}
int cuFuncGetAttribute(int *v, int a, void *f) {
  *v = a == 4 ? 32 : 0; /* CU_FUNC_ATTRIBUTE_NUM_REGS, all else 0: nothing spills */
  return 0;
}
int cuFuncSetAttribute(void *f, int a, int v) { return 0; }
int cuFuncSetCacheConfig(void *f, int c) { return 0; }
int cuPointerGetAttribute(void *v, int a, uint64_t p) {
  *(uint64_t *)v = p;
  return 0;
}
int cuMemAlloc_v2(uint64_t *p, size_t n) { return 1; } /* before 3.0 linked, and called for tensor maps alone */
int cuMemFree_v2(uint64_t p) { return 0; }
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t n) { return 0; }
int cuLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **p, void **e) {
  fake_launched(f, x, y, z, bx, stream);
  return 0;
}
typedef struct { unsigned x, y, z, bx, by, bz, shared; void *stream; } Launch;
int cuLaunchKernelEx(const Launch *l, void *f, void **p, void **e) {
  fake_launched(f, l->x, l->y, l->z, l->bx, l->stream);
  return 0;
}
