/* A simulation of FlagCX for tests: its C interface over shared memory of one host, for tensors in host memory.
 *
 * Not FlagCX, and none of its code. What vllm_fl_comm calls exists, in three forms of the interface (-DFORM=12, 13 or
 * 14: release 0.12, release 0.13, the main branch after it), with -DCUSTOM also the switch between the plain and the
 * custom all-reduce, and with -DWITHOUT_ABORT no flagcxCommAbort. Ranks are processes or threads.
 *
 * Faults: FLAGCX_DOUBLE_FAULT or flagcxDoubleFault(text), text = "FUNCTION RANK ACTION [AFTER]", several separated by
 * ';'. RANK is a number or '*', AFTER the number of calls that still succeed. Actions: error=CODE, slow=SECONDS, hang
 * (until aborted), deaf (for ever), die (SIGKILL), refuse (custom all-reduce: the plain path is taken).
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifndef FORM
#define FORM 13
#endif

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6, NOT_SUPPORTED = 9 };
enum { MAX_RANKS = 8, STAGE = 1 << 20, MAIL = 1 << 18, MAX_QUEUE = 256, CUSTOM_LIMIT = 8 << 20 };

typedef struct { char internal[256]; } Id;

typedef struct {
    atomic_uint full;
    size_t bytes;
    char data[MAIL];
} Mailbox;

typedef struct {
    atomic_int joined;
    atomic_int ranks;
    atomic_ulong plain[MAX_RANKS], custom[MAX_RANKS];
    char stage[MAX_RANKS][STAGE];
    Mailbox mail[MAX_RANKS][MAX_RANKS];
} Shared;

typedef struct {
    Shared *shared;
    int rank, ranks;
    unsigned long plain, custom;
    atomic_int aborted;
} Comm;

typedef struct { int sending; char *buffer; size_t left; int peer; Comm *comm; } Message;

static atomic_long opened, created, destroyed, customs, calls, streams;
static void *seen_streams[64];
static int custom_enabled = -1;
static _Thread_local int depth, group_error;
static _Thread_local Message queue[MAX_QUEUE];
static _Thread_local int queued;

/* faults */

typedef struct { char function[48], action[32]; int rank; atomic_long after; } Fault;
static Fault faults[8];
static int fault_count;

void flagcxDoubleFault(const char *text) {
    fault_count = 0;
    char *copy = strdup(text), *save = NULL;
    for (char *part = strtok_r(copy, ";", &save); part && fault_count < 8; part = strtok_r(NULL, ";", &save)) {
        Fault *fault = &faults[fault_count];
        char rank[8] = "*";
        long after = 0;
        if (sscanf(part, " %47s %7s %31s %ld", fault->function, rank, fault->action, &after) < 3) continue;
        fault->rank = rank[0] == '*' ? -1 : atoi(rank);
        fault->after = after;
        fault_count++;
    }
    free(copy);
}

__attribute__((constructor)) static void read_faults(void) {
    const char *text = getenv("FLAGCX_DOUBLE_FAULT");
    if (text) flagcxDoubleFault(text);
}

static void pause_for(double seconds) {
    struct timespec time = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&time, NULL);
}

static const char *fault_of(const char *function, int rank) {
    for (int i = 0; i < fault_count; i++)
        if (!strcmp(faults[i].function, function) && (faults[i].rank < 0 || faults[i].rank == rank))
            if (atomic_fetch_sub(&faults[i].after, 1) <= 0) return faults[i].action;
    return NULL;
}

static int inject(const char *function, int rank, Comm *comm) {
    calls++;
    const char *action = fault_of(function, rank);
    if (!action) return SUCCESS;
    if (!strncmp(action, "error=", 6)) return atoi(action + 6);
    if (!strncmp(action, "slow=", 5)) pause_for(atof(action + 5));
    if (!strcmp(action, "die")) raise(SIGKILL);
    if (!strcmp(action, "deaf")) for (;;) pause_for(1);
    if (!strcmp(action, "hang")) {
        while (!comm || !comm->aborted) pause_for(0.001);
        return REMOTE_ERROR;
    }
    return SUCCESS;
}

long flagcxDoubleCount(const char *what) {
    if (!strcmp(what, "open")) return opened;
    if (!strcmp(what, "created")) return created;
    if (!strcmp(what, "destroyed")) return destroyed;
    if (!strcmp(what, "custom")) return customs;
    if (!strcmp(what, "streams")) return streams;
    return !strcmp(what, "calls") ? calls : -1;
}

static void note_stream(void *stream) {
    long count = streams;
    for (long i = 0; i < count; i++)
        if (seen_streams[i] == stream) return;
    if (count < 64) { seen_streams[count] = stream; streams = count + 1; }
}

