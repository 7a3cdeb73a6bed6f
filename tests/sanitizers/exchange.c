// Exchanges random tensors through `shared_memory.c`, built with a sanitizer, and checks the results.
//
//     exchange threads RANKS EXCHANGES SEED     ranks are threads; storages are on the heap, where a sanitizer sees every
//                                               access beyond their ends, after they are freed, or without order
//     exchange processes RANKS EXCHANGES SEED   ranks are processes that map each other's files, as in a run
//     exchange kills RANKS ROUNDS SEED          the same again and again; in each round one process is killed, or brings
//                                               another tensor than the others
//
// All ranks draw the same random numbers, so they start the same exchanges. Prints how many exchanges were finished.

#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static int are_threads;
static int open_storage(const char *path, int flags);
static void *map_storage(void *at, size_t bytes, int protection, int flags, int file, long offset);
static int unmap_storage(void *base, size_t bytes);
static int close_storage(int file);
#define open open_storage
#define mmap map_storage
#define munmap unmap_storage
#define close close_storage
#include "shared_memory.c"
#undef open
#undef mmap
#undef munmap
#undef close

// 96 is more than RING: the storage of an exchange is used again when all ranks have finished it.
enum { MOST_RANKS = 8, STORAGES = 96, MOST = 20000, FAKE_FILE = 1 << 20, LIMIT_S = 120 };

typedef struct {
    int64_t generation, bytes;
    int file;
    char *base;
} Storage;

typedef struct {
    Descriptor descriptor;
    char *tensor;
    int is_wild; // any bits, also NaN: the results are not compared
} Exchange;

typedef struct {
    int64_t rank;
    uint64_t common, own; // states of random numbers
    int64_t generation, finished;
    Group *group;
    Storage storages[STORAGES];
    Exchange pending[RING];
} Rank;

typedef struct {
    int64_t pids[MOST_RANKS];
    int64_t ready, exchanges, refusals;
    int64_t someone_is_dead;
} Shared;

static int64_t ranks, seed, exchanges, odd_rank = -1, odd_exchange;
static Segment *segments[MOST_RANKS];
static Shared *shared;
static char *bases[MOST_RANKS * STORAGES]; // of the storages of threads, by the number that stands for a file

static void fail(const char *format, ...) {
    va_list words;
    va_start(words, format);
    vfprintf(stderr, format, words);
    fprintf(stderr, "\n");
    _exit(1);
}

// ---- the system's calls in shared_memory.c: threads have heap memory instead of files

static int open_storage(const char *path, int flags) {
    if (!are_threads) return open(path, flags);
    return FAKE_FILE + atoi(strrchr(path, '/') + 1);
}
static void *map_storage(void *at, size_t bytes, int protection, int flags, int file, long offset) {
    if (!are_threads) return mmap(at, bytes, protection, flags, file, offset);
    return __atomic_load_n(&bases[file - FAKE_FILE], __ATOMIC_RELAXED);
}
static int unmap_storage(void *base, size_t bytes) { return are_threads ? 0 : munmap(base, bytes); }
static int close_storage(int file) { return file >= FAKE_FILE ? 0 : close(file); }

// ---- random numbers and tensors

static uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}
static int64_t draw(uint64_t *state, int64_t below) { return mixed(*state += 0x9e3779b97f4a7c15u) % below; }

static int64_t number(int64_t rank, int64_t sequence, int64_t i) {
    return (int64_t)((uint32_t)(sequence * 40503 + rank * 977 + i * 2654435761u) >> 7) % 2001 - 1000;
}
static int64_t whole(int64_t rank, int64_t sequence, int64_t i) { // sums of these overflow
    return (int64_t)((uint64_t)number(rank, sequence, i) * 0x7ffffffffffff1u);
}

