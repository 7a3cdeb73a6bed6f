// Who is at the other end of a connection, as the kernel says, and the functions `accept` and `accept4` of torch's
// library, which are replaced by ones that refuse other users. They are in C because torch calls them in threads of its
// own, for which another thread may wait while it holds Python's lock. `own_user.py` explains the rest.

#define _GNU_SOURCE
#include <elf.h>
#include <errno.h>
#include <link.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

enum { UNKNOWN, THIS_USER, ANOTHER_USER, GONE };
enum { ESTABLISHED = 1 };

typedef struct {
    int family;
    uint16_t port;  // in the order of the network
    uint32_t address[4];
} End;

// An IPv4 address that is written as an IPv6 address is that IPv4 address.
static int read_end(const struct sockaddr_storage *name, End *end) {
    static const unsigned char mapped[12] = {[10] = 0xff, [11] = 0xff};
    memset(end, 0, sizeof *end);
    if (name->ss_family == AF_INET) {
        const struct sockaddr_in *in = (const struct sockaddr_in *)name;
        end->family = AF_INET, end->port = in->sin_port, end->address[0] = in->sin_addr.s_addr;
        return 1;
    }
    if (name->ss_family != AF_INET6) return 0;
    const struct sockaddr_in6 *in = (const struct sockaddr_in6 *)name;
    end->port = in->sin6_port;
    if (!memcmp(&in->sin6_addr, mapped, sizeof mapped)) {
        end->family = AF_INET;
        memcpy(end->address, (const char *)&in->sin6_addr + 12, 4);
    } else {
        end->family = AF_INET6;
        memcpy(end->address, &in->sin6_addr, 16);
    }
    return 1;
}

static int is_same_address(const End *first, const End *second) {
    return first->family == second->family && !memcmp(first->address, second->address, 16);
}

static int is_loopback(const End *end) {
    static const uint32_t loopback[4] = {0, 0, 0, 0};
    if (end->family == AF_INET) return (ntohl(end->address[0]) >> 24) == 127;
    return !memcmp(end->address, loopback, 12) && ntohl(end->address[3]) == 1;
}

// Asks the kernel for the socket of this machine that is connected from `theirs` to `ours`. Returns 1 and its user; 0 if
// there is none, or no process has it any more; -1 if the kernel does not answer.
static int find_user(const End *theirs, const End *ours, uint32_t *user) {
    struct {
        struct nlmsghdr header;
        struct inet_diag_req_v2 question;
    } message = {.header = {.nlmsg_len = sizeof message, .nlmsg_type = SOCK_DIAG_BY_FAMILY, .nlmsg_flags = NLM_F_REQUEST},
                 .question = {.sdiag_family = theirs->family, .sdiag_protocol = IPPROTO_TCP, .idiag_states = -1}};
    message.question.id.idiag_sport = theirs->port;
    message.question.id.idiag_dport = ours->port;
    memcpy(message.question.id.idiag_src, theirs->address, 16);
    memcpy(message.question.id.idiag_dst, ours->address, 16);
    message.question.id.idiag_cookie[0] = message.question.id.idiag_cookie[1] = INET_DIAG_NOCOOKIE;

    union {
        struct nlmsghdr header;
        char bytes[4096];
    } answer;
    int kernel = socket(AF_NETLINK, SOCK_DGRAM | SOCK_CLOEXEC, NETLINK_SOCK_DIAG);
    if (kernel < 0) return -1;
    ssize_t length = send(kernel, &message, sizeof message, 0);
    if (length == sizeof message) length = recv(kernel, &answer, sizeof answer, 0);
    close(kernel);
    if (length < (ssize_t)sizeof answer.header) return -1;
    if (answer.header.nlmsg_type == NLMSG_ERROR) {
        if (length < (ssize_t)NLMSG_LENGTH(sizeof(struct nlmsgerr))) return -1;
        return ((struct nlmsgerr *)NLMSG_DATA(&answer.header))->error == -ENOENT ? 0 : -1;
    }
    if (length < (ssize_t)NLMSG_LENGTH(sizeof(struct inet_diag_msg))) return -1;
    const struct inet_diag_msg *found = NLMSG_DATA(&answer.header);
    *user = found->idiag_uid;
    return found->idiag_state == ESTABLISHED && found->idiag_inode != 0;  // a closed socket has no owner
}

