/* Sockets, and the clock; see sock.c. */
#ifndef ZP_SOCK_H
#define ZP_SOCK_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct iovec;

int zp__sock_prepare(int fd, uint32_t path_timeout_ms);
bool zp__sock_is_local(int fd);
uint64_t zp__sock_silence_ms(int fd);
ssize_t zp__sock_send(int fd, struct iovec *iov, int count);
ssize_t zp__sock_receive(int fd, struct iovec *iov, int count);
bool zp__sock_has_unsent(int fd);
uint64_t zp__now_ns(void);

#endif
