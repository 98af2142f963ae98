/* A CUDA runtime that does nothing: see README.md. Memory is addresses that are counted, launches end at once.
 *
 * DRIVER_CAP   bytes of the device (80 GiB)
 * DRIVER_LATE  1: an event is over only when the host has waited for it (README.md)
 * DRIVER_ARCH  compute capability (80)
 * DRIVER_LOG   a file that takes every cudaMalloc (M), cudaFree (F), copy (C) and launch (K)
 */
#define _GNU_SOURCE
#include "driver_types.h"
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef int err;
typedef struct { unsigned x, y, z; } Dim;
#define FIRST 0x100000000000ull /* addresses of device memory, which no pointer of the host has */
#define LAST 0x200000000000ull
#define PAGE ((size_t)2 << 20)

static FILE *log_file;
static size_t capacity, used;
static uint64_t next_address = FIRST;
static int on_device(const void *p) { return (uint64_t)p >= FIRST && (uint64_t)p < LAST; }
static int asked(const char *name, int none) { const char *said = getenv(name); return said ? atoi(said) : none; }
static void begin(void) {
  static int begun;
  if (begun) return;
  begun = 1;
  if (getenv("DRIVER_LOG")) log_file = fopen(getenv("DRIVER_LOG"), "w");
  capacity = getenv("DRIVER_CAP") ? strtoull(getenv("DRIVER_CAP"), 0, 10) : (size_t)80 << 30;
}

/* ---- memory */
typedef struct { uint64_t address; size_t size; } Block;
static Block *held;
static int count, room;
static size_t pages(size_t n) { return (n + PAGE - 1) / PAGE * PAGE; }
int fake_take(size_t n) {
  begin();
  if (used + n > capacity) return 2;
  used += n;
  return 0;
}
void fake_give(size_t n) { used -= n; }
uint64_t fake_address(size_t n) {
  uint64_t address = next_address;
  next_address += pages(n);
  return address;
}
err cudaDeviceSynchronize(void);
err cudaMalloc(void **p, size_t n) {
  size_t taken = n < PAGE / 2 ? n : pages(n);
  cudaDeviceSynchronize(); /* CUDA C++ Programming Guide, implicit synchronization */
  *p = 0;
  if (fake_take(taken)) {
    if (log_file) fprintf(log_file, "M none %zu\n", n);
    return 2;
  }
  if (count == room) held = realloc(held, (room = room ? 2 * room : 1024) * sizeof(Block));
  held[count].address = fake_address(n);
  held[count].size = taken;
  *p = (void *)held[count++].address;
  if (log_file) fprintf(log_file, "M %p %zu\n", *p, n);
  return 0;
}
err cudaFree(void *p) {
  for (int i = 0; p && i < count; i++)
    if (held[i].address == (uint64_t)p) {
      fake_give(held[i].size);
      held[i] = held[--count];
      if (log_file) fprintf(log_file, "F %p\n", p);
      break;
    }
  return 0;
}
err cudaMemGetInfo(size_t *left, size_t *all) {
  begin();
  *left = capacity - used;
  *all = capacity;
  return 0;
}
err cudaHostAlloc(void **p, size_t n, unsigned f) { *p = malloc(n ? n : 1); return 0; }
err cudaMallocManaged(void **p, size_t n, unsigned f) { *p = malloc(n ? n : 1); return 0; }
err cudaFreeHost(void *p) { free(p); return 0; }
err cudaHostGetDevicePointer(void **d, void *p, unsigned f) { *d = p; return 0; }
err cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  memset(a, 0, sizeof *a);
  a->type = on_device(p) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  a->devicePointer = (void *)p;
  return 0;
}

/* What came from the host in small pieces goes back as it came (DDP's buckets travel so); all else reads as zeros. */
#define KEPT 1024
#define SMALL 16384
static struct { uint64_t address; size_t size; char bytes[SMALL]; } kept[KEPT];
static int kept_count;
static int kept_at(const void *p) {
  for (int i = 0; i < (kept_count < KEPT ? kept_count : KEPT); i++)
    if (kept[i].address == (uint64_t)p) return i;
  return -1;
}
err cudaMemcpyAsync(void *to, const void *from, size_t n, int kind, void *stream) {
  int i = n <= SMALL ? kept_at(on_device(to) ? to : from) : -1;
  if (log_file) fprintf(log_file, "C %zu %d\n", n, kind);
  if (on_device(to)) {
    if (on_device(from) || n > SMALL) return 0;
    if (i < 0) i = kept_count++ % KEPT;
    kept[i].address = (uint64_t)to;
    kept[i].size = n;
    memcpy(kept[i].bytes, from, n);
  } else {
    memset(to, 0, n);
    if (on_device(from) && i >= 0) memcpy(to, kept[i].bytes, n < kept[i].size ? n : kept[i].size);
  }
  return 0;
}
err cudaMemcpy(void *to, const void *from, size_t n, int kind) { return cudaMemcpyAsync(to, from, n, kind, 0); }

