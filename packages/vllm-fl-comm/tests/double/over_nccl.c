/* A stand-in for FlagCX on NVIDIA GPUs, for tests: its C interface (release 0.13) over the NCCL of this process.
 *
 * Not FlagCX, and none of its code. FlagCX itself hands the operations of a group of one vendor's devices to that
 * vendor's library; so does this, which lets the binding, the streams and graph capture be tested where FlagCX is not
 * installed. Data types, reductions and the result codes 0 to 7
 * are the same numbers in NCCL and FlagCX.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4 };
typedef struct { char internal[256]; } Id;
typedef struct { char internal[128]; } NcclId;
typedef struct { void *vendor; } Stream;

static void *find(const char *name) {
    static void *nccl;
    if (!nccl) nccl = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
    if (!nccl) nccl = dlopen("libnccl.so.2", RTLD_NOW);
    void *found = nccl ? dlsym(nccl, name) : NULL;
    if (!found) fprintf(stderr, "over_nccl: %s: %s\n", name, dlerror());
    return found;
}

#define NCCL(name, types, ...)                                  \
    do {                                                        \
        static int (*function) types;                           \
        if (!function) function = (int(*) types)find(name);     \
        return function ? function(__VA_ARGS__) : SYSTEM_ERROR; \
    } while (0)

int flagcxGetVersion(int *version) { *version = 10000; return 0; }
int flagcxDeviceHandleInit(void **handle) { *handle = calloc(1, 224); return *handle ? 0 : SYSTEM_ERROR; }

int flagcxGetUniqueId(Id *id) {
    if (!id) return INVALID_ARGUMENT;
    memset(id, 0, sizeof *id);
    NCCL("ncclGetUniqueId", (NcclId *), (NcclId *)id);
}
int flagcxCommInitRank(void **comm, int ranks, Id *id, int rank) {
    if (!comm || !id) return INVALID_ARGUMENT;
    NcclId own;
    memcpy(&own, id, sizeof own);
    NCCL("ncclCommInitRank", (void **, int, NcclId, int), comm, ranks, own, rank);
}
int flagcxCommDestroy(void *comm) { NCCL("ncclCommDestroy", (void *), comm); }
int flagcxCommAbort(void *comm) { NCCL("ncclCommAbort", (void *), comm); }
int flagcxCommCount(void *comm, int *count) { NCCL("ncclCommCount", (void *, int *), comm, count); }
int flagcxCommUserRank(void *comm, int *rank) { NCCL("ncclCommUserRank", (void *, int *), comm, rank); }
int flagcxIsHomoComm(void *comm, int *homogeneous) { (void)comm; *homogeneous = 1; return 0; }
int flagcxCommGetAsyncError(void *comm, int *code) { NCCL("ncclCommGetAsyncError", (void *, int *), comm, code); }

int flagcxAllReduce(const void *send, void *recv, size_t count, int type, int op, void *comm, Stream *stream) {
    NCCL("ncclAllReduce", (const void *, void *, size_t, int, int, void *, void *), send, recv, count,
         type, op, comm, stream->vendor);
}
int flagcxReduce(const void *send, void *recv, size_t count, int type, int op, int root, void *comm, Stream *stream) {
    NCCL("ncclReduce", (const void *, void *, size_t, int, int, int, void *, void *), send, recv, count,
         type, op, root, comm, stream->vendor);
}
int flagcxReduceScatter(const void *send, void *recv, size_t count, int type, int op, void *comm, Stream *stream) {
    NCCL("ncclReduceScatter", (const void *, void *, size_t, int, int, void *, void *), send, recv, count,
         type, op, comm, stream->vendor);
}
int flagcxAllGather(const void *send, void *recv, size_t count, int type, void *comm, Stream *stream) {
    NCCL("ncclAllGather", (const void *, void *, size_t, int, void *, void *), send, recv, count, type,
         comm, stream->vendor);
}
int flagcxBroadcast(const void *send, void *recv, size_t count, int type, int root, void *comm, Stream *stream) {
    NCCL("ncclBroadcast", (const void *, void *, size_t, int, int, void *, void *), send, recv, count,
         type, root, comm, stream->vendor);
}
int flagcxSend(const void *buffer, size_t count, int type, int peer, void *comm, Stream *stream) {
    NCCL("ncclSend", (const void *, size_t, int, int, void *, void *), buffer, count, type, peer, comm,
         stream->vendor);
}
int flagcxRecv(void *buffer, size_t count, int type, int peer, void *comm, Stream *stream) {
    NCCL("ncclRecv", (void *, size_t, int, int, void *, void *), buffer, count, type, peer, comm,
         stream->vendor);
}
int flagcxGroupStart(void *comm) { (void)comm; NCCL("ncclGroupStart", (void)); }
int flagcxGroupEnd(void *comm) { (void)comm; NCCL("ncclGroupEnd", (void)); }

static size_t item(int type) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return sizes[type];
}

int flagcxGather(const void *send, void *recv, size_t count, int type, int root, void *comm, Stream *stream) {
    int rank, ranks, code = flagcxCommUserRank(comm, &rank);
    if (!code) code = flagcxCommCount(comm, &ranks);
    if (!code) code = flagcxGroupStart(comm);
    if (code) return code;
    code = flagcxSend(send, count, type, root, comm, stream);
    for (int peer = 0; rank == root && !code && peer < ranks; peer++)
        code = flagcxRecv((char *)recv + (size_t)peer * count * item(type), count, type, peer, comm, stream);
    int end = flagcxGroupEnd(comm);
    return code ? code : end;
}