#define ENTER(name)                                                     \
    do {                                                                \
        if (!comm || !stream) return INVALID_ARGUMENT;                  \
        note_stream(stream);                                            \
        int code_ = inject(name, comm->rank, comm);                     \
        if (code_) { group_error = depth ? code_ : 0; return code_; }   \
    } while (0)
#define TRY(expression) do { int code_ = (expression); if (code_) return code_; } while (0)

/* waiting */

static void relax(unsigned *spins) {
    if (++*spins < 200) sched_yield();
    else pause_for(20e-6);
}

static int arrive(Comm *comm, atomic_ulong *everyone, unsigned long *mine) {
    atomic_store(&everyone[comm->rank], ++*mine);
    unsigned spins = 0;
    for (int rank = 0; rank < comm->ranks; rank++)
        while (atomic_load(&everyone[rank]) < *mine) {
            if (comm->aborted) return REMOTE_ERROR;
            relax(&spins);
        }
    return SUCCESS;
}

static int meet(Comm *comm) { return arrive(comm, comm->shared->plain, &comm->plain); }

/* life */

int flagcxGetVersion(int *version) { *version = 10000; return SUCCESS; }

static void new_id(Id *id) {
    static atomic_int serial;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "/flagcx-double-%d-%ld-%d", (int)getpid(), now.tv_nsec, serial++);
}

#if FORM <= 12
int flagcxGetUniqueId(Id **id) {
    if (!id) return INVALID_ARGUMENT;
    TRY(inject("flagcxGetUniqueId", -1, NULL));
    *id = calloc(1, sizeof **id);
    new_id(*id);
    return SUCCESS;
}
int flagcxHandleInit(void **handle) { *handle = calloc(1, 24); return SUCCESS; }
#else
int flagcxGetUniqueId(Id *id) {
    if (!id) return INVALID_ARGUMENT;
    TRY(inject("flagcxGetUniqueId", -1, NULL));
    new_id(id);
    return SUCCESS;
}
int flagcxDeviceHandleInit(void **handle) { *handle = calloc(1, 224); return SUCCESS; }
#endif
#if FORM >= 14
int flagcxMemAlloc(void **pointer, size_t size, int allocator) {
    if (allocator != 0 && allocator != 1) return INVALID_ARGUMENT;
    *pointer = malloc(size);
    return SUCCESS;
}
#endif

int flagcxCommInitRank(Comm **out, int ranks, Id *id, int rank) {
    if (!out || !id || ranks < 1 || ranks > MAX_RANKS || rank < 0 || rank >= ranks) return INVALID_ARGUMENT;
    if (custom_enabled < 0) {
        const char *value = getenv("FLAGCX_CUSTOM_OP_ENABLE");
        custom_enabled = value && atoi(value) == 1;
    }
    TRY(inject("flagcxCommInitRank", rank, NULL));
    int file = shm_open(id->internal, O_CREAT | O_RDWR, 0600);
    if (file < 0) return SYSTEM_ERROR;
    if (ftruncate(file, sizeof(Shared))) { close(file); return SYSTEM_ERROR; }
    Shared *shared = mmap(NULL, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (shared == MAP_FAILED) return SYSTEM_ERROR;
    int none = 0;
    if (!atomic_compare_exchange_strong(&shared->ranks, &none, ranks) && none != ranks) return INVALID_USAGE;
    Comm *comm = calloc(1, sizeof *comm);
    comm->shared = shared, comm->rank = rank, comm->ranks = ranks;
    shared->joined++;
    unsigned spins = 0;
    while (shared->joined < ranks) relax(&spins);
    if (rank == 0) shm_unlink(id->internal);
    opened++;
    created++;
    *out = comm;
    return SUCCESS;
}

int flagcxCommDestroy(Comm *comm) {
    if (!comm) return INVALID_ARGUMENT;
    TRY(inject("flagcxCommDestroy", comm->rank, NULL));
    opened--;
    destroyed++;
    munmap(comm->shared, sizeof(Shared));
    free(comm);
    return SUCCESS;
}

#ifndef WITHOUT_ABORT
/* The memory stays: a thread may still be inside. */
int flagcxCommAbort(Comm *comm) {
    if (!comm) return INVALID_ARGUMENT;
    comm->aborted = 1;
    opened--;
    return SUCCESS;
}
#endif

int flagcxCommCount(Comm *comm, int *count) { *count = comm->ranks; return SUCCESS; }
int flagcxCommUserRank(Comm *comm, int *rank) { *rank = comm->rank; return SUCCESS; }
int flagcxIsHomoComm(Comm *comm, int *homogeneous) {
    const char *action = fault_of("flagcxIsHomoComm", comm->rank);
    *homogeneous = !action;
    return SUCCESS;
}
int flagcxCommGetAsyncError(Comm *comm, int *code) { *code = comm->aborted ? REMOTE_ERROR : SUCCESS; return SUCCESS; }

/* elements */

static size_t item(int type) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return type >= 0 && type < 10 ? sizes[type] : 0;
}

