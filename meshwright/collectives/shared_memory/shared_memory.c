// Reduces tensors in the shared memory of ranks on one machine. shared_memory.py says how it is used; segment.py has
// the same structs: Python refuses a helper whose sizes differ from its own.
//
// Every rank numbers its collectives 1, 2, 3, ... and all ranks start the same ones in the same order, so that one
// counter tells how far a rank has come. `published = k`: my tensors up to collective k are complete and described in
// my ring. `done = k`: I have read and written all I want of the peers' tensors up to collective k. Only a rank itself
// writes to its segment. Each counter is stored with release and read with acquire: whoever sees the number also sees
// the memory that it speaks of, on processors that reorder writes too.

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
    int64_t slot, generation, file_descriptor, file_bytes, offset; // where the tensor lies
    int64_t count, type, verb, mean, staged, bucket;               // what it is, and what becomes of it
    int64_t unused[5];
} Descriptor; // one line

typedef struct {
    int64_t published, retired, unused0[14];
    int64_t done, unused1[15];
    int64_t left, unused2[15];
    Descriptor ring[RING];
    int64_t generations[SLOTS]; // of the storage in each slot, 0 once it is gone
    char stage[RING][STAGE_BYTES];
} Segment;

typedef struct {
    int64_t generation, bytes;
    char *base;
} Mapping;

typedef struct {
    int64_t rank, ranks, spins;
    int64_t started, reduced, finished; // by me, by me, by all
    int64_t blamed, sequence, error;    // of the last answer that was not FINISHED
    Segment **segments;
    int64_t *pids, *retired;
    Mapping *mappings; // [ranks][SLOTS]
    char *own[RING];   // addresses of my tensors
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

static void forget(Mapping *m) {
    if (m->base) munmap(m->base, m->bytes);
    m->base = NULL, m->generation = 0;
}

void group_free(Group *g) {
    for (int64_t i = 0; i < g->ranks * SLOTS; i++) forget(&g->mappings[i]);
    free(g->segments), free(g->pids), free(g->retired), free(g->mappings), free(g);
}

int64_t group_mappings(const Group *g) {
    int64_t found = 0;
    for (int64_t i = 0; i < g->ranks * SLOTS; i++) found += g->mappings[i].base != NULL;
    return found;
}

void fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// ---- waiting

static void relax(void) {
#if defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory"); // `yield` does nothing on most of them
#elif defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int64_t lagging(const Group *g, int wants_done, int64_t sequence) {
    for (int64_t r = 0; r < g->ranks; r++) {
        const int64_t *counter = wants_done ? &g->segments[r]->done : &g->segments[r]->published;
        if (__atomic_load_n(counter, __ATOMIC_ACQUIRE) < sequence) return r;
    }
    return -1;
}

// Looks for a moment, then offers the core to others, which a peer may need in order to come, then sleeps. After a
// tenth of a second it answers WAITING, so that Python can see whether the peer lives, and to signals.
static int await(Group *g, int wants_done, int64_t sequence) {
    const int64_t yields = 1000, patience_ns = 100000000, nap_ns = 50000;
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
            if (!deadline) deadline = now + patience_ns;
            if (now > deadline) {
                g->blamed = rank, g->sequence = sequence;
                return WAITING;
            }
            nanosleep(&(struct timespec){0, nap_ns}, NULL);
        }
    }
}

// ---- the peers' tensors

static void drop_stale(Group *g, int64_t rank) {
    Segment *peer = g->segments[rank];
    int64_t retired = __atomic_load_n(&peer->retired, __ATOMIC_ACQUIRE);
    if (retired == g->retired[rank]) return;
    g->retired[rank] = retired;
    for (int64_t slot = 0; slot < SLOTS; slot++) {
        Mapping *m = &g->mappings[rank * SLOTS + slot];
        if (m->base && m->generation != __atomic_load_n(&peer->generations[slot], __ATOMIC_RELAXED)) forget(m);
    }
}

// The peer keeps the file open until the collective is finished: it has no name but /proc/PID/fd/FD.
static char *reach(Group *g, int64_t rank, const Descriptor *d, int64_t sequence) {
    Mapping *m = &g->mappings[rank * SLOTS + d->slot];
    if (m->base && m->generation == d->generation) return m->base + d->offset;
    forget(m);
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

// Where the slice of a rank begins: whole lines, so that no two ranks write to one.
static int64_t slice_begin(const Descriptor *d, int64_t rank, int64_t ranks) {
    int64_t unit = LINE_BYTES / width_of(d->type), units = (d->count + unit - 1) / unit;
    int64_t begin = units * rank / ranks * unit;
    return begin < d->count ? begin : d->count;
}

static int same(const Descriptor *a, const Descriptor *b) {
    return a->count == b->count && a->type == b->type && a->verb == b->verb && a->mean == b->mean &&
           a->staged == b->staged && a->bucket == b->bucket;
}

static int combine(Group *g, int64_t sequence) {
    const int64_t place = sequence % RING, ranks = g->ranks, rank = g->rank;
    const Descriptor *mine = &g->segments[rank]->ring[place];
    char *tensors[ranks];
    for (int64_t r = 0; r < ranks; r++) {
        const Descriptor *theirs = &g->segments[r]->ring[place];
        if (!same(mine, theirs)) {
            g->blamed = r, g->sequence = sequence;
            return MISMATCH;
        }
        if (mine->staged) {
            tensors[r] = g->segments[r]->stage[place];
        } else {
            drop_stale(g, r);
            tensors[r] = r == rank ? g->own[place] : reach(g, r, theirs, sequence);
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
        reduce(mine->type, tensors, ranks, &g->own[place], 1, 0, mine->count, mine->mean);
    } else if (mine->verb == REDUCE_SCATTER) {
        reduce(mine->type, tensors, ranks, &tensors[rank], 1, begin, end, mine->mean);
    } else {
        reduce(mine->type, tensors, ranks, tensors, ranks, begin, end, mine->mean);
    }
    return FINISHED;
}

static int advance(Group *g, int64_t until, int waits) {
    while (g->reduced < until) {
        const int64_t sequence = g->reduced + 1;
        if (waits) {
            int answer = await(g, 0, sequence);
            if (answer) return answer;
        } else if (lagging(g, 0, sequence) >= 0) {
            return FINISHED;
        }
        int answer = combine(g, sequence);
        if (answer) return answer;
        g->reduced = sequence;
        __atomic_store_n(&g->segments[g->rank]->done, sequence, __ATOMIC_RELEASE);
    }
    return FINISHED;
}

// Finishes all collectives up to that one. After WAITING it is called again.
int group_wait(Group *g, int64_t sequence) {
    int answer = advance(g, sequence, 1);
    if (!answer) answer = await(g, 1, sequence);
    if (!answer && g->finished < sequence) g->finished = sequence;
    return answer;
}

// Publishes the next collective, and does what can be done without waiting. Its place in the ring must be free: the
// caller has waited for the collective RING before it.
int group_start(Group *g, const Descriptor *d, char *address) {
    Segment *mine = g->segments[g->rank];
    const int64_t sequence = g->started + 1, place = sequence % RING;
    mine->ring[place] = *d;
    g->own[place] = address;
    if (d->staged) memcpy(mine->stage[place], address, d->count * width_of(d->type));
    g->started = sequence;
    __atomic_store_n(&mine->published, sequence, __ATOMIC_RELEASE);
    return advance(g, sequence, 0);
}
