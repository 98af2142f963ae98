/* The few functions of libcuda that PyTorch loads by itself (c10/cuda/driver_api.h): expandable segments. */
#include <stddef.h>
#include <stdint.h>
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
int cuDeviceGetAttribute(int *v, int a, int d) {
  *v = 1;
  return 0;
}