/* ---- the device */
err cudaGetDeviceCount(int *n) { *n = 1; return 0; }
err cudaGetDevice(int *d) { *d = 0; return 0; }
err cudaSetDevice(int d) { return 0; }
err cudaDriverGetVersion(int *v) { *v = 12010; return 0; }
err cudaRuntimeGetVersion(int *v) { *v = 12010; return 0; }
err cudaDeviceGetStreamPriorityRange(int *low, int *high) { *low = 0; *high = -5; return 0; }
err cudaDeviceGetPCIBusId(char *s, int n, int d) { snprintf(s, n, "0000:00:00.0"); return 0; }
err cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 1; return 0; }
static int arch(void) { return asked("DRIVER_ARCH", 80); }
err cudaGetDeviceProperties_v2(struct cudaDeviceProp *p, int d) { /* an A100's, an H100's units */
  begin();
  memset(p, 0, sizeof *p);
  strcpy(p->name, "no GPU");
  p->totalGlobalMem = capacity;
  p->major = arch() / 10;
  p->minor = arch() % 10;
  p->multiProcessorCount = arch() >= 90 ? 132 : 108;
  p->warpSize = 32;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 166912;
  p->sharedMemPerMultiprocessor = 167936;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->maxBlocksPerMultiProcessor = 32;
  p->l2CacheSize = 41943040;
  p->totalConstMem = 65536;
  p->textureAlignment = 512;
  p->unifiedAddressing = p->concurrentKernels = p->cooperativeLaunch = p->managedMemory = 1;
  return 0;
}
err cudaDeviceGetAttribute(int *v, int a, int d) {
  struct cudaDeviceProp p;
  cudaGetDeviceProperties_v2(&p, d);
  *v = a == cudaDevAttrMaxThreadsPerBlock ? p.maxThreadsPerBlock
       : a == cudaDevAttrMaxSharedMemoryPerBlock ? (int)p.sharedMemPerBlock
       : a == cudaDevAttrMaxSharedMemoryPerBlockOptin ? (int)p.sharedMemPerBlockOptin
       : a == cudaDevAttrMaxSharedMemoryPerMultiprocessor ? (int)p.sharedMemPerMultiprocessor
       : a == cudaDevAttrWarpSize ? p.warpSize
       : a == cudaDevAttrMultiProcessorCount ? p.multiProcessorCount
       : a == cudaDevAttrMaxThreadsPerMultiProcessor ? p.maxThreadsPerMultiProcessor
       : a == cudaDevAttrMaxRegistersPerBlock ? p.regsPerBlock
       : a == cudaDevAttrComputeCapabilityMajor ? p.major
       : a == cudaDevAttrComputeCapabilityMinor ? p.minor
                                                : 1;
  return 0;
}

/* ---- streams and events: how far each stream knows every other one to be, and how far the host does */
#define STREAMS 224
static uint64_t reached[STREAMS][STREAMS], host[STREAMS];
static int streams = 1;
typedef struct { int stream, recorded; uint64_t reached[STREAMS]; } Event;
static int late(void) { static int is = -1; return is < 0 ? (is = asked("DRIVER_LATE", 0)) : is; }
static int number(void *stream) { uint64_t v = (uint64_t)stream; return v < 0x10 ? 0 : (int)v - 0x10; }
static void join(uint64_t *to, const uint64_t *from) {
  for (int i = 0; i < streams; i++)
    if (from[i] > to[i]) to[i] = from[i];
}
err cudaStreamCreate(void **s) {
  if (streams == STREAMS) abort();
  *s = (void *)(uint64_t)(0x10 + streams++);
  return 0;
}
err cudaStreamCreateWithPriority(void **s, unsigned f, int p) { return cudaStreamCreate(s); }
err cudaStreamGetPriority(void *s, int *p) { *p = 0; return 0; }
err cudaStreamIsCapturing(void *s, int *status) { *status = 0; return 0; }
err cudaStreamGetCaptureInfo_v2(void *s, int *status, unsigned long long *id, void *g, void *d, size_t *n) {
  *status = 0;
  if (id) *id = 0;
  return 0;
}
err cudaEventCreateWithFlags(void **e, unsigned f) { *e = calloc(1, sizeof(Event)); return 0; }
err cudaEventCreate(void **e) { return cudaEventCreateWithFlags(e, 0); }
err cudaEventDestroy(void *e) { free(e); return 0; }
err cudaEventElapsedTime(float *ms, void *a, void *b) { *ms = 1; return 0; }
err cudaEventRecord(void *e, void *stream) {
  Event *event = e;
  int i = number(stream);
  reached[i][i]++;
  event->stream = i;
  event->recorded = 1;
  memcpy(event->reached, reached[i], sizeof event->reached);
  return 0;
}
err cudaStreamWaitEvent(void *stream, void *e, unsigned f) {
  if (((Event *)e)->recorded) join(reached[number(stream)], ((Event *)e)->reached);
  return 0;
}
err cudaEventSynchronize(void *e) {
  if (((Event *)e)->recorded) join(host, ((Event *)e)->reached);
  return 0;
}
err cudaEventQuery(void *e) {
  Event *event = e;
  return !late() || !event->recorded || event->reached[event->stream] <= host[event->stream] ? 0 : 600;
}
err cudaStreamSynchronize(void *stream) { join(host, reached[number(stream)]); return 0; }
err cudaStreamQuery(void *stream) { int i = number(stream); return !late() || reached[i][i] <= host[i] ? 0 : 600; }
err cudaDeviceSynchronize(void) {
  for (int i = 0; i < streams; i++) join(host, reached[i]);
  return 0;
}