static void write_tensor(const Rank *me, const Exchange *e, int64_t sequence) {
    for (int64_t i = 0; i < e->descriptor.count; i++) {
        const int64_t n = number(me->rank, sequence, i);
        if (e->is_wild) {
            const uint64_t bits = mixed(n * 31 + sequence);
            memcpy(e->tensor + i * width_of(e->descriptor.type), &bits, width_of(e->descriptor.type));
            continue;
        }
        switch (e->descriptor.type) {
        case FLOAT32: ((float *)e->tensor)[i] = n / 8.0f; break;
        case FLOAT64: ((double *)e->tensor)[i] = n / 8.0; break;
        case BFLOAT16: ((uint16_t *)e->tensor)[i] = to_bf16(n / 8.0f); break;
        case FLOAT16: ((half *)e->tensor)[i] = to_half(n / 8.0f); break;
        case INT64: ((int64_t *)e->tensor)[i] = whole(me->rank, sequence, i); break;
        }
    }
}

// Writes element i of a rank's tensor (`from` = `to`), or the sum or mean over some ranks.
static void expected(const Descriptor *d, int64_t sequence, int64_t i, int64_t from, int64_t to, char *result) {
    double wide = 0;
    float narrow = 0;
    uint64_t integer = 0;
    for (int64_t r = from; r <= to; r++) {
        const int64_t n = number(r, sequence, i);
        wide += n / 8.0, integer += (uint64_t)whole(r, sequence, i);
        narrow += d->type == BFLOAT16 ? from_bf16(to_bf16(n / 8.0f)) : n / 8.0f;
    }
    if (from < to && d->mean) wide /= ranks, narrow /= ranks;
    const uint16_t brain = to_bf16(narrow);
    const half short_float = to_half(narrow);
    switch (d->type) {
    case FLOAT32: memcpy(result, &narrow, 4); break;
    case FLOAT64: memcpy(result, &wide, 8); break;
    case BFLOAT16: memcpy(result, &brain, 2); break;
    case FLOAT16: memcpy(result, &short_float, 2); break;
    case INT64: memcpy(result, &integer, 8); break;
    }
}

static void check_element(const Rank *me, const Exchange *e, int64_t sequence, int64_t i) {
    const Descriptor *d = &e->descriptor;
    char result[8];
    int64_t holder = 0;
    while (slice_begin(d, holder + 1, ranks) <= i) holder++;
    if (d->verb == ALL_GATHER) expected(d, sequence, i, holder, holder, result);
    else if (d->verb == ALL_REDUCE || holder == me->rank) expected(d, sequence, i, 0, ranks - 1, result);
    else expected(d, sequence, i, me->rank, me->rank, result);
    if (memcmp(result, e->tensor + i * width_of(d->type), width_of(d->type)))
        fail("rank %ld: element %ld of exchange %ld (type %ld, operation %ld, %ld elements, mean %ld) is wrong", me->rank,
             i, sequence, d->type, d->verb, d->count, d->mean);
}

static void check(Rank *me, int64_t sequence) {
    const Exchange *e = &me->pending[sequence % RING];
    const int64_t count = e->descriptor.count;
    if (e->is_wild) return;
    if (count <= 64)
        for (int64_t i = 0; i < count; i++) check_element(me, e, sequence, i);
    else {
        for (int64_t r = 0; r < ranks; r++) {
            const int64_t begin = slice_begin(&e->descriptor, r, ranks);
            if (begin < count) check_element(me, e, sequence, begin);
            if (begin) check_element(me, e, sequence, begin - 1);
        }
        for (int64_t i = 0; i < 16; i++) check_element(me, e, sequence, draw(&me->own, count));
        check_element(me, e, sequence, count - 1);
    }
}

// ---- storages, as storages.py has them

static void retire(Rank *me, int64_t slot) {
    Segment *mine = segments[me->rank];
    __atomic_store_n(&mine->generations[slot], 0, __ATOMIC_RELAXED);
    __atomic_store_n(&mine->retired, mine->retired + 1, __ATOMIC_RELEASE);
    me->storages[slot].generation = 0;
}

static void free_storage(Storage *s) {
    if (!s->base) return;
    if (are_threads) free(s->base);
    else munmap(s->base, s->bytes), close(s->file);
    s->base = NULL;
}

