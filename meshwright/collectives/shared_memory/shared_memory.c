// Reduces tensors in the shared memory of ranks on one machine. steps.py calls it, and segment.py defines the same
// structs in Python, which refuses a compiled helper whose sizes differ.
//
// Every rank numbers its collectives 1, 2, 3, ... and all ranks start the same collectives in the same order, so one
// counter describes the progress of a rank:
//     published = k    the rank's tensors up to collective k are complete and described in its ring
//     done = k         the rank no longer reads or writes tensors of its peers for collectives up to k
// Only the rank itself writes to its segment. Counters are stored with release and loaded with acquire semantics: a
// rank that reads a counter also sees the memory that was written before it, on processors that reorder writes too.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "sums.h"

enum { RING = 64, SLOTS = 256, STAGE_BYTES = 65536, LINE_BYTES = 128 };
enum { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER };
enum { FINISHED = 0, WAITING = 1, MISMATCH = 2, UNREACHABLE = 3 };

typedef struct {
    int64_t slot, generation, file_descriptor, file_bytes, offset; // where the tensor is
    int64_t count, type, verb, mean, staged, bucket;               // its size and type, and the operation
    int64_t unused[5];
} Descriptor; // 128 bytes

typedef struct {
    int64_t published, retired, unused0[14];
    int64_t done, unused1[15];
    int64_t stopped_by, unused2[15];
    Descriptor ring[RING];
    int64_t generations[SLOTS]; // of the storage in each slot, 0 when it is gone
    char stage[RING][STAGE_BYTES];
} Segment;

typedef struct {
    int64_t generation, bytes;
    char *base;
} Mapping;

typedef struct {
    int64_t rank, ranks, spins;
    int64_t started, reduced, finished; // collectives started by this rank, reduced by it, finished by all ranks
    int64_t blamed, sequence, error;    // of the last result that was not FINISHED
    Segment **segments;
    int64_t *pids, *retired;
    Mapping *mappings; // [ranks][SLOTS]
    char *addresses[RING]; // of this rank's tensors
} Group;

int64_t segment_bytes(void) { return sizeof(Segment); }

Group *group_new(int64_t rank, int64_t ranks, void **segments, const int64_t *pids, int64_t spins) {
    Group *g = calloc(1, sizeof *g);
    if (!g) return NULL;
    g->rank = rank, g->ranks = ranks, g->spins = spins;
    g->segments = calloc(ranks, sizeof *g->segments);
    g->pids = calloc(ranks, sizeof *g->pids);
    g->retired = calloc(ranks, sizeof *g->retired);
    g->mappings = calloc(ranks * SLOTS, sizeof *g->mappings);
    if (!g->segments || !g->pids || !g->retired || !g->mappings) return NULL;
    memcpy(g->segments, segments, ranks * sizeof *segments);
    memcpy(g->pids, pids, ranks * sizeof *pids);
    return g;
}

static void unmap(Mapping *m) {
    if (m->base) munmap(m->base, m->bytes);
    m->base = NULL, m->generation = 0;
}

void group_free(Group *g) {
    for (int64_t i = 0; i < g->ranks * SLOTS; i++) unmap(&g->mappings[i]);
    free(g->segments), free(g->pids), free(g->retired), free(g->mappings), free(g);
}

int64_t group_mappings(const Group *g) {
    int64_t count = 0;
    for (int64_t i = 0; i < g->ranks * SLOTS; i++) count += g->mappings[i].base != NULL;
    return count;
}

void fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// ---- waiting

