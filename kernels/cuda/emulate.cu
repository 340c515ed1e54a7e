/* Fibers, and what CUDA's threads do together. See emulate.cuh. */
#include "emulate.cuh"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulate
{

struct block block_now;
struct thread *thread_now;

namespace
{

enum { MAX_THREADS = 1024, STACK_BYTES = 128 << 10, SHARED_BYTES = 256 << 10 };

#if defined(__x86_64__)

typedef void *context;

/* Saves the registers that a call must keep on the stack, and goes on with another stack. */
extern "C" void qkv_emulate_switch(context *from, context to) __attribute__((visibility("hidden")));
asm(".text\n"
    ".hidden qkv_emulate_switch\n"
    ".globl qkv_emulate_switch\n"
    ".type qkv_emulate_switch, @function\n"
    "qkv_emulate_switch:\n"
    "    pushq %rbp\n    pushq %rbx\n    pushq %r12\n    pushq %r13\n    pushq %r14\n"
    "    pushq %r15\n"
    "    movq %rsp, (%rdi)\n"
    "    movq %rsi, %rsp\n"
    "    popq %r15\n    popq %r14\n    popq %r13\n    popq %r12\n    popq %rbx\n    popq %rbp\n"
    "    ret\n"
    ".size qkv_emulate_switch, . - qkv_emulate_switch\n");

void change_stack(context *from, context *to)
{
    qkv_emulate_switch(from, *to);
}

/* As if `entry` had called change_stack() as its first act: six registers, then where to return to,
 * then what makes the stack look as after a call. */
void prepare(context *at, uint8_t *stack, void (*entry)())
{
    void **top = (void **)(void *)(stack + STACK_BYTES);
    *--top = NULL;
    *--top = (void *)entry;
    for (int i = 0; i < 6; i++) {
        *--top = NULL;
    }
    *at = top;
}

#else

typedef ucontext_t context;

void change_stack(context *from, context *to)
{
    (void)swapcontext(from, to);
}

void prepare(context *at, uint8_t *stack, void (*entry)())
{
    (void)getcontext(at);
    at->uc_stack.ss_sp = stack;
    at->uc_stack.ss_size = STACK_BYTES;
    at->uc_link = NULL;
    makecontext(at, entry, 0);
}

#endif

/* Where to go on, and on which stack: what AddressSanitizer wants to be told. */
struct place {
    context at;
    const void *stack;
    size_t stack_bytes;
    void *frames;
};

struct fiber {
    struct place place;
    uint8_t *stack;
    struct thread thread;
};

struct state {
    pthread_mutex_t lock;
    struct fiber fibers[MAX_THREADS];
    struct warp warps[MAX_THREADS / 32];
    struct place scheduler;
    struct place *left; /* by the switch that is under way */
    struct fiber *now;
    struct fiber *queue[MAX_THREADS]; /* a ring of fibers that wait */
    unsigned queue_first;
    unsigned n_queued;
    unsigned n_started;
    unsigned n_threads;
    unsigned n_fibers; /* that this block used */
    unsigned n_idle;   /* switches since the last that a barrier let go, or a thread began */
    const char *failure;
    kernel_body body;
    const void *kernel;
    const void *params;
};

struct state all = {};

/* The first act on another stack. */
void arrive(struct place *here)
{
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(here->frames, &all.left->stack, &all.left->stack_bytes);
#else
    (void)here;
#endif
}

void switch_to(struct place *from, struct place *to)
{
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&from->frames, to->stack, to->stack_bytes);
#endif
    all.left = from;
    change_stack(&from->at, &to->at);
    arrive(from);
}

/* The upper `n_bytes` of a fiber's stack, whose frames never returned: what the sanitizer has
 * marked in them is forgotten. */
void forget_frames(struct fiber *fiber, size_t n_bytes)
{
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(fiber->stack + STACK_BYTES - n_bytes, n_bytes);
#else
    (void)fiber;
    (void)n_bytes;
#endif
}

/* A fiber that begins anew; it was left in fiber_main(). */
void renew(struct fiber *fiber, void (*entry)())
{
    forget_frames(fiber, 1024);
    fiber->place.stack = fiber->stack;
    fiber->place.stack_bytes = STACK_BYTES;
    fiber->place.frames = NULL;
    prepare(&fiber->place.at, fiber->stack, entry);
}

void enter(struct fiber *fiber)
{
    all.now = fiber;
    thread_now = &fiber->thread;
}

void begin_thread(struct fiber *fiber)
{
    unsigned n = all.n_started++;
    const dim3 &size = block_now.size;
    fiber->thread.index = dim3(n % size.x, n / size.x % size.y, n / (size.x * size.y));
    fiber->thread.lane = n % 32;
    fiber->thread.warp = &all.warps[n / 32];
    all.n_idle = 0;
    enter(fiber);
}

struct fiber *take_waiting()
{
    struct fiber *next = all.queue[all.queue_first];
    all.queue_first = (all.queue_first + 1) % MAX_THREADS;
    all.n_queued--;
    return next;
}

/* A thread that returned: whoever waits for it must not. */
void end_thread(struct fiber *fiber)
{
    struct warp *warp = fiber->thread.warp;
    warp->n_lanes--;
    block_now.n_live--;
    all.n_idle = 0;
    if (block_now.n_arrived > 0 && block_now.n_arrived == block_now.n_live) {
        block_now.n_arrived = 0;
        block_now.vote_result = block_now.vote;
        block_now.vote = 0;
        block_now.generation++;
    }
}

/* A fiber runs threads one after the other for as long as they do not wait. */
void fiber_main()
{
    struct fiber *me = all.now;
    arrive(&me->place);
    for (;;) {
        all.body(all.kernel, all.params);
        end_thread(me);
        if (all.n_started < all.n_threads) {
            begin_thread(me);
            continue;
        }
        if (all.n_queued == 0) {
            switch_to(&me->place, &all.scheduler);
        } else {
            struct fiber *next = take_waiting();
            enter(next);
            switch_to(&me->place, &next->place);
        }
    }
}

/* The fiber waits: the next thread that has not begun runs, else the next that waits. */
void wait()
{
    struct fiber *me = all.now;
    all.queue[(all.queue_first + all.n_queued++) % MAX_THREADS] = me;
    if (all.n_started < all.n_threads) {
        struct fiber *fresh = &all.fibers[all.n_fibers++];
        renew(fresh, fiber_main);
        begin_thread(fresh);
        switch_to(&me->place, &fresh->place);
        return;
    }
    if (all.n_idle++ > 2 * all.n_threads) {
        all.failure = "a barrier or a collective of a warp that not all of its threads reach";
        switch_to(&me->place, &all.scheduler); /* never comes back */
    }
    struct fiber *next = take_waiting();
    enter(next);
    if (next != me) {
        switch_to(&me->place, &next->place);
    }
}

const char *run_block()
{
    unsigned n = all.n_threads;
    all.queue_first = 0;
    all.n_queued = 0;
    all.n_started = 0;
    all.n_fibers = 1;
    all.n_idle = 0;
    block_now.n_arrived = 0;
    block_now.vote = 0;
    block_now.n_live = n;
    for (unsigned w = 0; w < n / 32; w++) {
        all.warps[w].generation = 0;
        all.warps[w].n_arrived = 0;
        all.warps[w].n_lanes = 32;
    }
    renew(&all.fibers[0], fiber_main);
    begin_thread(&all.fibers[0]);
    switch_to(&all.scheduler, &all.fibers[0].place);
    return all.failure;
}

/* Once: stacks, and dynamic shared memory. Pages become resident when they are touched. */
bool get_memory()
{
    if (block_now.shared != NULL) {
        return true;
    }
    size_t n_bytes = (size_t)MAX_THREADS * STACK_BYTES + SHARED_BYTES;
    void *memory = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        return false;
    }
    for (int i = 0; i < MAX_THREADS; i++) {
        all.fibers[i].stack = (uint8_t *)memory + (size_t)i * STACK_BYTES;
    }
    block_now.shared = (uint8_t *)memory + (size_t)MAX_THREADS * STACK_BYTES;
    return true;
}