static void new_storage(Rank *me, int64_t slot, int64_t bytes) {
    Storage *s = &me->storages[slot];
    if (s->generation) retire(me, slot);
    free_storage(s);
    s->bytes = bytes, s->generation = ++me->generation;
    if (are_threads) {
        s->base = malloc(bytes);
        s->file = (int)(me->rank * STORAGES + slot);
        __atomic_store_n(&bases[s->file], s->base, __ATOMIC_RELAXED);
    } else {
        s->file = memfd_create("exchange", MFD_CLOEXEC);
        if (s->file < 0 || ftruncate(s->file, bytes)) fail("no memory");
        s->base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, s->file, 0);
        if (s->base == MAP_FAILED) fail("no memory");
    }
    __atomic_store_n(&segments[me->rank]->generations[slot], s->generation, __ATOMIC_RELAXED);
}

// ---- a rank

// Chooses the next exchange. What it takes from `common` must not depend on the rank.
static void prepare(Rank *me, int64_t sequence) {
    static const int64_t sizes[] = {0, 1, 63, 64, 65, 257, 1000, 4096, 4097, MOST};
    Exchange *e = &me->pending[sequence % RING];
    Descriptor *d = &e->descriptor;
    const int64_t kind = draw(&me->common, 100), some = draw(&me->common, MOST);
    memset(d, 0, sizeof *d);
    d->count = kind < 15 ? sizes[some % 10] : kind < 75 ? some % 65 : kind < 97 ? some % 2000 : some;
    d->type = draw(&me->common, 5);
    d->verb = draw(&me->common, 3) ? ALL_REDUCE : draw(&me->common, 3);
    d->mean = d->verb == ALL_REDUCE && d->type != INT64 && draw(&me->common, 2);
    d->bucket = draw(&me->common, 7);
    e->is_wild = draw(&me->common, 10) == 0;
    const int64_t bytes = d->count * width_of(d->type);
    d->staged = d->count == 0 || (d->verb == ALL_REDUCE && bytes <= 8192 && draw(&me->common, 2));
    if (me->rank == odd_rank && sequence == odd_exchange) d->bucket = 99;

    const int64_t slot = sequence % STORAGES, offset = 8 * draw(&me->own, 9);
    Storage *s = &me->storages[slot];
    // Every exchange has a storage of exactly its size again and again, and else an older and larger one.
    if (!s->generation || s->bytes < offset + bytes || draw(&me->own, 20) == 0) new_storage(me, slot, offset + bytes + !bytes);
    e->tensor = d->count ? s->base + offset : NULL;
    d->slot = slot, d->generation = s->generation, d->file_descriptor = s->file, d->file_bytes = s->bytes;
    d->offset = offset;
    write_tensor(me, e, sequence);
}

static int someone_is_dead(void) { return __atomic_load_n(&shared->someone_is_dead, __ATOMIC_ACQUIRE); }

// Returns whether all exchanges up to `sequence` are finished; 0 if a rank is dead, or brought another tensor.
static int finish(Rank *me, int64_t sequence) {
    for (int state; (state = group_wait(me->group, sequence));) {
        if (state == MISMATCH) {
            if (odd_rank < 0) fail("rank %ld: exchange %ld does not agree", me->rank, me->group->sequence);
            __atomic_add_fetch(&shared->refusals, 1, __ATOMIC_RELAXED);
            return 0;
        }
        if (someone_is_dead()) return 0;
        if (state == UNREACHABLE && are_threads) fail("rank %ld: memory cannot be opened", me->rank);
    }
    while (me->finished < sequence) {
        check(me, ++me->finished);
        if (me->rank == 0) __atomic_add_fetch(&shared->exchanges, 1, __ATOMIC_RELAXED);
    }
    return 1;
}

static void *run_rank(void *number_of_rank) {
    const int64_t rank = (int64_t)(intptr_t)number_of_rank;
    Rank *me = calloc(1, sizeof *me);
    me->rank = rank, me->common = seed, me->own = mixed(seed * 100 + rank);
    me->group = group_new(rank, ranks, (void **)segments, shared->pids, 50);
    int goes_on = 1;
    for (int64_t sequence = 1; goes_on && sequence <= exchanges; sequence++) {
        if (sequence - RING > me->finished) goes_on = finish(me, sequence - RING);
        if (!goes_on) break;
        prepare(me, sequence);
        const Exchange *e = &me->pending[sequence % RING];
        const int state = group_start(me->group, &e->descriptor, e->tensor);
        if (state == MISMATCH && odd_rank < 0) fail("rank %ld: a start does not agree", rank);
        if (draw(&me->own, 50) == 0 && me->storages[sequence % STORAGES].generation) retire(me, sequence % STORAGES);
        if (draw(&me->own, 16) == 0) goes_on = finish(me, sequence - draw(&me->own, sequence - me->finished));
    }
    if (goes_on) finish(me, exchanges);
    if (group_mappings(me->group) > (ranks - 1) * STORAGES) fail("rank %ld: too many mappings", rank);
    group_free(me->group);
    return me; // others may still read its storages
}

