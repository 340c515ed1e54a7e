/* The names of CUDA that the kernels use, for a plain C++ compiler: the threads of a block are
 * fibers of one thread of the processor, blocks run one after the other.
 *
 * A fiber runs until it waits: at __syncthreads, or for the other lanes of its warp in a shuffle, a
 * vote or an mma. Kernels that never wait are loops over their threads, on one fiber. Launches hold
 * a lock, so __shared__ is static memory and the state below is plain; both are undefined between
 * launches. A barrier that some threads of a block never reach ends the launch with an error, as
 * does one that only part of a warp reaches: on a GPU both are undefined. */
#ifndef QKV_CUDA_EMULATE_CUH
#define QKV_CUDA_EMULATE_CUH

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define __global__ static
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct dim3 {
    unsigned x;
    unsigned y;
    unsigned z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_)
    {
    }
};

struct uint2 {
    uint32_t x, y;
};

struct uint4 {
    uint32_t x, y, z, w;
};

struct float4 {
    float x, y, z, w;
};

namespace emulate
{

/* What a lane hands to its warp in one collective, and what it gets back. */
struct lane_data {
    uint32_t words[10];
};

struct warp {
    unsigned generation;
    unsigned n_arrived;
    unsigned n_lanes; /* that have not returned */
    unsigned members; /* of the collective that is being gathered: its mask */
    lane_data in[2][32];
    lane_data out[2][32];
};

struct thread {
    dim3 index;
    unsigned lane;
    struct warp *warp;
};

struct block {
    dim3 index;
    dim3 size;
    dim3 grid;
    unsigned generation;
    unsigned n_arrived;
    unsigned n_live;
    int vote; /* of __syncthreads_or and _count */
    int vote_result;
    uint8_t *shared; /* dynamic shared memory */
};

extern struct block block_now;
extern struct thread *thread_now;

void barrier();
int barrier_count(int predicate);

/* All lanes of the warp hand over `in`; the last to arrive calls combine(in, out) once for all. */
typedef void (*combine)(const lane_data *in, lane_data *out);
lane_data collective(unsigned mask, const lane_data &in, combine function);

/* Runs body(params) for all threads of all blocks; NULL, or what went wrong. */
typedef void (*kernel_body)(const void *kernel, const void *params);
const char *run(dim3 grid, dim3 size, size_t shared_bytes, kernel_body body, const void *kernel,
                const void *params);

/* The words of lane `lane` as the lanes handed them over in this collective. */
lane_data exchange(unsigned mask, const lane_data &in, unsigned lane);

template <typename T> static inline T shuffle(unsigned mask, T value, unsigned lane)
{
    static_assert(sizeof(T) <= sizeof(lane_data::words), "a lane hands over 40 bytes at most");
    lane_data in = {};
    memcpy(in.words, &value, sizeof value);
    lane_data got = exchange(mask, in, lane);
    memcpy(&value, got.words, sizeof value);
    return value;
}

/* What there is of GPUs: as many, each with so much memory, which is the host's. Calls go to the
 * current one of the thread, as CUDA's do. */
enum { GPUS = 2 };
extern thread_local int gpu_now;

/* As QKV_EMULATED_KIB says, else 4 GiB; false if it says nothing sensible. Of all GPUs together. */
bool memory_size(size_t *out);
size_t memory_left();
/* A block was taken, or is given back. */
void memory_taken(size_t n_bytes);
void memory_given(size_t n_bytes);

} // namespace emulate

#define threadIdx (emulate::thread_now->index)
#define blockIdx (emulate::block_now.index)
#define blockDim (emulate::block_now.size)
#define gridDim (emulate::block_now.grid)

static inline void __syncthreads()
{
    emulate::barrier();
}
static inline int __syncthreads_or(int predicate)
{
    return emulate::barrier_count(predicate) != 0;
}
static inline int __syncthreads_count(int predicate)
{
    return emulate::barrier_count(predicate);
}
static inline void __syncwarp(unsigned mask = 0xffffffffu)
{
    (void)emulate::exchange(mask, emulate::lane_data{}, 0);
}
/* Groups of `width` lanes, as CUDA has them: sources outside of a group give the lane's own. */
template <typename T>
static inline T __shfl_sync(unsigned mask, T value, int source, int width = 32)
{
    unsigned lane = emulate::thread_now->lane;
    unsigned base = lane & ~(unsigned)(width - 1);
    return emulate::shuffle(mask, value, base + ((unsigned)source & (unsigned)(width - 1)));
}
template <typename T>
static inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32)
{
    unsigned lane = emulate::thread_now->lane;
    unsigned source = lane ^ (unsigned)bits;
    bool inside = source < (lane & ~(unsigned)(width - 1)) + (unsigned)width;
    return emulate::shuffle(mask, value, inside ? source : lane);
}
template <typename T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32)
{
    unsigned lane = emulate::thread_now->lane;
    bool inside = lane % (unsigned)width + delta < (unsigned)width;
    return emulate::shuffle(mask, value, inside ? lane + delta : lane);
}
template <typename T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32)
{
    unsigned lane = emulate::thread_now->lane;
    bool inside = lane % (unsigned)width >= delta;
    return emulate::shuffle(mask, value, inside ? lane - delta : lane);
}
unsigned __ballot_sync(unsigned mask, int predicate);
static inline int __any_sync(unsigned mask, int predicate)
{
    return __ballot_sync(mask, predicate) != 0;
}
static inline int __all_sync(unsigned mask, int predicate)
{
    return __ballot_sync(mask, predicate) == mask;
}
static inline int __popc(unsigned x)
{
    return __builtin_popcount(x);
}
static inline int __ffs(int x)
{
    return __builtin_ffs(x);
}

/* One thread of the processor runs all fibers: nothing comes between reading and writing. */
template <typename T> static inline T atomicAdd(T *at, T value)
{
    T old = *at;
    *at = old + value;
    return old;
}
template <typename T> static inline T atomicMax(T *at, T value)
{
    T old = *at;
    *at = old < value ? value : old;
    return old;
}
template <typename T> static inline T atomicMin(T *at, T value)
{
    T old = *at;
    *at = value < old ? value : old;
    return old;
}

static inline uint32_t __float_as_uint(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
static inline float __uint_as_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
template <typename T> static inline T __ldg(const T *p)
{
    return *p;
}
static inline float __fmul_rn(float a, float b)
{
    return a * b;
}

#endif