int other_end(int connection) {
    struct sockaddr_storage here, there;
    socklen_t here_length = sizeof here, there_length = sizeof there;
    End ours, theirs;
    uint32_t user;
    if (getsockname(connection, (struct sockaddr *)&here, &here_length)) return GONE;
    if (here.ss_family != AF_INET && here.ss_family != AF_INET6) return UNKNOWN;
    if (getpeername(connection, (struct sockaddr *)&there, &there_length)) return GONE;
    if (!read_end(&here, &ours) || !read_end(&there, &theirs)) return UNKNOWN;
    int found = find_user(&theirs, &ours, &user);
    if (found == 1) return user == geteuid() ? THIS_USER : ANOTHER_USER;
    if (is_loopback(&theirs) || is_same_address(&theirs, &ours)) return GONE;  // it was on this machine
    return found == 0 ? UNKNOWN : GONE;
}

static atomic_int has_reported;

// Tells the user once that a process of another user was refused.
void report_refusal(void) {
    static const char line[] =
        "refused: a process of another user of this machine tried to connect to a process of this run\n";
    if (!atomic_exchange(&has_reported, 1)) {
        ssize_t written = write(2, line, sizeof line - 1);
        (void)written;
    }
}

static int checked(int connection) {
    if (connection < 0) return connection;
    int end = other_end(connection);
    if (end == THIS_USER || end == UNKNOWN) return connection;
    if (end == ANOTHER_USER) report_refusal();
    close(connection);
    errno = EAGAIN;  // as if nobody had connected
    return -1;
}

static int checked_accept(int listener, struct sockaddr *address, socklen_t *length) {
    return checked(accept(listener, address, length));
}

static int checked_accept4(int listener, struct sockaddr *address, socklen_t *length, int flags) {
    return checked(accept4(listener, address, length, flags));
}

static uintptr_t absolute(uintptr_t start, uintptr_t pointer) {
    return pointer < start ? start + pointer : pointer;  // not every dynamic linker makes these pointers absolute
}

static int write_pointer(uintptr_t place, uintptr_t function) {
    uintptr_t bytes = (uintptr_t)sysconf(_SC_PAGESIZE), page = place & -bytes;
    if (mprotect((void *)page, bytes, PROT_READ | PROT_WRITE)) return 0;
    *(uintptr_t *)place = function;
    return 1;
}

// Replaces the entries of the library's table of functions of other libraries (the global offset table).
static int guard_library(struct dl_phdr_info *library, size_t size, void *count) {
    (void)size;
    const char *name = strrchr(library->dlpi_name, '/');
    if (strcmp(name ? name + 1 : library->dlpi_name, "libtorch_cpu.so")) return 0;
    uintptr_t start = library->dlpi_addr, relocations = 0, relocation_bytes = 0, symbols = 0, texts = 0;
    for (int header = 0; header < library->dlpi_phnum; header++) {
        if (library->dlpi_phdr[header].p_type != PT_DYNAMIC) continue;
        for (ElfW(Dyn) *entry = (void *)(start + library->dlpi_phdr[header].p_vaddr); entry->d_tag; entry++) {
            if (entry->d_tag == DT_JMPREL) relocations = absolute(start, entry->d_un.d_ptr);
            if (entry->d_tag == DT_PLTRELSZ) relocation_bytes = entry->d_un.d_val;
            if (entry->d_tag == DT_SYMTAB) symbols = absolute(start, entry->d_un.d_ptr);
            if (entry->d_tag == DT_STRTAB) texts = absolute(start, entry->d_un.d_ptr);
            if (entry->d_tag == DT_PLTREL && entry->d_un.d_val != DT_RELA) return 1;
        }
    }
    if (!relocations || !symbols || !texts) return 1;
    const ElfW(Rela) *first = (void *)relocations, *end = (void *)(relocations + relocation_bytes);
    for (const ElfW(Rela) *entry = first; entry < end; entry++) {
        const ElfW(Sym) *symbol = (const ElfW(Sym) *)symbols + (entry->r_info >> 32);
        const char *text = (const char *)texts + symbol->st_name;
        uintptr_t function = 0;
        if (!strcmp(text, "accept")) function = (uintptr_t)checked_accept;
        if (!strcmp(text, "accept4")) function = (uintptr_t)checked_accept4;
        if (function) *(int *)count += write_pointer(start + entry->r_offset, function);
    }
    return 1;
}

// Returns how many functions of torch's library were replaced.
int guard_torch(void) {
    int count = 0;
    dl_iterate_phdr(guard_library, &count);
    return count;
}