static void end_rank(Rank *me) {
    for (int64_t slot = 0; slot < STORAGES; slot++) free_storage(&me->storages[slot]);
    free(me);
}

// ---- threads and processes

static void *shared_memory(int64_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fail("no memory");
    return memory;
}

static void run_threads(void) {
    pthread_t threads[MOST_RANKS];
    for (int64_t r = 0; r < ranks; r++) shared->pids[r] = getpid();
    for (int64_t r = 0; r < ranks; r++) pthread_create(&threads[r], NULL, run_rank, (void *)(intptr_t)r);
    Rank *finished[MOST_RANKS];
    for (int64_t r = 0; r < ranks; r++) pthread_join(threads[r], (void **)&finished[r]);
    for (int64_t r = 0; r < ranks; r++) end_rank(finished[r]);
}

static void meet(int64_t number) {
    __atomic_add_fetch(&shared->ready, 1, __ATOMIC_RELEASE);
    while (__atomic_load_n(&shared->ready, __ATOMIC_ACQUIRE) < number && !someone_is_dead()) usleep(100);
}

static void run_process(int64_t rank) {
    alarm(LIMIT_S);
    shared->pids[rank] = getpid();
    meet(ranks);
    Rank *me = run_rank((void *)(intptr_t)rank);
    meet(2 * ranks);
    end_rank(me);
    exit(0);
}

// `victim` is killed after so many exchanges; nobody if it is -1.
static void run_processes(int64_t victim, int64_t after) {
    shared->ready = shared->someone_is_dead = 0;
    const int64_t before = shared->exchanges;
    for (int64_t r = 0; r < ranks; r++) memset(segments[r], 0, sizeof **segments);
    pid_t children[MOST_RANKS];
    for (int64_t r = 0; r < ranks; r++)
        if ((children[r] = fork()) == 0) run_process(r);
    while (victim >= 0 && __atomic_load_n(&shared->exchanges, __ATOMIC_RELAXED) < before + after) usleep(50);
    int status;
    if (victim >= 0) {
        kill(children[victim], SIGKILL);
        waitpid(children[victim], &status, 0);
        __atomic_store_n(&shared->someone_is_dead, 1, __ATOMIC_RELEASE);
    }
    for (int64_t r = 0; r < ranks; r++)
        if (r != victim && (waitpid(children[r], &status, 0) < 0 || status)) fail("rank %ld ended with %d", r, status);
}

static void run_rounds(int64_t rounds) {
    uint64_t chance = seed;
    for (int64_t round = 0; round < rounds; round++) {
        seed++, exchanges = 400;
        const int64_t rank = draw(&chance, ranks), after = draw(&chance, exchanges);
        const int is_odd = draw(&chance, 4) == 0;
        odd_rank = is_odd ? rank : -1, odd_exchange = 1 + after;
        const int64_t refusals = shared->refusals;
        run_processes(is_odd ? -1 : rank, after);
        if (is_odd && shared->refusals != refusals + ranks) fail("an odd tensor was accepted");
    }
}

int main(int count, char **words) {
    if (count != 5) fail("exchange threads|processes|kills RANKS EXCHANGES SEED");
    ranks = atoi(words[2]), exchanges = atoi(words[3]), seed = atoi(words[4]);
    are_threads = !strcmp(words[1], "threads");
    shared = shared_memory(sizeof *shared);
    for (int64_t r = 0; r < ranks; r++) segments[r] = shared_memory(sizeof **segments);
    if (are_threads) run_threads();
    else if (!strcmp(words[1], "kills")) run_rounds(exchanges);
    else run_processes(-1, 0);
    printf("%ld exchanges, %ld refusals\n", shared->exchanges, shared->refusals);
}
