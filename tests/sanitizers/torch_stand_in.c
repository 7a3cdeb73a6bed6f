// Stands for `libtorch_cpu.so`, whose calls of `accept` and `accept4` are replaced.

#define _GNU_SOURCE
#include <stddef.h>
#include <sys/socket.h>

int torch_accept(int listener, int is_fourth) {
    return is_fourth ? accept4(listener, NULL, NULL, SOCK_CLOEXEC) : accept(listener, NULL, NULL);
}