static void relax(void) {
#if defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory"); // `yield` does nothing on most Arm processors
#elif defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// Returns a rank whose counter is below `sequence`, or -1.
static int64_t lagging(const Group *g, int wants_done, int64_t sequence) {
    for (int64_t r = 0; r < g->ranks; r++) {
        const int64_t *counter = wants_done ? &g->segments[r]->done : &g->segments[r]->published;
        if (__atomic_load_n(counter, __ATOMIC_ACQUIRE) < sequence) return r;
    }
    return -1;
}

// Waits until the counters of all ranks have reached `sequence`. It first polls, then yields the core, which a peer may
// need, and then sleeps between polls. After a tenth of a second it returns WAITING, so that Python can check whether
// the peer is alive and can handle signals.
static int await(Group *g, int wants_done, int64_t sequence) {
    const int64_t yields = 1000, longest_wait_ns = 100000000, sleep_ns = 50000;
    int64_t deadline = 0;
    for (int64_t round = 0;; round++) {
        int64_t rank = lagging(g, wants_done, sequence);
        if (rank < 0) return FINISHED;
        if (round < g->spins) {
            relax();
        } else if (round < g->spins + yields) {
            sched_yield();
        } else {
            int64_t now = now_ns();
            if (!deadline) deadline = now + longest_wait_ns;
            if (now > deadline) {
                g->blamed = rank, g->sequence = sequence;
                return WAITING;
            }
            nanosleep(&(struct timespec){0, sleep_ns}, NULL);
        }
    }
}

// ---- the peers' tensors

// Unmaps the storages that the peer no longer has.
static void unmap_retired(Group *g, int64_t rank) {
    Segment *peer = g->segments[rank];
    int64_t retired = __atomic_load_n(&peer->retired, __ATOMIC_ACQUIRE);
    if (retired == g->retired[rank]) return;
    g->retired[rank] = retired;
    for (int64_t slot = 0; slot < SLOTS; slot++) {
        Mapping *m = &g->mappings[rank * SLOTS + slot];
        if (m->base && m->generation != __atomic_load_n(&peer->generations[slot], __ATOMIC_RELAXED)) unmap(m);
    }
}

// Returns the peer's tensor, mapped into this process. The file has no name but /proc/PID/fd/FD, and the peer keeps it
// open until the collective is finished.
static char *map_tensor(Group *g, int64_t rank, const Descriptor *d, int64_t sequence) {
    Mapping *m = &g->mappings[rank * SLOTS + d->slot];
    if (m->base && m->generation == d->generation) return m->base + d->offset;
    unmap(m);
    char path[64];
    snprintf(path, sizeof path, "/proc/%lld/fd/%lld", (long long)g->pids[rank], (long long)d->file_descriptor);
    int file = open(path, O_RDWR | O_CLOEXEC);
    void *base = file < 0 ? MAP_FAILED
                          : mmap(NULL, d->file_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
    int error = errno;
    if (file >= 0) close(file);
    if (base == MAP_FAILED) {
        g->blamed = rank, g->sequence = sequence, g->error = error;
        return NULL;
    }
    m->base = base, m->bytes = d->file_bytes, m->generation = d->generation;
    return m->base + d->offset;
}

// ---- collectives

// Returns where the slice of a rank begins. Slices are whole lines of 128 bytes, so that no two ranks write to the same
// line.
static int64_t slice_begin(const Descriptor *d, int64_t rank, int64_t ranks) {
    int64_t unit = LINE_BYTES / width_of(d->type), units = (d->count + unit - 1) / unit;
    int64_t begin = units * rank / ranks * unit;
    return begin < d->count ? begin : d->count;
}

static int same(const Descriptor *a, const Descriptor *b) {
    return a->count == b->count && a->type == b->type && a->verb == b->verb && a->mean == b->mean &&
           a->staged == b->staged && a->bucket == b->bucket;
}

// Combines the tensors of a collective that all ranks have published.
static int combine(Group *g, int64_t sequence) {
    const int64_t entry = sequence % RING, ranks = g->ranks, rank = g->rank;
    const Descriptor *mine = &g->segments[rank]->ring[entry];
    char *tensors[ranks];
    for (int64_t r = 0; r < ranks; r++) {
        const Descriptor *theirs = &g->segments[r]->ring[entry];
        if (!same(mine, theirs)) {
            g->blamed = r, g->sequence = sequence;
            return MISMATCH;
        }
        if (mine->staged) {
            tensors[r] = g->segments[r]->stage[entry];
        } else {
            unmap_retired(g, r);
            tensors[r] = r == rank ? g->addresses[entry] : map_tensor(g, r, theirs, sequence);
            if (!tensors[r]) return UNREACHABLE;
        }
    }
    const int64_t begin = slice_begin(mine, rank, ranks), end = slice_begin(mine, rank + 1, ranks);
    if (mine->verb == ALL_GATHER) {
        const int64_t width = width_of(mine->type);
        for (int64_t r = 0; r < ranks; r++) {
            const int64_t from = slice_begin(mine, r, ranks) * width, to = slice_begin(mine, r + 1, ranks) * width;
            if (r != rank) memcpy(tensors[rank] + from, tensors[r] + from, to - from);
        }
    } else if (mine->staged) {
        reduce(mine->type, tensors, ranks, &g->addresses[entry], 1, 0, mine->count, mine->mean);
    } else if (mine->verb == REDUCE_SCATTER) {
        reduce(mine->type, tensors, ranks, &tensors[rank], 1, begin, end, mine->mean);
    } else {
        reduce(mine->type, tensors, ranks, tensors, ranks, begin, end, mine->mean);
    }
    return FINISHED;
}

// Combines published collectives up to `until`. Where `waits` is 0 it stops at the first that is not published by all.
static int advance(Group *g, int64_t until, int waits) {
    while (g->reduced < until) {
        const int64_t sequence = g->reduced + 1;
        if (waits) {
            int state = await(g, 0, sequence);
            if (state) return state;
        } else if (lagging(g, 0, sequence) >= 0) {
            return FINISHED;
        }
        int state = combine(g, sequence);
        if (state) return state;
        g->reduced = sequence;
        __atomic_store_n(&g->segments[g->rank]->done, sequence, __ATOMIC_RELEASE);
    }
    return FINISHED;
}

// Finishes all collectives up to `sequence`. After WAITING the caller calls it again.
int group_wait(Group *g, int64_t sequence) {
    int state = advance(g, sequence, 1);
    if (!state) state = await(g, 1, sequence);
    if (!state && g->finished < sequence) g->finished = sequence;
    return state;
}

// Publishes the next collective, and combines what can be combined without waiting. Its entry in the ring must be free:
// the caller has waited for the collective that is RING before it.
int group_start(Group *g, const Descriptor *d, char *address) {
    Segment *mine = g->segments[g->rank];
    const int64_t sequence = g->started + 1, entry = sequence % RING;
    mine->ring[entry] = *d;
    g->addresses[entry] = address;
    if (d->staged && d->count) memcpy(mine->stage[entry], address, d->count * width_of(d->type));
    g->started = sequence;
    __atomic_store_n(&mine->published, sequence, __ATOMIC_RELEASE);
    return advance(g, sequence, 0);
}