/* ---- kernels */
#define QUEUE 1024 /* launches that may stand behind the one at work */
static struct { int stream; uint64_t reached; } queue[QUEUE];
static uint64_t launches;
static void launched(void *stream) {
  int i = number(stream), slot = launches++ % QUEUE;
  if (launches > QUEUE && queue[slot].reached > host[queue[slot].stream]) host[queue[slot].stream] = queue[slot].reached;
  queue[slot].stream = i;
  queue[slot].reached = ++reached[i][i];
}
typedef struct { const void *function; const char *name; } Name;
static Name *names;
static int name_count, name_room;
void **__cudaRegisterFatBinary(void *p) { static void *binary; return &binary; }
void __cudaRegisterFunction(void **h, const char *f, char *d, const char *name, int l, void *a, void *b, void *c, void *e,
                            int *w) {
  if (name_count == name_room) names = realloc(names, (name_room = name_room ? 2 * name_room : 65536) * sizeof(Name));
  names[name_count].function = f;
  names[name_count++].name = name;
}
static int by_function(const void *a, const void *b) {
  const Name *one = a, *other = b;
  return one->function < other->function ? -1 : one->function > other->function;
}
static const char *named(const void *f) {
  static int sorted;
  Name wanted = {f, 0}, *found;
  if (sorted != name_count) qsort(names, sorted = name_count, sizeof(Name), by_function);
  found = bsearch(&wanted, names, name_count, sizeof(Name), by_function);
  return found ? found->name : "?";
}
static __thread struct { Dim grid, block; size_t shared; void *stream; } calls[64];
static __thread int depth;
unsigned __cudaPushCallConfiguration(Dim grid, Dim block, size_t shared, void *stream) {
  calls[depth].grid = grid;
  calls[depth].block = block;
  calls[depth].shared = shared;
  calls[depth++].stream = stream;
  return 0;
}
err __cudaPopCallConfiguration(Dim *grid, Dim *block, size_t *shared, void **stream) {
  *grid = calls[--depth].grid;
  *block = calls[depth].block;
  *shared = calls[depth].shared;
  *stream = calls[depth].stream;
  return 0;
}
err cudaLaunchKernel(const void *f, Dim grid, Dim block, void **args, size_t shared, void *stream) {
  launched(stream);
  if (log_file)
    fprintf(log_file, "K %d %u,%u,%u %u,%u,%u %s\n", number(stream), grid.x, grid.y, grid.z, block.x, block.y, block.z,
            named(f));
  return 0;
}
void fake_launched(const char *name, unsigned x, unsigned y, unsigned z, unsigned threads, void *stream) {
  launched(stream);
  if (log_file) fprintf(log_file, "K %d %u,%u,%u %u,1,1 %s\n", number(stream), x, y, z, threads, name);
}
err cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->binaryVersion = a->ptxVersion = arch();
  a->maxDynamicSharedSizeBytes = 166912;
  return 0;
}
err cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s, unsigned flags) {
  *n = 2;
  return 0;
}
const char *cudaGetErrorString(int e) { return e == 2 ? "out of memory" : "no error"; }
const char *cudaGetErrorName(int e) { return e == 2 ? "cudaErrorMemoryAllocation" : "cudaSuccess"; }
