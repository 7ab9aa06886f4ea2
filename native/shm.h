/* Shared memory that carries the bytes of a connection within a host; see shm.c. */
#ifndef ZP_SHM_H
#define ZP_SHM_H

#include <sys/types.h>

struct iovec;
struct zp__connection;

typedef struct zp__shm zp__shm;

/* Makes the memory for the bytes that this end will send, and passes it to the other end. Sets NULL if the socket is
 * not a Unix-domain one, or this build has no shared memory; then bytes go over the socket. Returns 0 or -errno. */
int zp__shm_open(int fd, zp__shm **shm);

/* Frees it. NULL is legal. */
void zp__shm_close(zp__shm *shm);

/* Like zp__sock_send() and zp__sock_receive(), on a connection that has `shm`. -EPROTO: the other end broke the
 * rules. */
ssize_t zp__shm_send(struct zp__connection *c, const struct iovec *iov, int count);
ssize_t zp__shm_receive(struct zp__connection *c, const struct iovec *iov, int count);

#endif
