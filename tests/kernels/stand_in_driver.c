// Stands for libcuda.so.1 where there is no GPU: has what Triton's launchers call, counts it and keeps launches.
#include <string.h>
#include "cuda.h"

#define MOST_LAUNCHES 64
#define MOST_BYTES 4096

typedef struct {
  unsigned long long function, stream;
  unsigned grid[3], block, shared, attributes, bytes;
  unsigned char parameters[MOST_BYTES];
} Launch;

static Launch launches[MOST_LAUNCHES];
static int num_launches, num_others;
static size_t sizes[1 << 16][128]; // of a function's parameters, by its handle; 0 ends them
static size_t next_function = 1;

Launch *stand_in_launches(void) { return launches; }
int stand_in_num_launches(void) { return num_launches; }
int stand_in_num_others(void) { return num_others; }
void stand_in_forget(void) { num_launches = num_others = 0; }
void stand_in_sizes(size_t function, size_t count, const size_t *given) {
  memcpy(sizes[function], given, count * sizeof(size_t));
}

#define ANSWER(name, parameters, body) CUresult CUDAAPI name parameters { num_others++; body; return CUDA_SUCCESS; }

CUresult CUDAAPI cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}
ANSWER(cuInit, (unsigned flags), )
ANSWER(cuCtxGetDevice, (CUdevice *device), *device = 0)
ANSWER(cuCtxSetCurrent, (CUcontext context), )
ANSWER(cuCtxGetLimit, (size_t *value, CUlimit limit), *value = 0)
ANSWER(cuCtxSetLimit, (CUlimit limit, size_t value), )
ANSWER(cuDeviceGet, (CUdevice *device, int ordinal), *device = ordinal)
ANSWER(cuDeviceGetAttribute, (int *value, CUdevice_attribute which, CUdevice device),
       *value = which == CU_DEVICE_ATTRIBUTE_WARP_SIZE ? 32 : 232448)
ANSWER(cuDevicePrimaryCtxRetain, (CUcontext *context, CUdevice device), *context = (CUcontext)1)
ANSWER(cuDriverGetVersion, (int *version), *version = 13020)
ANSWER(cuFuncGetAttribute, (int *value, CUfunction_attribute which, CUfunction function),
       *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0)
ANSWER(cuFuncSetAttribute, (CUfunction function, CUfunction_attribute which, int value), )
ANSWER(cuFuncSetCacheConfig, (CUfunction function, CUfunc_cache config), )
ANSWER(cuGetErrorString, (CUresult error, const char **text), *text = "stand-in")
ANSWER(cuModuleLoadData, (CUmodule *module, const void *image), *module = (CUmodule)1)
ANSWER(cuModuleUnload, (CUmodule module), )
ANSWER(cuModuleGetFunction, (CUfunction *function, CUmodule module, const char *name),
       *function = (CUfunction)next_function++)
ANSWER(cuPointerGetAttribute, (void *value, CUpointer_attribute which, CUdeviceptr address),
       *(CUdeviceptr *)value = address)
ANSWER(cuStreamIsCapturing, (CUstream stream, CUstreamCaptureStatus *status), *status = 0)
ANSWER(cuOccupancyMaxActiveClusters, (int *count, CUfunction function, const CUlaunchConfig *config), *count = 1)

// A tensor map that can be read: address, rank, swizzle, then sizes, strides and box of each dimension.
CUresult CUDAAPI cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                        const cuuint64_t *size, const cuuint64_t *stride, const cuuint32_t *box,
                                        const cuuint32_t *element, CUtensorMapInterleave interleave,
                                        CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                        CUtensorMapFloatOOBfill fill) {
  unsigned long long words[16] = {(unsigned long long)address, rank | swizzle << 8 | (unsigned)type << 16};
  for (cuuint32_t dim = 0; dim < rank && dim < 4; dim++) {
    words[2 + 3 * dim] = size[dim];
    words[3 + 3 * dim] = dim + 1 < rank ? stride[dim] : 0;
    words[4 + 3 * dim] = box[dim];
  }
  memcpy(map, words, sizeof(words));
  num_others++;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  if (num_launches == MOST_LAUNCHES) return CUDA_ERROR_OUT_OF_MEMORY;
  Launch *launch = &launches[num_launches++];
  *launch = (Launch){(size_t)function, (size_t)config->hStream, {config->gridDimX, config->gridDimY, config->gridDimZ},
                     config->blockDimX, config->sharedMemBytes, config->numAttrs, 0};
  for (size_t index = 0; sizes[(size_t)function][index]; index++) {
    size_t size = sizes[(size_t)function][index];
    memcpy(launch->parameters + launch->bytes, parameters[index], size);
    launch->bytes += size;
  }
  return CUDA_SUCCESS;
}