static float from_bf16(uint16_t bits) { uint32_t wide = (uint32_t)bits << 16; float f; memcpy(&f, &wide, 4); return f; }
static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)((bits >> 16) | 64);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static double combine(double a, double b, int op) {
    switch (op) {
        case 1: return a * b;
        case 2: return a > b ? a : b;
        case 3: return a < b ? a : b;
        default: return a + b;
    }
}

#define REDUCE(type)                                                                              \
    for (size_t i = 0; i < count; i++) {                                                          \
        type total = ((type *)comm->shared->stage[0])[i];                                         \
        for (int r = 1; r < comm->ranks; r++) {                                                   \
            type next = ((type *)comm->shared->stage[r])[i];                                      \
            total = op == 1 ? total * next : op == 2 ? (total > next ? total : next)              \
                  : op == 3 ? (total < next ? total : next) : total + next;                       \
        }                                                                                         \
        ((type *)out)[i] = op == 4 ? total / (type)comm->ranks : total;                           \
    }
#define REDUCE_SMALL(type, read, write)                                                           \
    for (size_t i = 0; i < count; i++) {                                                          \
        double total = read(((type *)comm->shared->stage[0])[i]);                                 \
        for (int r = 1; r < comm->ranks; r++)                                                     \
            total = combine(total, read(((type *)comm->shared->stage[r])[i]), op);                \
        ((type *)out)[i] = write((float)(op == 4 ? total / comm->ranks : total));                 \
    }

static void reduce_stages(Comm *comm, void *out, size_t count, int type, int op) {
    switch (type) {
        case 0: REDUCE(int8_t) break;
        case 1: REDUCE(uint8_t) break;
        case 2: REDUCE(int32_t) break;
        case 3: REDUCE(uint32_t) break;
        case 4: REDUCE(int64_t) break;
        case 5: REDUCE(uint64_t) break;
        case 6: REDUCE_SMALL(_Float16, (double), (_Float16)) break;
        case 7: REDUCE(float) break;
        case 8: REDUCE(double) break;
        default: REDUCE_SMALL(uint16_t, from_bf16, to_bf16)
    }
}

/* collectives: every rank writes into its stage, all meet, who needs it reads, all meet */

static int reduce_to(Comm *comm, const char *send, char *recv, size_t count, int type, int op, int root) {
    size_t size = item(type), step = STAGE / (size ? size : 1);
    if (!size || op < 0 || op > 4) return INVALID_ARGUMENT;
    for (size_t done = 0; done < count; done += step) {
        size_t now = count - done < step ? count - done : step;
        memcpy(comm->shared->stage[comm->rank], send + done * size, now * size);
        TRY(meet(comm));
        if (root < 0 || root == comm->rank) reduce_stages(comm, recv + done * size, now, type, op);
        TRY(meet(comm));
    }
    return SUCCESS;
}

#ifdef CUSTOM
/* The same rules as FlagCX: each rank decides for itself, from its own arguments. */
int flagcxCustomAllReduceImpl(void) { return NOT_SUPPORTED; }
static int takes_custom(Comm *comm, void *recv, size_t count, int type, int op) {
    int small = type == 6 || type == 9;
    if (custom_enabled != 1 || !(small || type == 7 || type == 8)) return 0;
    if (op != 0 && !((op == 2 || op == 3) && small)) return 0;
    if (small && count % 2) return 0;
    if ((uintptr_t)recv % (type == 8 ? 8 : 4) || count * item(type) > CUSTOM_LIMIT) return 0;
    return !fault_of("custom", comm->rank);
}
int flagcxDevCommCreate(Comm *comm, void *wanted, void **made) {
    if (!comm || !wanted || !made) return INVALID_ARGUMENT;
    int code = inject("flagcxDevCommCreate", comm->rank, comm);
    TRY(meet(comm));
    *made = code ? NULL : malloc(8);
    return code;
}
int flagcxDevCommDestroy(Comm *comm, void *made) { (void)comm; free(made); return SUCCESS; }
#endif

int flagcxAllReduce(const void *send, void *recv, size_t count, int type, int op, Comm *comm, void *stream) {
    ENTER("flagcxAllReduce");
#ifdef CUSTOM
    if (takes_custom(comm, recv, count, type, op)) {
        customs++;
        TRY(arrive(comm, comm->shared->custom, &comm->custom));
    }
#endif
    return reduce_to(comm, send, recv, count, type, op, -1);
}

int flagcxReduce(const void *send, void *recv, size_t count, int type, int op, int root, Comm *comm, void *stream) {
    ENTER("flagcxReduce");
    return reduce_to(comm, send, recv, count, type, op, root);
}