const char *run_locked(dim3 grid, size_t shared_bytes)
{
    if (!get_memory()) {
        return "no memory for the stacks of a block";
    }
    all.failure = NULL;
    block_now.grid = grid;
    for (unsigned z = 0; z < grid.z; z++) {
        for (unsigned y = 0; y < grid.y; y++) {
            for (unsigned x = 0; x < grid.x; x++) {
                block_now.index = dim3(x, y, z);
                memset(block_now.shared, 0xff, shared_bytes); /* NaN: nothing may be read unset */
                const char *failure = run_block();
                if (failure != NULL) {
                    for (struct fiber &fiber : all.fibers) {
                        forget_frames(&fiber, STACK_BYTES);
                    }
                    return failure;
                }
            }
        }
    }
    return NULL;
}

} // namespace

const char *run(dim3 grid, dim3 size, size_t shared_bytes, kernel_body body, const void *kernel,
                const void *params)
{
    unsigned n = size.x * size.y * size.z;
    if (n == 0 || n % 32 != 0 || n > MAX_THREADS || shared_bytes > SHARED_BYTES) {
        return "blocks are 32 to 1024 threads in whole warps with at most 256 KiB of shared memory";
    }
    (void)pthread_mutex_lock(&all.lock);
    block_now.size = size;
    all.n_threads = n;
    all.body = body;
    all.kernel = kernel;
    all.params = params;
    const char *failure = run_locked(grid, shared_bytes);
    (void)pthread_mutex_unlock(&all.lock);
    return failure;
}

