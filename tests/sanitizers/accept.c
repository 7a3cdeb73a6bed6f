// Accepts connections through `own_user.c`, built with a sanitizer, from several threads: those of this user are
// accepted, those of another user refused (as root), and those that end at once are either.
//
//     accept CONNECTIONS SEED

#include "own_user.c"
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>

enum { CLIENTS = 3, SERVERS = 2, STRANGER = 65534 };

int torch_accept(int listener, int is_fourth);

static int listeners[2]; // of IPv4, and of IPv6 with addresses of IPv4
static uint16_t ports[2];
static int connections, are_over;
static int from_own, from_others;

static void fail(const char *text) {
    perror(text);
    _exit(1);
}

static void listen_on(int number) {
    struct sockaddr_in6 six = {.sin6_family = AF_INET6};
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr *name = number ? (struct sockaddr *)&six : (struct sockaddr *)&four;
    socklen_t length = number ? sizeof six : sizeof four;
    listeners[number] = socket(name->sa_family, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (bind(listeners[number], name, length) || listen(listeners[number], 64)) fail("listen");
    if (getsockname(listeners[number], name, &length)) fail("getsockname");
    ports[number] = number ? six.sin6_port : four.sin_port;
}

// Connects, and says who it is. Returns whether it was answered.
static int connect_as(int number, const char *who, int ends_at_once) {
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = ports[1], .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = ports[number % 2]};
    four.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int is_six = number == 2;
    int connection = socket(is_six ? AF_INET6 : AF_INET, SOCK_STREAM, 0);
    char answer = 0;
    if (connect(connection, is_six ? (struct sockaddr *)&six : (struct sockaddr *)&four, is_six ? sizeof six : sizeof four))
        fail("connect");
    if (!ends_at_once && send(connection, who, 1, MSG_NOSIGNAL) == 1 && recv(connection, &answer, 1, 0) < 0) answer = 0;
    close(connection);
    return answer == 'y';
}

static void *run_client(void *seed) {
    unsigned state = (unsigned)(uintptr_t)seed;
    for (int i = 0; i < connections; i++) {
        const int ends_at_once = rand_r(&state) % 4 == 0;
        if (!connect_as(rand_r(&state) % 3, "o", ends_at_once) && !ends_at_once) fail("this user was refused");
    }
    return NULL;
}

static void *run_server(void *seed) {
    unsigned state = (unsigned)(uintptr_t)seed;
    while (!__atomic_load_n(&are_over, __ATOMIC_ACQUIRE)) {
        struct pollfd ready[2] = {{listeners[0], POLLIN, 0}, {listeners[1], POLLIN, 0}};
        poll(ready, 2, 20);
        for (int number = 0; number < 2; number++) {
            int connection = torch_accept(listeners[number], rand_r(&state) % 2);
            if (connection < 0) continue;
            char who = 0;
            if (recv(connection, &who, 1, 0) == 1) {
                __atomic_add_fetch(who == 'o' ? &from_own : &from_others, 1, __ATOMIC_RELAXED);
                send(connection, "y", 1, MSG_NOSIGNAL);
            }
            close(connection);
        }
    }
    return NULL;
}

static void attack(void) {
    if (setgid(STRANGER) || setuid(STRANGER)) fail("another user");
    for (int i = 0; i < connections; i++)
        if (connect_as(i % 3, "x", i % 5 == 0)) _exit(2);
    _exit(0);
}

int main(int count, char **words) {
    if (count != 3 || guard_torch() != 2) fail("accept CONNECTIONS SEED; functions of torch were not replaced");
    connections = atoi(words[1]);
    const uintptr_t seed = atoi(words[2]);
    listen_on(0), listen_on(1);
    pid_t stranger = geteuid() ? -1 : fork();
    if (stranger == 0) attack();
    pthread_t servers[SERVERS], clients[CLIENTS];
    for (uintptr_t i = 0; i < SERVERS; i++) pthread_create(&servers[i], NULL, run_server, (void *)(seed + i));
    for (uintptr_t i = 0; i < CLIENTS; i++) pthread_create(&clients[i], NULL, run_client, (void *)(seed + 10 + i));
    for (int i = 0; i < CLIENTS; i++) pthread_join(clients[i], NULL);
    int status = 0;
    if (stranger > 0 && (waitpid(stranger, &status, 0) < 0 || status)) fail("another user was accepted");
    __atomic_store_n(&are_over, 1, __ATOMIC_RELEASE);
    for (int i = 0; i < SERVERS; i++) pthread_join(servers[i], NULL);
    if (from_others || !from_own) fail("another user was accepted");
    printf("%d connections\n", from_own);
}