int flagcxReduceScatter(const void *send, void *recv, size_t count, int type, int op, Comm *comm, void *stream) {
    ENTER("flagcxReduceScatter");
    for (int rank = 0; rank < comm->ranks; rank++)
        TRY(reduce_to(comm, (const char *)send + (size_t)rank * count * item(type), recv, count, type, op, rank));
    return SUCCESS;
}

static int collect(Comm *comm, const char *send, char *recv, size_t bytes, int root) {
    for (size_t done = 0; done < bytes; done += STAGE) {
        size_t now = bytes - done < STAGE ? bytes - done : STAGE;
        memcpy(comm->shared->stage[comm->rank], send + done, now);
        TRY(meet(comm));
        for (int rank = 0; (root < 0 || root == comm->rank) && rank < comm->ranks; rank++)
            memcpy(recv + (size_t)rank * bytes + done, comm->shared->stage[rank], now);
        TRY(meet(comm));
    }
    return SUCCESS;
}

int flagcxAllGather(const void *send, void *recv, size_t count, int type, Comm *comm, void *stream) {
    ENTER("flagcxAllGather");
    return collect(comm, send, recv, count * item(type), -1);
}

int flagcxGather(const void *send, void *recv, size_t count, int type, int root, Comm *comm, void *stream) {
    ENTER("flagcxGather");
    return collect(comm, send, recv, count * item(type), root);
}

int flagcxBroadcast(const void *send, void *recv, size_t count, int type, int root, Comm *comm, void *stream) {
    ENTER("flagcxBroadcast");
    size_t bytes = count * item(type);
    for (size_t done = 0; done < bytes; done += STAGE) {
        size_t now = bytes - done < STAGE ? bytes - done : STAGE;
        if (comm->rank == root) memcpy(comm->shared->stage[root], (const char *)send + done, now);
        TRY(meet(comm));
        memcpy((char *)recv + done, comm->shared->stage[root], now);
        TRY(meet(comm));
    }
    return SUCCESS;
}

/* point to point: one mailbox for each ordered pair; in a group all messages advance by turns */

static int advance(Message *message) {
    Comm *comm = message->comm;
    Mailbox *box = message->sending ? &comm->shared->mail[comm->rank][message->peer]
                                    : &comm->shared->mail[message->peer][comm->rank];
    if (atomic_load(&box->full) != (unsigned)!message->sending) return 0;
    size_t now = message->left < MAIL ? message->left : MAIL;
    if (message->sending) memcpy(box->data, message->buffer, box->bytes = now);
    else memcpy(message->buffer, box->data, now = box->bytes < now ? box->bytes : now);
    atomic_store(&box->full, (unsigned)message->sending);
    message->buffer += now, message->left -= now;
    return 1;
}

/* Messages of one pair keep their order: a later one waits for the earlier. */
static int blocked(int index) {
    for (int i = 0; i < index; i++)
        if (queue[i].left && queue[i].sending == queue[index].sending && queue[i].peer == queue[index].peer
            && queue[i].comm == queue[index].comm) return 1;
    return 0;
}

static int deliver(void) {
    unsigned spins = 0;
    for (int left = queued; left;) {
        int moved = left = 0;
        for (int i = 0; i < queued; i++) {
            if (!queue[i].left) continue;
            left++;
            if (queue[i].comm->aborted) { queued = 0; return REMOTE_ERROR; }
            if (!blocked(i)) moved |= advance(&queue[i]);
        }
        if (left && !moved) relax(&spins);
        else spins = 0;
    }
    queued = 0;
    return SUCCESS;
}

static int post(int sending, void *buffer, size_t count, int type, int peer, Comm *comm) {
    if (peer < 0 || peer >= comm->ranks || queued == MAX_QUEUE) return INVALID_ARGUMENT;
    queue[queued++] = (Message){sending, buffer, count * item(type), peer, comm};
    return depth ? SUCCESS : deliver();
}

int flagcxSend(const void *buffer, size_t count, int type, int peer, Comm *comm, void *stream) {
    ENTER("flagcxSend");
    return post(1, (void *)buffer, count, type, peer, comm);
}

int flagcxRecv(void *buffer, size_t count, int type, int peer, Comm *comm, void *stream) {
    ENTER("flagcxRecv");
    return post(0, buffer, count, type, peer, comm);
}

int flagcxGroupStart(Comm *comm) {
    if (!comm) return INVALID_ARGUMENT;
    depth++;
    return SUCCESS;
}

int flagcxGroupEnd(Comm *comm) {
    if (!comm || depth == 0) return INVALID_USAGE;
    if (--depth) return SUCCESS;
    int code = group_error ? group_error : inject("flagcxGroupEnd", comm->rank, comm);
    if (!code) return deliver();
    group_error = queued = 0;
    return code;
}