int barrier_count(int predicate)
{
    unsigned generation = block_now.generation;
    block_now.vote += predicate != 0;
    if (++block_now.n_arrived == block_now.n_live) {
        block_now.n_arrived = 0;
        block_now.vote_result = block_now.vote;
        block_now.vote = 0;
        block_now.generation++;
        all.n_idle = 0;
    } else {
        while (block_now.generation == generation) {
            wait();
        }
    }
    return block_now.vote_result;
}

void barrier()
{
    (void)barrier_count(0);
}

/* Two sets of places, used in turn: nobody begins the collective after the next before all have
 * read what this one gave. */
lane_data collective(unsigned mask, const lane_data &in, combine function)
{
    struct thread *thread = thread_now;
    struct warp *warp = thread->warp;
    unsigned generation = warp->generation;
    unsigned place = generation % 2;
    if (mask != 0xffffffffu) {
        all.failure = "a collective of a part of a warp: whole warps only";
        switch_to(&all.now->place, &all.scheduler);
    }
    warp->in[place][thread->lane] = in;
    if (++warp->n_arrived == 32) {
        warp->n_arrived = 0;
        if (function != NULL) {
            function(warp->in[place], warp->out[place]);
        }
        warp->generation++;
        all.n_idle = 0;
    } else {
        while (warp->generation == generation) {
            wait();
        }
    }
    return function == NULL ? lane_data{} : warp->out[place][thread->lane];
}

lane_data exchange(unsigned mask, const lane_data &in, unsigned lane)
{
    struct warp *warp = thread_now->warp;
    unsigned place = warp->generation % 2;
    (void)collective(mask, in, NULL);
    return warp->in[place][lane];
}

thread_local int gpu_now;

namespace
{
size_t memory_used; /* changed by atomic operations alone */
}

bool memory_size(size_t *out)
{
    const char *text = getenv("QKV_EMULATED_KIB");
    char *end = NULL;
    errno = 0;
    unsigned long long kib = text != NULL ? strtoull(text, &end, 10) : 4 << 20;
    bool sound = text == NULL || (errno == 0 && end != text && *end == '\0');
    *out = (size_t)kib << 10;
    return sound && kib > 0 && kib <= 1ull << 34;
}

size_t memory_left()
{
    size_t size = 0;
    size_t used = __atomic_load_n(&memory_used, __ATOMIC_RELAXED);
    return memory_size(&size) && used < size ? size - used : 0;
}

void memory_taken(size_t n_bytes)
{
    __atomic_add_fetch(&memory_used, n_bytes, __ATOMIC_RELAXED);
}

void memory_given(size_t n_bytes)
{
    __atomic_sub_fetch(&memory_used, n_bytes, __ATOMIC_RELAXED);
}

} // namespace emulate

static void vote(const emulate::lane_data *in, emulate::lane_data *out)
{
    unsigned ballot = 0;
    for (unsigned i = 0; i < 32; i++) {
        ballot |= (in[i].words[0] != 0 ? 1u : 0u) << i;
    }
    for (unsigned i = 0; i < 32; i++) {
        out[i].words[0] = ballot;
    }
}

unsigned __ballot_sync(unsigned mask, int predicate)
{
    emulate::lane_data in = {};
    in.words[0] = predicate != 0;
    return emulate::collective(mask, in, vote).words[0];
}
